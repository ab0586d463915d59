"""The journal: what was written is there, and what cannot be written is said."""

import contextlib
import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plimsoll_api.admin import DrainMode
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_sidecar.govern.command import Command, Verb
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.restart_budget import Restart
from plimsoll_sidecar.govern.state import GovernorState
from plimsoll_sidecar.record import journal as journal_file
from plimsoll_sidecar.record import storage
from plimsoll_sidecar.record.journal import (
    MAX_INCIDENTS,
    MAX_INCIDENTS_PER_READ,
    MAX_UNPUBLISHED_INCIDENTS,
    Journal,
    JournalError,
)
from plimsoll_sidecar.record.storage import DamagedParts, LastKnownEngine


def incident(number: int = 1, phase: IncidentPhase = IncidentPhase.OPEN) -> Incident:
    return Incident(
        name=f"pod-{number:08x}",
        kind=IncidentKind.STALL,
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
    engine = LastKnownEngine(capabilities=frozenset({"trim"}), frontend_pid=7, frontend_started=99)
    first = Journal(tmp_path / "journal.sqlite")
    first.write(state, state.incidents, engine)
    first.close()
    again = Journal(tmp_path / "journal.sqlite")
    assert again.load() == (state, engine)
    assert again.read_recent(5) == [incident()]


def test_a_revision_is_published_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", is_publishing=True)
    journal.write(GovernorState(), [incident()])
    journal.write(GovernorState(), [incident(phase=IncidentPhase.TRIMMING)])
    ((revision, newest),) = journal.read_unpublished()
    assert newest.phase is IncidentPhase.TRIMMING
    journal.write(GovernorState(), [incident(phase=IncidentPhase.RESOLVED)])
    journal.mark_published(newest.name, revision)
    assert [found.phase for _, found in journal.read_unpublished()] == [IncidentPhase.RESOLVED]
    journal.mark_published(newest.name, revision + 1)
    assert journal.read_unpublished() == []


def test_only_incidents_that_arrived_are_forgotten(tmp_path: Path) -> None:
    many = [incident(number, IncidentPhase.RESOLVED) for number in range(MAX_INCIDENTS + 50)]
    publishing = Journal(tmp_path / "publishing.sqlite", is_publishing=True)
    publishing.write(GovernorState(), many)
    arrived: set[str] = set()
    while offered := publishing.read_unpublished():
        assert len(offered) <= MAX_INCIDENTS_PER_READ
        for revision, one in offered:
            publishing.mark_published(one.name, revision)
            arrived.add(one.name)
    assert len(arrived) == MAX_INCIDENTS + 50
    local = Journal(tmp_path / "local.sqlite")
    local.write(GovernorState(), many)
    assert len(local.read_recent(1000)) == MAX_INCIDENTS


def test_an_api_server_that_takes_nothing_costs_the_oldest(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", is_publishing=True)
    still_open = incident(0)
    many = [
        incident(1 + number, IncidentPhase.RESOLVED)
        for number in range(MAX_UNPUBLISHED_INCIDENTS + 9)
    ]
    journal.write(GovernorState(), [still_open, *many])
    kept = journal.read_recent(2 * MAX_UNPUBLISHED_INCIDENTS)
    assert len(kept) == MAX_UNPUBLISHED_INCIDENTS + 1
    assert kept[0].name == many[-1].name
    offered = journal.read_unpublished()
    assert len(offered) == MAX_INCIDENTS_PER_READ
    assert still_open.name in {one.name for _, one in offered}


@pytest.mark.parametrize("damage", [b"not a database at all" * 300, b""])
def test_a_damaged_file_is_set_aside(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path, lost = tmp_path / "journal.sqlite", list[str]()
    first = Journal(path)
    first.write(GovernorState(restarts=[Restart(at=5.0, epoch="ab:0")], exhausted=True))
    first.close()
    path.write_bytes(damage)
    journal = Journal(path, on_damage=lost.append)
    state, _ = journal.load()
    assert [restart.epoch for restart in state.restarts] == ["ab:0"], "a spent budget stays spent"
    assert state.exhausted
    assert lost == ["file"]
    assert str(path) in caplog.text
    kept = [name for name in journal.set_aside_names if not name.endswith("-wal")]
    assert len(kept) == 1
    if damage:
        assert (tmp_path / "set-aside" / kept[0]).read_bytes() == damage
    journal.write(state, [incident()])
    journal.close()
    assert Journal(path, on_damage=lost.append).read_recent(5) == [incident()]
    assert lost == ["file"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"epoch": 7}', b'{"epoch": "\xff\xfe"}', b'{"restarts": [{"at": 1e300, "epoch": "x"}]}',
        b'{"x": ' + b"[" * 100_000, 5, None, "text",
    ],
)  # fmt: skip
def test_a_state_of_another_shape_is_set_aside_alone(tmp_path: Path, body: object) -> None:
    path, lost = tmp_path / "journal.sqlite", list[str]()
    first = Journal(path)
    first.write(GovernorState(restarts=[Restart(at=5.0, epoch="ab:0")]), [incident()])
    first.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE state SET body = IFNULL(?, X''), checksum = NULL", (body,))
    db.close()
    journal = Journal(path, on_damage=lost.append)
    state, _ = journal.load()
    assert [restart.epoch for restart in state.restarts] == ["ab:0"]
    assert lost == ["row"]
    assert journal.set_aside_names == ["0001-state-governor.json"]
    assert journal.read_recent(5) == [incident()], "the rest is there"
    journal.write(GovernorState(epoch="ab:9"))
    journal.close()
    assert Journal(path, on_damage=lost.append).load()[0].epoch == "ab:9"
    assert lost == ["row"]


def test_an_undecodable_incident_is_set_aside_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, lost = tmp_path / "journal.sqlite", list[str]()
    first = Journal(path, is_publishing=True)
    first.write(GovernorState(), [incident(1), incident(2), incident(3)])
    first.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE incidents SET body = replace(body, 'Stall', 'Stal1') WHERE opened_at=2")
    db.close()
    journal = Journal(path, is_publishing=True, on_damage=lost.append)
    for _ in range(3):
        assert journal.read_recent(5) == [incident(3), incident(1)]
        assert [found.name for _, found in journal.read_unpublished()] == [
            incident(1).name, incident(3).name,
        ]  # fmt: skip
    assert lost == ["row"]
    assert "incidents-pod-00000002" in caplog.text
    assert "make room" not in caplog.text
    (kept,) = journal.set_aside_names
    assert b"Stal1" in (tmp_path / "set-aside" / kept).read_bytes()


def test_a_row_that_cannot_be_set_aside_stops_nothing(tmp_path: Path) -> None:
    path, lost = tmp_path / "journal.sqlite", list[str]()
    journal = Journal(path, on_damage=lost.append)
    journal.write(GovernorState(), [incident(1), incident(2)])
    journal._db.execute("UPDATE incidents SET body = X'00' WHERE opened_at = 1")
    (tmp_path / "set-aside").write_text("no folder")
    for _ in range(3):
        assert journal.read_recent(5) == [incident(2)]
    assert lost == ["row"]


@pytest.mark.parametrize("how", ["emptied", "removed", "overwritten"])
def test_a_file_damaged_while_it_is_in_use_is_replaced(tmp_path: Path, how: str) -> None:
    path, lost = tmp_path / "journal.sqlite", list[str]()
    journal = Journal(path, on_damage=lost.append)
    state = GovernorState(incidents=[incident(1)], restarts=[Restart(at=5.0, epoch="ab:0")])
    journal.write(state, state.incidents)
    journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if how == "removed":
        path.unlink()
    else:
        size = path.stat().st_size
        path.write_bytes(b"" if how == "emptied" else b"\x55" * size)
    journal.write(state, [incident(2)])
    assert journal.read_recent(5) == [incident(2), incident(1)], "what is open is written again"
    journal.close()
    again = Journal(path, on_damage=lost.append)
    assert again.load()[0].restarts == state.restarts
    assert lost == ["file"]


def test_what_is_set_aside_is_bounded(tmp_path: Path) -> None:
    aside = DamagedParts(tmp_path / "set-aside")
    for number in range(3 * storage.MAX_SET_ASIDE_FILES):
        aside.store(f"../row {number}", b"x" * (2 << 20))
    assert len(aside.list_names()) == storage.MAX_SET_ASIDE_FILES
    assert aside.list_names()[-1].endswith("row_35")
    assert (aside.folder / aside.list_names()[0]).stat().st_size == storage.MAX_SET_ASIDE_ROW_BYTES
    assert os.listdir(tmp_path) == ["set-aside"]


def test_a_journal_of_an_older_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript(journal_file._SCHEMA.replace(", checksum INTEGER", ""))
        db.execute("INSERT INTO state VALUES ('governor', ?)", (b'{"epoch":"ab:3"}',))
    db.close()
    journal = Journal(path)
    assert journal.load()[0].epoch == "ab:3"
    journal.write(GovernorState(epoch="ab:4"), [incident()])
    assert journal.read_recent(1) == [incident()]
    assert journal.set_aside_names == []


def test_two_that_open_a_new_journal_at_once_damage_nothing(tmp_path: Path) -> None:
    """A tool that reads it may be there as early as the supervisor that makes it."""
    for number in range(20):
        path = tmp_path / str(number) / "journal.sqlite"
        path.parent.mkdir()
        together = threading.Barrier(3)

        def make(path: Path = path, together: threading.Barrier = together) -> None:
            together.wait(10)
            with contextlib.suppress(JournalError):  # it is locked, and opened again later
                Journal(path).close()

        with ThreadPoolExecutor(3) as threads:
            for made in [threads.submit(make) for _ in range(3)]:
                made.result()
        assert not (path.parent / "set-aside").exists()


def test_a_full_volume_loses_nothing_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.write(GovernorState(epoch="ab:1"), [incident()])
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    many = [incident(number) for number in range(2, 500)]
    with pytest.raises(JournalError, match=r"journal\.sqlite.*full.*free space"):
        journal.write(GovernorState(epoch="ab:2"), many)
    assert journal.load()[0].epoch == "ab:1"
    assert journal.read_recent(1000) == [incident()]
    journal._db.execute("PRAGMA max_page_count = 100000")
    journal.write(GovernorState(epoch="ab:2"), many)
    assert len(journal.read_recent(1000)) == 499


def test_a_folder_that_is_absent_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="absent"):
        Journal(tmp_path / "absent" / "journal.sqlite")
