"""Output of the supervisor's ``ask`` program, which the command line runs in the container."""

from __future__ import annotations

import msgspec

CURRENT = "current"
"""Placeholder for an epoch, for callers that accept the engine's current epoch."""


class ActionAnswer(msgspec.Struct, omit_defaults=True):
    """Response to an action or to ``status``, printed as one line of JSON.

    ``status`` leaves ``outcome`` empty and sets the other fields. ``host_memory`` and
    ``device_memory`` are the sources of these values, or empty. ``device_reasons`` say why other
    sources of device memory are not used. ``shared_orphan`` is the size in bytes of files in
    ``/dev/shm`` that no process holds; if it is unknown, ``shared_memory_error`` is the reason.
    Both are unset if the supervisor cannot read ``/dev/shm``. ``out_of_service`` maps each reason
    that keeps the pod unready to its remaining seconds. ``unseen`` maps missing signals
    (``engine``, ``metrics``, ``host``, …) to reasons. ``budgets`` are messages about leak budgets
    that do not fit the observed growth.
    """

    epoch: str | None = None
    state: str | None = None
    version: str | None = None
    capabilities: list[str] = []
    outcome: str = ""
    message: str = ""
    supervisor: str = ""
    host_memory: str = ""
    device_memory: str = ""
    nvml: str = ""
    device_reasons: list[str] = []
    shared_orphan: int | None = None
    shared_memory_error: str = ""
    out_of_service: dict[str, float] = {}
    unseen: dict[str, str] = {}
    budgets: list[str] = []
