"""A journal damaged at random: the supervisor opens it, keeps its restart budget and acts.

Tests ``record/journal.py`` and ``record/storage.py``.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plimsoll_api.incident_record import JOURNAL_FILE, StepOutcome, StepRecord
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.restart_budget import Restart
from plimsoll_sidecar.govern.state import GovernorState
from plimsoll_sidecar.page import render_page
from plimsoll_sidecar.record.journal import Journal
from plimsoll_sidecar.record.storage import MAX_SET_ASIDE_FILES, SET_ASIDE_FOLDER, LastKnownEngine
from tests.unit.record.test_journal_volume import supervisor

INCIDENTS = 12
RESTART = Restart(at=100.0, epoch="aa:0")
LONG = int(os.environ.get("PLIMSOLL_FUZZ_EXAMPLES", "3000"))


@pytest.fixture(scope="module")
def whole() -> Iterator[Path]:
    """A folder with a journal, part of it in the write-ahead log, as a kill -9 leaves it."""
    with tempfile.TemporaryDirectory() as name:
        used, left = Path(name) / "used", Path(name) / "left"
        used.mkdir()
        journal = Journal(used / JOURNAL_FILE)
        state = GovernorState(restarts=[RESTART], epoch="aa:1")
        for number in range(INCIDENTS):
            step = StepRecord(time=50.0 + number, step="Trim", outcome=StepOutcome.SUCCEEDED)
            incident = Incident(
                name=f"pod-{number:08x}", kind=IncidentKind.HOST_GROWTH, epoch="aa:0",
                timeline=[step], opened_at=50.0 + number, phase=IncidentPhase.RESOLVED,
                message="é" * 300,
            )  # fmt: skip
            journal.write(state, [incident], LastKnownEngine(epoch="aa:1"))
            if number == INCIDENTS // 2:
                journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        shutil.copytree(used, left)
        journal.close()
        logging.disable(logging.CRITICAL)
        yield left
        logging.disable(logging.NOTSET)


def remediates(folder: Path) -> None:
    watching, hands, metrics = supervisor(folder)
    for second in range(15):
        watching.tick(1_000.0 + second)
    assert [command.verb for command in hands.sent] == ["diagnose"], watching.display.state[:500]
    assert RESTART.epoch in {restart.epoch for restart in watching._governor.state.restarts}
    assert b"plimsoll_supervisor_journal_writable 1.0" in metrics.render()
    assert render_page(watching.display.state, watching.display.history.read_points())
    aside = folder / SET_ASIDE_FOLDER
    assert not aside.exists() or len(os.listdir(aside)) <= MAX_SET_ASIDE_FILES
    watching._journal.close()
    again = Journal(folder / JOURNAL_FILE)
    again.load()
    assert any(incident.kind is IncidentKind.STALL for incident in again.read_recent(20))
    again.close()


damage = st.lists(
    st.tuples(
        st.sampled_from([JOURNAL_FILE, f"{JOURNAL_FILE}-wal", f"{JOURNAL_FILE}-shm"]),
        st.sampled_from(["overwrite", "flip", "truncate", "append"]),
        st.floats(0.0, 1.0),
        st.binary(min_size=1, max_size=200),
    ),
    min_size=1,
    max_size=8,
)


def harm(file: Path, how: str, share: float, data: bytes) -> None:
    content = bytearray(file.read_bytes())
    at = int(share * len(content))
    if how == "truncate":
        del content[at:]
    elif how == "append":
        content += data
    elif how == "flip" and at < len(content):
        content[at] ^= data[0] or 1
    else:
        content[at : at + len(data)] = data
    file.write_bytes(content)


def damaged_files(whole: Path, harms: list[tuple[str, str, float, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "state"
        shutil.copytree(whole, folder)
        for file, how, share, data in harms:
            harm(folder / file, how, share, data)
        remediates(folder)


columns = st.sampled_from(["name", "opened_at", "ended", "revision", "published", "body"])
values = st.one_of(
    st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=50),
    st.binary(max_size=200),
)  # fmt: skip


def damaged_rows(whole: Path, harms: list[tuple[int, str, object]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "state"
        shutil.copytree(whole, folder)
        db = sqlite3.connect(folder / JOURNAL_FILE, isolation_level=None)
        for number, column, value in harms:
            keyed = number % (INCIDENTS + 2)
            try:
                if keyed >= INCIDENTS:
                    key = ("governor", "engine")[keyed - INCIDENTS]
                    db.execute("UPDATE state SET body = ? WHERE key = ?", (value, key))
                else:
                    db.execute(
                        f"UPDATE incidents SET {column} = ? WHERE name = ?",
                        (value, f"pod-{keyed:08x}"),
                    )
            except sqlite3.IntegrityError:  # a column that may not be null, or a name twice
                continue
        db.close()
        remediates(folder)


row_damage = st.lists(st.tuples(st.integers(0, 100), columns, values), min_size=1, max_size=6)
quick = settings(
    max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
thorough = settings(max_examples=LONG, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(harms=damage)
def test_a_file_with_damage_anywhere(
    whole: Path, harms: list[tuple[str, str, float, bytes]]
) -> None:
    damaged_files(whole, harms)


@quick
@given(harms=row_damage)
def test_rows_with_anything_in_them(whole: Path, harms: list[tuple[int, str, object]]) -> None:
    damaged_rows(whole, harms)


@pytest.mark.long
@pytest.mark.timeout(1800)
@thorough
@given(harms=damage)
def test_thousands_of_damaged_files(
    whole: Path, harms: list[tuple[str, str, float, bytes]]
) -> None:
    damaged_files(whole, harms)


@pytest.mark.long
@pytest.mark.timeout(1800)
@thorough
@given(harms=row_damage)
def test_thousands_of_damaged_rows(whole: Path, harms: list[tuple[int, str, object]]) -> None:
    damaged_rows(whole, harms)
