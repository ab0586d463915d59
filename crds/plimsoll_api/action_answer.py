"""The output of the supervisor's ``ask`` program, which the command line runs in its container."""

from __future__ import annotations

import msgspec

CURRENT = "current"
"""Stands for an epoch: whichever the engine is in, for callers that did not check."""


class ActionAnswer(msgspec.Struct, omit_defaults=True):
    """The answer, printed as one line of JSON. ``outcome`` is empty for ``status``.

    For ``status``, it also says what this container sees. These are the sources of host and device
    memory (empty if there is none), NVML's answer, and why each unused source of device memory is
    not used. ``shared_orphan`` is the size of ``/dev/shm`` that no process holds, in bytes.
    ``shared_memory_error`` says why that is unknown. Both are unset if it is not watched.
    ``out_of_service`` has the seconds for which each reason still keeps the pod unready. ``unseen``
    says why the supervisor lacks a signal, by name (``engine``, ``metrics``, ``host``, …).
    ``budgets`` says which leak budgets do not fit what the replica was seen to gain.
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
