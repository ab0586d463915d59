"""The answer of the supervisor's ``ask`` program, which the command line runs beside it."""

from __future__ import annotations

import msgspec

CURRENT = "current"
"""In place of an epoch: whichever the engine is in, for who did not look."""


class ActionAnswer(msgspec.Struct, omit_defaults=True):
    """What is printed, as one line of JSON. ``outcome`` is empty for ``status``.

    For ``status`` also what this container sees: the sources of host and of device memory, empty
    where it sees none, what NVML says when it is asked, and why each source of device memory that
    is not in use is not. ``shared_orphan`` is the bytes of ``/dev/shm`` that no process holds,
    ``shared_memory_error`` why that is unknown; both are unset where it is not watched.
    ``out_of_service`` has the seconds for which each reason still keeps the pod unready, ``unseen``
    why the supervisor lacks a signal, by name (``engine``, ``metrics``, ``host``, …).
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
