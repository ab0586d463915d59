"""Whether a revision leaks: the answer in status, metrics and on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from plimsoll_api.assessment import Assessment, BudgetState
from plimsoll_cli.errors import RunError
from plimsoll_cli.main import app
from plimsoll_sidecar.record.metrics import Metrics
from tests.cluster.operator.supervisor_pages import supervisors
from tests.cluster.operator.test_adopt import LISTED_S
from tests.cluster.operator.test_fleet_safety import SELECTOR, leaking
from tests.cluster.operator.test_policy_fleet import pods, policy, workload

BUDGET = {"host": {"growthBudget": "512Mi"}}


def with_budget(item: dict[str, Any]) -> dict[str, Any]:
    item["spec"]["memory"] = BUDGET
    return item


class Page:
    """What all supervisors report: an age since the warm-up, in minutes."""

    minutes = 12.0

    def __call__(self) -> Metrics:
        host = BudgetState(
            unexplained=0, consumed_ratio=0.0, age_s=self.minutes * 60, requests=9_000
        )
        metrics = Metrics()
        metrics.observe(Assessment(t=1.0, epoch=1, warm=True, host=host), {}, 0.0)
        return metrics


@pytest.fixture
def page() -> Page:
    return Page()


@pytest.fixture
def address(page: Page) -> Iterator[str]:
    with supervisors(page) as found:
        yield found


def ask(kubectl: Any, *arguments: str) -> Any:
    where = ("--kubeconfig", str(kubectl.kubeconfig), "-n", kubectl.namespace)
    return CliRunner().invoke(app, ["verdict", *arguments, *where])


def test_a_service_is_judged_until_there_is_an_answer(
    kubectl: Any,
    start: Callable[..., Any],
    manifest: dict[str, Any],
    eventually: Any,
    page: Page,
    address: str,
) -> None:
    operator = start("--scrape=1")
    manifest["spec"] |= {"replicas": 2, "memory": BUDGET}
    kubectl.apply(manifest)
    eventually(lambda: len(kubectl.list("pods", SELECTOR)) == 2)
    kubectl.play_kubelet("tiny", address)

    def verdict() -> Any:
        (found,) = kubectl.get("plinf", "tiny")["status"]["verdicts"]
        return found

    eventually(lambda: verdict().get("minutesLeft") == 20)
    revision = verdict()["revision"]
    assert kubectl.condition("tiny", "LeakFree")["status"] == "Unknown"
    waits = ask(kubectl, revision)
    assert waits.exit_code == 3, waits.output
    assert "Unknown" in waits.output

    page.minutes = 31.0
    clean = ask(kubectl, revision, "--wait", "40s", "-o", "json")
    assert clean.exit_code == 0, clean.output
    (one,) = json.loads(clean.stdout)
    assert (one["leaks"], one["object"]) == ("No", "InferenceService/tiny")
    assert kubectl.holds("tiny", LeakFree="True")
    sample = f'{{inferenceservice="{kubectl.namespace}/tiny",leaks="No"'
    assert operator.metric(f"plimsoll_operator_revision_verdict{sample}") == 1

    first, second = sorted(one["metadata"]["name"] for one in kubectl.list("pods", SELECTOR))
    leaking(kubectl, "first", first)
    leaking(kubectl, "second", second)
    eventually(lambda: verdict()["leaks"] == "Yes")
    assert ask(kubectl, revision).exit_code == 1
    unknown = ask(kubectl, "0000000000")
    assert isinstance(unknown.exception, RunError)


def test_a_workload_of_a_policy_is_judged(
    kubectl: Any, start: Callable[..., Any], eventually: Any, page: Page, address: str
) -> None:
    page.minutes = 90.0
    start("--scrape=1")
    kubectl.apply(with_budget(policy()), workload("vllm", 2))
    eventually(lambda: len(pods(kubectl, "vllm")) == 2, LISTED_S)
    for name in pods(kubectl, "vllm"):
        running = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        kubectl.patch("pod", name, {"status": running}, "status")

    def verdict() -> Any:
        (found,) = kubectl.get("plsp", "engines")["status"]["workloads"]
        return found["verdicts"][0]

    eventually(lambda: verdict()["leaks"] == "No", LISTED_S)
    assert kubectl.holds("engines", "plsp", LeakFree="True")
    done = ask(kubectl, verdict()["revision"])
    assert done.exit_code == 0, done.output
    assert "Deployment/vllm" in done.output
