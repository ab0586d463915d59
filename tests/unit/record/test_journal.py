"""The journal: what was written is there, and what cannot be written is said."""

import sqlite3
from pathlib import Path

import pytest

from plimsoll_api.admin import DrainMode
from plimsoll_sidecar.detect.assessment import Kind
from plimsoll_sidecar.govern.command import Command, Verb
from plimsoll_sidecar.govern.incident import Incident, Phase
from plimsoll_sidecar.govern.restart_budget import Restart
from plimsoll_sidecar.govern.state import GovernorState
from plimsoll_sidecar.record.journal import KEPT_INCIDENTS, Engine, Journal, JournalError


def incident(number: int = 1, phase: Phase = Phase.OPEN) -> Incident:
    return Incident(
        name=f"pod-{number:08x}",
        kind=Kind.STALL,
        epoch="ab:1",
        opened_at=float(number),
        phase=phase,
    )


def test_a_state_with_a_command_under_way_comes_back(tmp_path: Path) -> None:
    command = Command(
        verb=Verb.RESTART_WORKER,
        operation_id="0001-04-restart-worker",
        incident="pod-00000001",
        epoch="ab:1",
        mode=DrainMode.CARRY,
        deadline_s=30.0,
    )
    restarts = [Restart(at=1.0, epoch="ab:0")]
    state = GovernorState(
        incidents=[incident()], pending=command, restarts=restarts, epoch="ab:1", exhausted=True
    )
    engine = Engine(capabilities=frozenset({"trim"}), frontend_pid=7, frontend_started=99)
    first = Journal(tmp_path / "journal.sqlite")
    first.write(state, state.incidents, engine)
    first.close()
    again = Journal(tmp_path / "journal.sqlite")
    assert again.load() == (state, engine)
    assert again.recent(5) == [incident()]


def test_a_revision_is_published_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", publishes=True)
    journal.write(GovernorState(), [incident()])
    journal.write(GovernorState(), [incident(phase=Phase.TRIMMING)])
    ((revision, newest),) = journal.unpublished()
    assert newest.phase is Phase.TRIMMING
    journal.write(GovernorState(), [incident(phase=Phase.RESOLVED)])
    journal.published(newest.name, revision)
    assert [found.phase for _, found in journal.unpublished()] == [Phase.RESOLVED]
    journal.published(newest.name, revision + 1)
    assert journal.unpublished() == []


def test_only_incidents_that_arrived_are_forgotten(tmp_path: Path) -> None:
    many = [incident(number, Phase.RESOLVED) for number in range(KEPT_INCIDENTS + 50)]
    publishing = Journal(tmp_path / "publishing.sqlite", publishes=True)
    publishing.write(GovernorState(), many)
    assert len(publishing.unpublished()) == KEPT_INCIDENTS + 50
    local = Journal(tmp_path / "local.sqlite")
    local.write(GovernorState(), many)
    assert len(local.recent(1000)) == KEPT_INCIDENTS


@pytest.mark.parametrize("damage", [b"not a database at all" * 300, b""])
def test_a_damaged_file_is_moved_aside(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(damage)
    journal = Journal(path)
    journal.write(GovernorState(exhausted=True))
    assert journal.load()[0].exhausted
    aside = list(tmp_path.glob("*.corrupt-*"))
    assert [found.read_bytes() for found in aside] == ([damage] if damage else [])


@pytest.mark.parametrize("body", [b'{"epoch": 7}', b'{"epoch": "\xff\xfe"}'])
def test_a_state_of_another_shape_is_moved_aside(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO state VALUES ('governor', ?)", (body,))
    db.close()
    assert Journal(path).load()[0] == GovernorState()
    assert list(tmp_path.glob("*.corrupt-*"))


def test_a_full_volume_loses_nothing_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.write(GovernorState(epoch="ab:1"), [incident()])
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    many = [incident(number) for number in range(2, 500)]
    with pytest.raises(JournalError, match=r"journal\.sqlite.*full.*make room"):
        journal.write(GovernorState(epoch="ab:2"), many)
    assert journal.load()[0].epoch == "ab:1"
    assert journal.recent(1000) == [incident()]
    journal._db.execute("PRAGMA max_page_count = 100000")
    journal.write(GovernorState(epoch="ab:2"), many)
    assert len(journal.recent(1000)) == 499


def test_a_folder_that_is_absent_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="absent"):
        Journal(tmp_path / "absent" / "journal.sqlite")
