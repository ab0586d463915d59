"""Every panel shows something: evaluated by a real Prometheus that scraped a real leak and a real
operator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.tools import scene
from plimsoll_api.assessment import Assessment, BudgetState, Segment, SlowGrowth
from plimsoll_api.learned import LearnedMemory
from plimsoll_api.memory_contract import MemoryNeeds
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.roles import PodRole
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.record.server import AllowedHosts, StateServer
from plimsoll_sidecar.signals.cgroup import CgroupMemory
from tests.lab.operator import Operator, operator_kubeconfig
from tests.unit.dashboards import queries

SERVICE = {
    "apiVersion": "plimsoll.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "tiny"},
    "spec": {"model": {"uri": "file:///models/tiny"}},
}


DEVICE = Assessment(
    t=1.0,
    epoch=1,
    warm=True,
    segments={
        Segment.TORCH_ALLOCATED: 3_900_000_000,
        Segment.TORCH_RESERVED_UNUSED: 130_000_000,
        Segment.NON_TORCH: 300_235_392,
        Segment.ORPHAN: 0,
    },
    device=BudgetState(baseline=4_330_235_392, unexplained=0, consumed_ratio=0.0),
    slow={"host": SlowGrowth(True, Segment.PYTHON_OBJECTS, 300.0, 777_600.0)},
)
"""This machine has no accelerator, and the scene lasts minutes: what a supervisor exposes beside a
device and after days comes from the same code, fed with the sizes of a run on one."""
LEARNED = LearnedMemory(
    seen_s=86_400, gains=(1 << 26, 1 << 27, 1 << 28), start=3 << 30, budget=1 << 28
)
NEEDS = MemoryNeeds(level=5 << 30, pools=1 << 30, unfilled=1 << 28, limit=8 << 30)
GROUP = CgroupMemory(
    current=6 << 30, anon=5 << 30, shmem=64 << 20, file=1 << 30, slab=80 << 20, limit=8 << 30,
    reclaimable=1 << 30, oom_kills=0, ooms=0, throttled=3, stalled_some_s=1.5, stalled_full_s=0.25,
)  # fmt: skip
"""Without containers engine and supervisor share a group, which then says nothing."""
ABSENT = ("spec_decode", "policy_pods", "webhook_certificate_expiry")
"""Parts of the names of metrics that the scene has no use for: its engine does not speculate, and
its operator has neither a policy nor webhooks."""


@pytest.fixture
def device() -> Iterator[str]:
    """``host:port`` of a supervisor's metrics with device memory."""
    metrics = Metrics(lambda: GROUP)
    metrics.export_budgets(MemoryPolicy(device=MemoryBudget(growth_bytes=1 << 30, window_s=3600.0)))
    metrics.export_learned_budgets({"host": LEARNED}, {"host": NEEDS})
    metrics.export_role(ServiceRef("tiny", role=PodRole.PREFILL))
    metrics.observe(DEVICE, {"engine": True, "host": True, "device": True}, 0.001)
    hosts = AllowedHosts("pod", "service", "namespace")
    server = StateServer("127.0.0.1", 0, metrics.render, lambda: b"{}", lambda live: b"", hosts)
    server.start()
    yield f"127.0.0.1:{server.port}"
    server.stop()


@pytest.mark.long
def test_every_panel_shows_something(cluster: Any, device: str, tmp_path: Path) -> None:
    kube = cluster.kube
    operator = Operator(operator_kubeconfig(kube, tmp_path / "kubeconfig"), kube.namespace)
    try:
        targets = {"operator": f"127.0.0.1:{operator.port}", "device": device}
        with scene.leak(tmp_path, targets) as seen:
            kube.apply(SERVICE)  # while it is scraped, so that its reconciles are seen
            time.sleep(5 * scene.SCRAPE_S)
            empty = [
                f"{name}: {title}: {query}"
                for name in queries.NAMES
                for title, expressions in queries.panels(name)
                for query in expressions
                if not any(part in query for part in ABSENT) and not _values(seen, query)
            ]
            assert empty == []
            for query in queries.annotation_queries("service"):
                assert _values(seen, query), query
            for rule in queries.alerts():
                _values(seen, str(rule["expr"]))  # evaluates without an error
    finally:
        kube("delete", "plinf", "tiny", "--ignore-not-found", "--wait=false")
        operator.stop()


def _values(seen: scene.Scene, query: str) -> list[Any]:
    """Values that are numbers, of all series, over the whole run."""
    series = seen.prometheus.query_range(query, seen.began, time.time())
    return [v for one in series for _, v in one["values"] if v not in ("NaN", "+Inf", "-Inf")]
