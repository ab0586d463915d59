"""``/state``: what a terminal view and the page show of one replica."""

from __future__ import annotations

import msgspec

from plimsoll_api.admin import LedgerEntry
from plimsoll_api.supervision import Action
from plimsoll_sidecar.detect.assessment import Assessment
from plimsoll_sidecar.govern.incident import Incident


class View(msgspec.Struct, kw_only=True):
    """Encoded after each sample, decoded by whoever shows it. Times are Unix seconds.

    ``budgets`` is the MemoryPolicy in force.
    """

    time: float
    service: str
    mode: str
    engine_state: str | None
    epoch: str | None
    assessment: Assessment
    budgets: msgspec.Raw
    open: list[Incident]
    recent: list[Incident]
    restarts_left: int
    restart_budget_exhausted: bool
    journal_error: str | None
    config_error: str | None
    ladder: list[Action] = []
    ledger: list[LedgerEntry] = []
