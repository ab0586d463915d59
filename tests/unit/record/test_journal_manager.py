"""What was published is not published again, also while the volume fails.

Tests ``record/journal_manager.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_sidecar.clock import ClockReading
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.state import GovernorState
from plimsoll_sidecar.record import journal_manager
from plimsoll_sidecar.record.journal import MAX_UNPUBLISHED_INCIDENTS
from plimsoll_sidecar.record.journal_manager import JournalManager
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.record.publisher import Publisher


class ApiServer:
    """Takes each incident at once."""

    def __init__(self) -> None:
        self.published: list[tuple[str, int]] = []
        self.acknowledged: list[tuple[str, int]] = []

    def queue_incident(self, revision: int, incident: Incident) -> None:
        self.published.append((incident.name, revision))
        self.acknowledged.append((incident.name, revision))

    def take_acknowledged(self) -> list[tuple[str, int]]:
        found, self.acknowledged = self.acknowledged, []
        return found


def test_what_the_journal_cannot_note_is_published_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_manager, "WRITE_RETRY_INTERVAL_S", 0.0)
    api = ApiServer()
    journal = JournalManager(tmp_path, cast(Publisher, api), Metrics(), lambda incident: False)
    journal.open()
    incident = Incident(name="p-1", kind=IncidentKind.STALL, epoch="a:1", opened_at=1.0)
    journal.unwritten[incident.name] = incident
    assert journal.write(GovernorState(), ClockReading(1.0, 1.0, "boot"))
    assert journal._journal is not None
    journal._journal._db.execute("PRAGMA query_only = ON")
    for _ in range(10):
        journal.mark_published()
        journal.publish()
    assert api.published == [("p-1", 1)]
    assert len(caplog.records) == 1
    journal._journal._db.execute("PRAGMA query_only = OFF")
    journal.mark_published()
    assert journal._journal.read_unpublished() == []
    incident.message = "later"
    journal.unwritten[incident.name] = incident
    assert journal.write(GovernorState(), ClockReading(2.0, 2.0, "boot"))
    assert api.published == [("p-1", 1), ("p-1", 2)]
    journal.close()


def test_a_full_volume_bounds_the_ended_incidents_and_loses_no_open_one(tmp_path: Path) -> None:
    journal = JournalManager(tmp_path, None, Metrics(), lambda incident: False)
    journal.open()
    assert journal._journal is not None
    journal._journal._db.execute("PRAGMA query_only = ON")
    clock, total = ClockReading(1.0, 1.0, "boot"), 3 * MAX_UNPUBLISHED_INCIDENTS
    for number in range(total):
        incident = Incident(
            name=f"p-{number}", kind=IncidentKind.STALL, epoch="a:1", opened_at=float(number)
        )
        journal.add_changed(incident)
        if number:  # the first one stays open
            incident.phase = IncidentPhase.RESOLVED
            journal.add_changed(incident)
    assert not journal.write(GovernorState(), clock)
    assert len(journal.unwritten) == MAX_UNPUBLISHED_INCIDENTS
    newest = [f"p-{number}" for number in range(total - MAX_UNPUBLISHED_INCIDENTS + 1, total)]
    assert list(journal.unwritten) == ["p-0", *newest]
    journal._journal._db.execute("PRAGMA query_only = OFF")
    assert journal.write(GovernorState(), clock)
    assert journal.unwritten == {}
    journal.close()
