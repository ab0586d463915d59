"""Content of ``/state``: the supervisor's view of one replica, for the live view and the page."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from plimsoll_api.admin import LedgerEntry
from plimsoll_api.assessment import Assessment
from plimsoll_api.incident_record import IncidentRecord
from plimsoll_api.roles import PodRole
from plimsoll_api.supervision import Action


class SignalReason(StrEnum):
    """Reason why a supervisor lacks a signal; logs, metrics and status use the same word."""

    ENGINE_NOT_FOUND = "EngineNotFound"
    ENGINE_SILENT = "EngineSilent"
    HOST_MEMORY_UNREADABLE = "HostMemoryUnreadable"
    DEVICE_MEMORY_UNREADABLE = "DeviceMemoryUnreadable"
    SHARED_MEMORY_UNREADABLE = "SharedMemoryUnreadable"
    METRICS_SILENT = "MetricsSilent"
    METRICS_MISSING = "MetricsMissing"
    METRICS_UNAUTHORIZED = "MetricsUnauthorized"
    METRICS_UNKNOWN_NAMES = "MetricsUnknownNames"
    METRICS_INCOMPLETE = "MetricsIncomplete"
    METRICS_INCONSISTENT = "MetricsInconsistent"


class Signal(msgspec.Struct, frozen=True, omit_defaults=True):
    """Availability of one signal by which the supervisor assesses an engine.

    If the signal is missing, ``reason`` is a :class:`SignalReason`, and ``message`` says what to
    do. Otherwise, both are empty.
    """

    ok: bool = True
    reason: str = ""
    message: str = ""


class View(msgspec.Struct, kw_only=True):
    """Content of ``/state``, written after each sample. Times are in Unix seconds.

    Attributes:
        budgets: The current MemoryPolicy.
        set_aside: Names of damaged journal files, which are kept in ``set-aside`` in the state
            directory.
        out_of_service: The reasons that keep the pod unready (``names.UNREADY_REASONS``), each with
            the time at which it ends.
        signals: The availability of each signal in the newest sample, by name: ``engine``,
            ``metrics``, ``host``, ``device``, ``shared_memory``.
        role: The pod's role in disaggregated or multi-node serving.

    """

    time: float
    service: str
    mode: str
    engine_state: str | None
    epoch: str | None
    assessment: Assessment
    budgets: msgspec.Raw
    open: Sequence[IncidentRecord]
    recent: Sequence[IncidentRecord]
    restarts_left: int
    restart_budget_exhausted: bool
    journal_error: str | None
    config_error: str | None
    ladder: list[Action] = []
    ledger: list[LedgerEntry] = []
    set_aside: list[str] = []
    out_of_service: dict[str, float] = {}
    signals: dict[str, Signal] = {}
    role: PodRole | None = None
