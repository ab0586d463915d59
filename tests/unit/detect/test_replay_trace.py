"""Recorded runs through detector and governor, and traces that cannot be read.

Tests ``plimsoll_sidecar/replay.py``.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from leaklab.series import GIB, MIB, Series, sawtooth, steady
from plimsoll_api import trace
from plimsoll_api.supervision import Mode
from plimsoll_api.trace import Budgets, EngineInfo, Header, Limits, TraceBudget
from plimsoll_sidecar import replay
from plimsoll_sidecar.replay import TraceWriter


def header(**changes: Any) -> Header:
    values: dict[str, Any] = {
        "trace": 1,
        "name": "run",
        "engine": EngineInfo("plimsoll"),
        "started_at": "2026-01-01T00:00:00Z",
        "interval_s": 1.0,
        "limits": Limits(6 * GIB),
        "budget": Budgets(host=TraceBudget(512 * MIB, 3600.0)),
        "warmup_s": 60.0,
    }
    return Header(**{**values, **changes})


def lines(tmp_path: Path, series: Series, mode: Mode = Mode.OBSERVE) -> list[dict[str, Any]]:
    path = tmp_path / "run.jsonl.gz"
    with closing(TraceWriter(path, header())) as writer:
        for sample in series.samples():
            writer.write(sample)
    return [msgspec.to_builtins(line) for line in replay.replay(path, mode)]


def test_a_fast_leak_is_confirmed_in_time_and_restarted_in_recover(tmp_path: Path) -> None:
    told = lines(tmp_path, Series(duration=300, leak=steady(400e6 / 60, 120)), Mode.RECOVER)
    events = [line["event"] for line in told]
    assert events[:3] == ["incident", "remediation", "confirmed"]
    assert [line["action"] for line in told if line["event"] == "remediation"] == [
        "Trim",
        "WorkerRestart",
    ]
    assert told[2]["t"] - 120 <= 40
    assert told[0]["segment"] == "malloc_in_use"
    assert told[-1]["samples"] == 300
    assert [line["t"] for line in told[:-1]] == sorted(line["t"] for line in told[:-1])


@pytest.mark.parametrize(("shared", "kinds"), [(False, {"DeviceGrowth"}), (True, set())])
def test_a_recording_says_whether_others_used_the_device(
    tmp_path: Path, shared: bool, kinds: set[str]
) -> None:
    leak = steady(512 * MIB / 900, 120)
    series = Series(duration=900, leak=leak, segment="non_torch", device=True)
    path = tmp_path / "run.jsonl.gz"
    budget = Budgets(device=TraceBudget(512 * MIB, 3600.0))
    with closing(TraceWriter(path, header(budget=budget, shared_device=shared))) as writer:
        for sample in series.samples():
            writer.write(sample)
    told = [msgspec.to_builtins(line) for line in replay.replay(path)]
    assert {line["kind"] for line in told if "kind" in line} == kinds


def test_observe_does_nothing(tmp_path: Path) -> None:
    told = lines(tmp_path, Series(duration=300, leak=steady(400e6 / 60, 120)))
    assert [line["event"] for line in told] == ["incident", "confirmed", "summary"]


def test_a_quiet_run_tells_its_summary_only(tmp_path: Path) -> None:
    told = lines(tmp_path, Series(duration=600, other=sawtooth(200 * MIB, 90)), Mode.RECOVER)
    assert told == [
        {
            "event": "summary",
            "samples": 600,
            "duration_s": 599.0,
            "incidents": 0,
            "confirmed": 0,
            "remediations": 0,
        }
    ]


def run(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plimsoll_sidecar.replay", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", ":1: the first line is not a trace header"),
        (b"hello\n", ":1: the first line is not a trace header"),
        (b'{"trace":2,"name":"x","engine":{"type":"vllm"},"started_at":"","interval_s":1}', "2"),
        (b'{"trace":1,"name":"x","engine":{"type":"vllm"},"started_at":"","interval_s":0}', "int"),
    ],
)
def test_a_bad_header_is_named_with_status_2(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    done = run(path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_samples_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    first = msgspec.json.encode(header())
    for second, said in (
        (b'{"t":1,"epoch":1}\n{"t":1,"epoch":1}', ":3: t=1.0 must be later than t=1.0"),
        (b'{"t":NaN,"epoch":1}', ":2: the line is not a valid sample"),
        (b'{"t":1,"epoch":1', ":2: the line is not a valid sample"),
        (b'{"t":1,"epoch":1,"ledger":[{"owner":"\xff"}]}', ":2: the line is not a valid sample"),
    ):
        path.write_bytes(first + b"\n" + second)
        done = run(path)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_a_truncated_archive_and_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    with closing(TraceWriter(path, header())) as writer:
        for sample in Series(duration=50).samples():
            writer.write(sample)
    path.write_bytes(path.read_bytes()[:-20])
    assert run(path).returncode == 2
    assert run(tmp_path / "none.jsonl").returncode == 2


def test_a_budget_of_zero_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with path.open("wb") as out:
        trace.write_line(out, header(budget=Budgets(host=TraceBudget(0, 60.0))))
    done = run(path)
    assert done.returncode == 2
    assert "budget.host" in done.stderr


def test_what_was_written_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    samples = list(Series(duration=20, device=True).samples())
    with closing(TraceWriter(path, header())) as writer:
        for sample in samples:
            writer.write(sample)
        writer.write(samples[0])
    found, again = trace.read(path)
    assert found == header()
    assert list(again) == samples


def test_a_slow_leak_begins_and_ends_with_its_engine(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    series = Series(
        duration=33 * 3600.0,
        interval=60.0,
        leak=steady(8 * MIB / 3600),
        epoch=lambda t: 1 if t < 32 * 3600 else 2,
    )
    with closing(TraceWriter(path, header(interval_s=60.0))) as writer:
        for sample in series.samples():
            writer.write(sample)
    every = [msgspec.to_builtins(line) for line in replay.replay(path, Mode.RECOVER)]
    assert not any(line["event"] == "remediation" for line in every)
    told = [line for line in every if line["event"].startswith("slow-leak")]
    assert [line["event"] for line in told] == ["slow-leak", "slow-leak-ended"]
    assert told[0]["kind"] == "host"
    assert told[0]["segment"] == "malloc_in_use"
    assert told[0]["limit_s"] == pytest.approx(3.9 * GIB / (8 * MIB / 3600), rel=0.2)
    assert 24 * 3600 < told[0]["t"] < 28 * 3600
    assert told[1]["t"] == 32 * 3600
