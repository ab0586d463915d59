"""Output of the supervisor's ``ask`` program, which the command line runs in the container."""

from __future__ import annotations

import msgspec

CURRENT_EPOCH = "current"
"""Placeholder for an epoch, for callers that accept the engine's current epoch."""


class ActionAnswer(msgspec.Struct, omit_defaults=True):
    """Response to an action or to ``status``, printed as one line of JSON.

    Only the response to ``status`` has the fields after ``message``; it has no ``outcome``.

    Attributes:
        host_memory, device_memory: The sources of these values; empty if they are unknown.
        device_reasons: Why other sources of device memory are not used.
        shared_orphan: The bytes of files in ``/dev/shm`` that no process holds. Like
            ``shared_memory_error``, it is unset if the supervisor cannot read ``/dev/shm``.
        shared_memory_error: Why ``shared_orphan`` is unknown.
        out_of_service: The remaining seconds for each reason that keeps the pod unready.
        unseen: Why a signal is missing, by the name of the signal (``engine``, ``metrics``,
            ``host``, …).
        budgets: Messages about leak budgets that do not fit the observed growth.

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
