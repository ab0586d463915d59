"""What supervisors learn about growth outlives their pods: a new one finds it at its start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll_api.assessment import Assessment, BudgetState
from plimsoll_api.learned import (
    LEARNED_FILE,
    LearnedMemory,
    LearnedWorkload,
    decode_learned_workloads,
)
from plimsoll_api.memory_contract import MemoryNeeds
from plimsoll_api.memory_policy import MemoryPolicy, parse_growth_budget
from plimsoll_api.names import make_policy_object_name
from plimsoll_api.workloads import WorkloadRef
from plimsoll_operator.config import DEFAULT_INTERVALS
from plimsoll_sidecar.govern.auto_budget import LearnedBudgets
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.signals.other_pods import LearnedFile
from tests.cluster.operator.supervisor_pages import data, pods_of, supervisors
from tests.cluster.operator.test_adopt import LISTED_S
from tests.cluster.operator.test_fleet_safety import SELECTOR
from tests.cluster.operator.test_policy_fleet import pods, policy, workload

MIB, GIB = 1 << 20, 1 << 30
AUTO = {"host": {"growthBudget": "Auto"}}
NEEDS = MemoryNeeds(9 * GIB, 4 * GIB, 2 * GIB, 16 * GIB)
SAID = (
    "host memory needs 9.0 GiB at the current load; it needs 11.0 GiB when its declared pools"
    " (4.0 GiB) are full"
)
KNOWN = LearnedMemory(86400, (300 * MIB, 350 * MIB, 400 * MIB), 4 * GIB, 600 * MIB)


@pytest.fixture
def address() -> Iterator[str]:
    """A machine whose supervisors have learned for a day."""

    def page() -> Metrics:
        metrics = Metrics()
        metrics.export_learned_budgets({"host": KNOWN}, {"host": NEEDS})
        return metrics

    with supervisors(page) as found:
        yield found


def test_a_service_keeps_what_its_pods_have_learned(
    kubectl: Any,
    start: Callable[..., Any],
    manifest: dict[str, Any],
    eventually: Any,
    address: str,
    tmp_path: Path,
) -> None:
    operator = start("--scrape=2")
    manifest["spec"] |= {"replicas": 2, "memory": AUTO}
    kubectl.apply(manifest)
    eventually(lambda: len(kubectl.list("pods", SELECTOR)) == 2)
    assert LEARNED_FILE not in data(kubectl), "nobody knows anything"
    uids = {one["metadata"]["uid"] for one in pods_of(kubectl)}
    kubectl.play_kubelet("tiny", address)
    text = eventually(lambda: data(kubectl)[LEARNED_FILE], 40)
    (known,) = decode_learned_workloads(text.encode())
    assert (known.workload, known.host) == ("", KNOWN)
    assert {one["metadata"]["uid"] for one in pods_of(kubectl)} == uids, "no pod is replaced"

    said = eventually(lambda: kubectl.get("plinf", "tiny")["status"].get("recommendation"))
    assert said["message"] == SAID
    assert said["resources"]["limits"] == {"memory": "12032Mi"}

    assert operator.stop() == 0
    start("--scrape=2")
    kubectl.patch("plinf", "tiny", {"spec": {"engine": {"args": ["--new"]}}})
    updated = eventually(lambda: _other_revision(kubectl, known), 40)
    assert updated.host is not None
    assert updated.host.budget == KNOWN.budget, "the next revision begins with it"

    (tmp_path / LEARNED_FILE).write_text(data(kubectl)[LEARNED_FILE])
    fresh = LearnedBudgets()
    fresh.inherit(LearnedFile(tmp_path / LEARNED_FILE).read(None))
    host = BudgetState(current=4 * GIB, baseline=4 * GIB, unexplained=0, limit=16 * GIB)
    fresh.observe(0.0, "1", "r2", Assessment(t=0.0, epoch=1, warm=True, host=host), ())
    memory = MemoryPolicy(host=parse_growth_budget("Auto"))
    fresh.update_budgets(0.0, memory)
    found = fresh.resolve_budgets(memory)
    assert (found.memory.host and found.memory.host.growth_bytes, found.learning) == (
        KNOWN.budget,
        frozenset(),
    )


def _other_revision(kubectl: Any, known: LearnedWorkload) -> LearnedWorkload | None:
    (found,) = decode_learned_workloads(data(kubectl)[LEARNED_FILE].encode())
    return found if found.revision != known.revision else None


def test_each_workload_of_a_policy_has_its_own(
    kubectl: Any, start: Callable[..., Any], eventually: Any, address: str, tmp_path: Path
) -> None:
    start("--scrape=2")
    learning = policy()
    learning["spec"]["memory"] = AUTO
    kubectl.apply(learning, workload("vllm", 2), workload("other", 1))
    eventually(lambda: len(pods(kubectl, "vllm")) == 2 and pods(kubectl, "other"), LISTED_S)
    for name in pods(kubectl, "vllm"):
        running = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        kubectl.patch("pod", name, {"status": running}, "status")

    def published() -> Any:
        made = kubectl.get("configmap", make_policy_object_name("engines"))
        return made and made["data"].get(LEARNED_FILE)

    (tmp_path / LEARNED_FILE).write_text(
        eventually(published, DEFAULT_INTERVALS.publish + 2 * LISTED_S)
    )
    file = LearnedFile(tmp_path / LEARNED_FILE)
    found = file.read(WorkloadRef("Deployment", "vllm"))
    assert found is not None
    assert found.host == KNOWN
    assert file.read(WorkloadRef("Deployment", "other")) is None

    def said() -> dict[str, str]:
        shown = kubectl.get("plsp", "engines")["status"]["workloads"]
        return {
            one["name"]: one["recommendation"]["message"] for one in shown
            if "recommendation" in one
        }  # fmt: skip

    eventually(lambda: said() == {"vllm": SAID})
