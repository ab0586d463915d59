"""Each runbook is acted out on a replica of this machine: the alert's condition holds on a real
Prometheus, what the page tells to look at shows it, and what it tells to do ends it.

Commands of a cluster (kubectl) are run by tests/cluster and tests/node.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.tools import scene
from docs.tools.blocks import ROOT
from plimsoll_cli.actions import get_status
from plimsoll_cli.local.run_dir import make_supervisor_caller
from tests.unit.dashboards import queries

ALERT_S = 200.0
TOLD_S = 60.0
RULES = {str(rule["alert"]): str(rule["expr"]) for rule in reversed(queries.alerts())}
"""Of the burn alerts the class of the shortest windows: the example's is one hour."""


class Case:
    """A replica and what a person types."""

    def __init__(self, replica: scene.Replica) -> None:
        self.replica = replica

    def plimsoll(self, *arguments: str, fails: bool = False) -> str:
        """As written in the runbooks for a pod, here for the service of this machine."""
        command = [sys.executable, "-m", "plimsoll_cli.main", *arguments]
        done = subprocess.run(
            [*command, "--run-dir", str(self.replica.run_dir)],
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert bool(done.returncode) is fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    def holds(self, alert: str) -> list[dict[str, Any]]:
        """The condition of an alert as it is loaded, without the time that it must hold for."""
        return self.replica.until(RULES[alert], ALERT_S)

    def incident(self) -> dict[str, Any]:
        """The newest."""
        listed = json.loads(self.plimsoll("incidents", "leaky", "-o", "json"))
        found: dict[str, Any] = listed[0]
        return found

    def explained(self) -> str:
        return self.plimsoll("explain", self.incident()["metadata"]["name"])

    def told(self, text: str) -> str:
        """The newest incident's story, once it has ``text``."""
        until = time.monotonic() + TOLD_S
        while text not in (story := self.explained()):
            assert time.monotonic() < until, story
            time.sleep(1)
        return story


@pytest.fixture
def situation(tmp_path: Path) -> Iterator[Callable[..., Case]]:
    """Starts the leaky example with some fields changed."""
    with contextlib.ExitStack() as stack:

        def start(inject: str, supervision: dict[str, Any]) -> Case:
            document = yaml.safe_load((ROOT / "examples" / "leaky.yaml").read_text())
            document["spec"]["engine"]["env"][0]["value"] = inject
            document["spec"]["supervision"] |= supervision
            manifest = tmp_path / "service.yaml"
            manifest.write_text(yaml.safe_dump(document))
            return Case(stack.enter_context(scene.replica(tmp_path, manifest)))

        yield start


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_budget_that_burns_and_a_blind_supervisor(situation: Callable[..., Case]) -> None:
    case = situation("request_cycle:payload_bytes=2Mi", {"mode": "Observe"})
    for alert in ("LeakBudgetBurnFast", "LeakBudgetBurnSlow", "BudgetExhaustionPredicted"):
        (series,) = case.holds(f"Plimsoll{alert}")
        assert series["metric"]["kind"] == "host"
        assert series["metric"]["service"] == "leaky"
    story = case.explained()
    assert "HostGrowth" in story
    assert "malloc_in_use of the worker" in story
    case.plimsoll("trim", "leaky", "--yes")
    before = _epoch(case)
    case.plimsoll("restart", "leaky", "--yes")
    assert _epoch(case) != before, "restarted by hand: mode Observe does nothing by itself"
    case.replica.until("plimsoll_memory_budget_consumed_ratio < 0.3", 90.0)

    # PlimsollSupervisorBlind: the engine's frontend no longer answers.
    frontend = _frontend(case.replica.process.pid)
    os.kill(frontend, signal.SIGSTOP)
    try:
        case.replica.until('plimsoll_signal_age_seconds{signal="engine"} > 15', 90.0)
        assert "leaky" in case.plimsoll("trim", "leaky", "--yes", fails=True)
    finally:
        os.kill(frontend, signal.SIGCONT)
    case.replica.until('plimsoll_signal_age_seconds{signal="engine"} < 5', 90.0)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_stall(situation: Callable[..., Case]) -> None:
    case = situation(
        "eviction_loop:after_requests=8", {"mode": "Observe", "stall": {"timeout": "5s"}}
    )
    case.holds("PlimsollEngineStalled")
    # The alert holds before the incident has its diagnostics, and so before it has ended.
    story = case.told("set spec.supervision.mode: Recover")
    assert "Stall: requests waited, but the engine completed no step" in story
    case.plimsoll("restart", "leaky", "--yes")
    case.replica.until("plimsoll_engine_stalled == 0", 60.0)
    case.replica.until("rate(plimsoll_engine_generation_tokens_total[10s]) > 0", 60.0)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_restart_budget_that_is_spent(situation: Callable[..., Case]) -> None:
    case = situation(
        "request_cycle:payload_bytes=2Mi,epochs=all",
        {"mode": "Recover", "restartBudget": {"count": 1, "window": "1h"}},
    )
    case.holds("PlimsollRestartBudgetExhausted")
    (ended,) = case.holds("PlimsollIncidentUnresolved")
    assert ended["metric"]["outcome"] == "RestartBudgetExhausted"
    story = case.explained()
    assert "Unresolved (RestartBudgetExhausted)" in story
    assert "What next: find the cause, then: plimsoll resume leaky" in story
    assert "WorkerRestart" in story, "the restart that the budget allowed"
    case.plimsoll("drain", "leaky", "--yes", "--deadline", "5s")
    case.plimsoll("resume", "leaky", "--yes")
    case.replica.until("plimsoll_restart_budget_exhausted == 0", 30.0)


def _epoch(case: Case) -> str:
    return get_status(make_supervisor_caller(case.replica.run_dir), "leaky").epoch or ""


def _frontend(runner: int) -> int:
    """PID of the engine's frontend: the child of the command line that runs the engine."""
    children = Path(f"/proc/{runner}/task/{runner}/children").read_text().split()
    for child in children:
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"plimsoll_engine" in words:
            return int(child)
    raise LookupError(f"no engine among {children}")
