"""Levels and budgets from journals, traces and series.

Tests ``sidecar/plimsoll_sidecar/tune.py``, ``replay.py`` and ``cli/plimsoll_cli/local/tuning.py``.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from leaklab.series import GIB, MIB, Series, steady
from plimsoll_api.assessment import Assessment, BudgetState
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy, parse_growth_budget
from plimsoll_api.trace import Budgets, EngineInfo, Header, Limits
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.main import app
from plimsoll_sidecar import tune
from plimsoll_sidecar.govern.auto_budget import LearnedBudgets
from plimsoll_sidecar.govern.state import GovernorState
from plimsoll_sidecar.record.journal import Journal
from plimsoll_sidecar.record.storage import read_learned_budgets
from plimsoll_sidecar.replay import TraceWriter, parse_budget

DAY_M = 24 * 60
BEGAN = 20_000 * 86_400
"""Midnight, 4 October 2024."""


def learned(days: int = 2, most: int = 200 * MIB, incident_on: int | None = None) -> LearnedBudgets:
    """Return what days teach on each of which the memory rises to ``most`` every hour."""
    found = LearnedBudgets()
    for minute in range(days * DAY_M + 2):
        grown = most * (minute % 60) // 59
        state = BudgetState(current=GIB + grown, baseline=GIB, unexplained=grown, limit=8 * GIB)
        seen = Assessment(t=float(minute), epoch=1, warm=True, host=state)
        kinds = {IncidentKind.HOST_GROWTH} if minute // DAY_M == incident_on else set()
        found.observe(BEGAN + minute * 60.0, "e", "model 1", seen, kinds)
    return found


def journal(path: Path, found: LearnedBudgets) -> Path:
    one = Journal(path)
    one.write(GovernorState(), learned=found)
    one.close()
    return path


def test_a_journal_gives_level_proposal_and_what_each_day_would_have_caused(
    tmp_path: Path,
) -> None:
    file = journal(tmp_path / "journal.sqlite", learned(days=5, incident_on=4))
    (host,) = tune.make_tunings(
        read_learned_budgets(file), MemoryPolicy(host=parse_growth_budget("Auto"))
    )
    assert host.level == {"1h": 200 * MIB, "6h": 200 * MIB, "24h": 200 * MIB}
    assert (host.proposal, host.limit, host.starts) == (300 * MIB, 8 * GIB, [GIB])
    assert [(day.date, day.incident) for day in host.days[:5]] == [
        ("2024-10-04", False), ("2024-10-05", False), ("2024-10-06", False),
        ("2024-10-07", False), ("2024-10-08", True),
    ]  # fmt: skip
    assert not any(day.spends for day in host.days)


def test_tune_prints_it_for_people_and_programs(tmp_path: Path) -> None:
    file = journal(tmp_path / "journal.sqlite", learned())
    done = CliRunner().invoke(app, ["tune", str(file)])
    assert done.exit_code == 0, done.output
    assert "after a start, a replica uses up to 1.0 GiB" in done.stdout
    assert "the recommended budget is 300 MiB within 24h" in done.stdout
    assert "growthBudget: 300Mi" in done.stdout
    assert "host memory needs 1.2 GiB at the current load" in done.stdout
    assert "memory: 1280Mi" in done.stdout, "the most that it held, in steps of 256 MiB"
    assert "memory: 1536Mi" in done.stdout, "and its budget"
    assert "less than a day" not in done.stdout
    done = CliRunner().invoke(app, ["tune", str(file), "-o", "json"])
    assert json.loads(done.stdout)[0]["usual"] == 200 * MIB
    empty = journal(tmp_path / "empty.sqlite", LearnedBudgets())
    assert isinstance(CliRunner().invoke(app, ["tune", str(empty)]).exception, RunError)


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "journal.sqlite"
    broken.write_bytes(b"SQLite format 3\0" + bytes(200))
    series = tmp_path / "series.csv"
    series.write_text("time,bytes\nsoon,many\n")
    for source, text in (
        (str(broken), "cannot read"),
        (str(series), "has no line with a time in Unix seconds and a size in bytes"),
        (str(tmp_path / "none.jsonl"), "none.jsonl"),
        ("no-such-service", "check that the service runs on this machine"),
        (str(tmp_path / "none.sqlite"), "none.sqlite: the file does not exist"),
    ):
        done = CliRunner().invoke(app, ["tune", source])
        assert isinstance(done.exception, UsageError), done.output
        assert text in str(done.exception)


def test_a_limit_is_for_a_series_alone(tmp_path: Path) -> None:
    file = journal(tmp_path / "journal.sqlite", learned())
    done = CliRunner().invoke(app, ["tune", str(file), "--limit", "8Gi"])
    assert isinstance(done.exception, UsageError)
    assert "only a series (.csv) takes a limit" in str(done.exception)


def test_an_hour_is_said_to_be_too_little(tmp_path: Path) -> None:
    file = tmp_path / "series.csv"
    file.write_text("".join(f"{BEGAN + 60 * minute},{GIB}\n" for minute in range(60)))
    done = CliRunner().invoke(app, ["tune", str(file)])
    assert "59 min is less than a day: observe a day of normal traffic" in done.stdout


def test_a_series_is_measured_from_the_least_size_after_each_start(tmp_path: Path) -> None:
    file = tmp_path / "series.csv"
    lines = ["time,bytes", "nan,5", "1e400,1"]
    for minute in range(2 * DAY_M):
        start = 0 if minute < DAY_M else 3 * GIB
        grown = 100 * MIB * (minute % 60) // 59 + GIB * (minute % DAY_M > 300)
        lines.append(f"{BEGAN + minute * 60},{8 * GIB - start + grown}")
    file.write_text("\n".join(lines))
    found = tune.learn_from_series(file, 16 * GIB)
    assert found.host.starts == [8 * GIB], "a fall by a third is no start"
    lines += [f"{BEGAN + (2 * DAY_M + minute) * 60},{GIB}" for minute in range(5)]
    file.write_text("\n".join(lines))
    assert tune.learn_from_series(file, 16 * GIB).host.starts == [8 * GIB, GIB]


def test_budgets_that_do_not_fit_are_told() -> None:
    found = learned()

    def told(growth: int) -> list[str]:
        return tune.explain_unsuitable_budgets(found, MemoryPolicy(host=MemoryBudget(growth)))

    assert told(GIB) == []
    (small,) = told(64 * MIB)
    assert small.startswith(
        "spec.memory.host.growthBudget 64.0 MiB is less than the 200 MiB that a healthy replica"
        " gains in 24h"
    )
    (large,) = told(7 * GIB + 1)
    assert "is larger than the 7.0 GiB between the size after a start and the memory limit" in large
    assert (
        tune.explain_unsuitable_budgets(found, MemoryPolicy(host=parse_growth_budget("Auto"))) == []
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Auto", parse_growth_budget("Auto")),
        ("2Gi", MemoryBudget(2 * GIB)),
        ("64Mi/90m", MemoryBudget(64 * MIB, 5400.0)),
    ],
)
def test_a_budget_is_a_size_and_a_window(text: str, found: MemoryBudget) -> None:
    assert parse_budget(text) == found


@pytest.mark.parametrize("text", ["", "0", "auto", "2Gi/", "2Gi/soon", "2Gi/0s", "/1h", "Auto/"])
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"quantity|duration|1Mi|greater than 0|write Auto"):
        parse_budget(text)


def leak(path: Path) -> Path:
    """Write a trace of ten minutes in which 2 MiB a second leak, below a limit of 64 GiB."""
    header = Header(
        trace=1, name="leak", engine=EngineInfo(type="vllm", version="1", model="m"),
        started_at="2026-11-20T00:00:00Z", interval_s=1.0, limits=Limits(host=64 * GIB),
        budget=Budgets(), warmup_s=60.0,
    )  # fmt: skip
    with closing(TraceWriter(path, header)) as writer:
        for sample in Series(duration=600, leak=steady(2 * MIB, 60)).samples():
            writer.write(sample)
    return path


@pytest.mark.parametrize(
    ("budget", "restarts"), [("256Mi/1h", True), ("64Gi", False), ("Auto", False)]
)
def test_a_replay_tries_another_budget(tmp_path: Path, budget: str, restarts: bool) -> None:
    file = leak(tmp_path / "leak.jsonl")
    words = ["replay", str(file), "--mode=Recover", f"--budget={budget}"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    actions = {json.loads(line).get("action") for line in done.stdout.splitlines()}
    assert ("WorkerRestart" in actions) == restarts, done.stdout


def test_a_trace_teaches_what_the_supervisor_would_have_learned(tmp_path: Path) -> None:
    found, memory = tune.learn_from_trace(leak(tmp_path / "leak.jsonl"))
    assert memory.host is None
    (hour,) = found.host.hours
    assert hour.gains[0] > 400 * MIB
    assert msgspec.json.encode(tune.make_tunings(found, memory))


def test_a_series_with_wide_gaps_is_told_why_it_says_nothing(tmp_path: Path) -> None:
    """Such as two weeks from Prometheus with a step of five minutes."""
    file = tmp_path / "memory.csv"
    file.write_text("".join(f"{1.7e9 + 300 * at},{1e9 + 1000 * at}\n" for at in range(4000)))
    done = CliRunner().invoke(app, ["tune", str(file)])
    assert "between samples that are at most three minutes apart" in done.stdout
    assert "incident" not in done.stdout
