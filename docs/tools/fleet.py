"""Draw the operator's page of the fleet with example data: ``python -m docs.tools.fleet``.

The objects are what the API server would send, so that the page reads them as it reads a cluster's.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from docs.tools import shots
from plimsoll_api.names import INCIDENT_KIND, POLICY_KIND, SERVICE_KIND
from plimsoll_operator.fleet.circuit_breaker import SlotAllocation
from plimsoll_operator.page import FleetPage
from plimsoll_operator.runtime.cache import Store

PICTURE = Path(__file__).resolve().parents[1] / "img" / "fleet.png"
WIDTH = 1280
NOW = datetime.fromisoformat("2026-11-26T21:24:00Z").timestamp()
LIMIT = 10
"""Restart slots that may be in use at a time."""
SERVICES = """
ml/chat-70b: {status: {openIncidents: 1, restarts: 3, memory: {hostConsumedPercent: 85}}}
ml/rerank: {reason: MemoryNearLimit, status: {memory: {hostConsumedPercent: 10}}}
ml/embeddings: {}
ml/vision: {reason: ImagePullFailed, status: {readyReplicas: 0}}
"""
POLICIES = """
search/all-vllm:
  openIncidents: 1
  memory: {hostConsumedPercent: 100, deviceConsumedPercent: 35}
  workloads:
    - kind: LeaderWorkerSet
      name: vllm-llama
      suspectRevision: {revision: 5d8, leak: DeviceGrowth in torch_allocated, leakingReplicas: 8,
                        replicas: 12, action: Held, since: "2026-11-26T21:18:00Z"}
"""
INCIDENTS = """
search/vllm-llama-0-1-3:
  spec: {workloadRef: {kind: LeaderWorkerSet, name: vllm-llama}, policyRef: {name: all-vllm},
         pod: vllm-llama-0-1, target: {role: decode}, kind: DeviceGrowth,
         openedAt: "2026-11-26T21:10:00Z"}
  status: {phase: Draining, message: The engine is drained before its restart.,
           attribution: {segment: torch_allocated, process: EngineCore}}
ml/chat-70b-0-7:
  spec: {workloadRef: {kind: InferenceService, name: chat-70b}, pod: chat-70b-0, kind: HostGrowth,
         openedAt: "2026-11-26T20:46:00Z"}
  status: {phase: AwaitingSlot, message: the restart waits for a slot,
           attribution: {segment: python_objects, process: worker}}
"""
CLOSED = "search/vllm-llama-slot-1"


def made(kind: str, shown: str, **parts: Any) -> dict[str, Any]:
    """Return an object by its NAMESPACE/NAME."""
    namespace, name = shown.split("/")
    metadata = {"namespace": namespace, "name": name, "uid": f"{kind} {shown}"}
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {**metadata, "resourceVersion": "1"},
        **parts,
    }


def ready(reason: str) -> list[dict[str, str]]:
    """Return the conditions of an object that is ready, or has another reason."""
    if reason == "MemoryNearLimit":
        return [*ready("ReplicasReady"), {"type": reason, "status": "True", "reason": reason}]
    well = reason in ("ReplicasReady", "Supervised")
    return [{"type": "Ready", "status": str(well), "reason": reason}]


def store() -> Store:
    """Return the operator's cache of the example."""
    cache = Store()
    for shown, one in yaml.safe_load(SERVICES).items():
        status = {"conditions": ready(one.get("reason", "ReplicasReady")), "readyReplicas": 2}
        spec = {"replicas": 2, "memory": {"host": {"growthBudget": "512Mi"}}}
        cache.put(made(SERVICE_KIND, shown, spec=spec, status=status | one.get("status", {})))
    for shown, told in yaml.safe_load(POLICIES).items():
        status = {"conditions": ready("Supervised"), "selected": 12, "supervised": 12, **told}
        memory = {"host": {"growthBudget": "1Gi"}, "device": {"growthBudget": "2Gi"}}
        spec = {"memory": memory, "supervision": {"mode": "Recover"}}
        cache.put(made(POLICY_KIND, shown, spec=spec, status=status))
    for shown, one in yaml.safe_load(INCIDENTS).items():
        cache.put(made(INCIDENT_KIND, shown, **one))
    return cache


def main() -> int:
    slots = SlotAllocation(close=[made("Lease", CLOSED)], held=2)
    page = FleetPage(store(), lambda: slots, LIMIT, lambda: True, clock=lambda: NOW)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.html"
        file.write_bytes(asyncio.run(page.get_page()))
        shots.page(file.as_uri(), PICTURE, width=WIDTH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
