"""Output of the supervisor's ``ask`` program, which the command line runs in the pod."""

from __future__ import annotations

import msgspec

CURRENT_EPOCH = "current"
"""Value of ``--expected-epoch`` that accepts any epoch of the engine."""


class ActionAnswer(msgspec.Struct, omit_defaults=True):
    """Answer of the ``ask`` program to an action or to ``status``, as one line of JSON.

    The answer to an action has an ``outcome``, but no fields after ``message``. The answer to
    ``status`` has these fields, but no ``outcome``.

    Attributes:
        host_memory: The source of host memory; empty if host memory is unknown.
        device_memory: The source of device memory; empty if device memory is unknown.
        device_reasons: Why other sources of device memory are not used.
        shared_orphan: The bytes of files in ``/dev/shm`` that no process holds; null if the
            supervisor does not see ``/dev/shm``.
        shared_memory_error: Why ``/dev/shm`` could not be read; empty if it could.
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
