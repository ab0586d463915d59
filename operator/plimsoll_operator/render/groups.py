"""Render the LeaderWorkerSet of a service whose replicas are groups of pods on several nodes.

The leader serves the OpenAI API, and the workers only compute. A restarted node cannot rejoin its
group, so the controller recreates the whole group if any container terminates.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from plimsoll_api.engines import EngineType
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import POD_HASH_ANNOTATION
from plimsoll_api.operation import MAX_SERVICE_REPLICAS
from plimsoll_api.supervisor_config import GROUP_ENV
from plimsoll_api.workloads import LWS_API, LWS_GROUP_LABEL, LWS_KIND
from plimsoll_operator.render import names
from plimsoll_operator.render.deployment import make_restart_annotation, make_rolling_update
from plimsoll_operator.render.objects import compute_initial_replicas

Object = dict[str, Any]

VLLM_MASTER_PORT, SGLANG_INIT_PORT = 29501, 20000
"""Ports of the leader to which the nodes of vLLM and SGLang connect."""
GROUP_RESTART_POLICY = "RecreateGroupOnPodRestart"
_LEADER_ADDRESS, _GROUP_SIZE, _WORKER_INDEX = (
    "$(LWS_LEADER_ADDRESS)",
    "$(LWS_GROUP_SIZE)",
    "$(LWS_WORKER_INDEX)",
)
_KEY_ENV = "PLIMSOLL_GROUP_KEY"


def make_parallel_args(service: InferenceService, worker: bool) -> list[str]:
    """Return the engine's arguments for parallelism and for connecting the nodes of its group."""
    wanted, several = service.spec.parallelism, service.spec.nodes > 1
    if wanted is None:
        return []
    if service.spec.engine.type is EngineType.SGLANG:
        sizes = [f"--tp-size={wanted.tensor}", f"--pp-size={wanted.pipeline}"]
        nodes = [f"--nnodes={_GROUP_SIZE}", f"--node-rank={_WORKER_INDEX}"]
        return (
            [*sizes, *nodes, f"--dist-init-addr={_LEADER_ADDRESS}:{SGLANG_INIT_PORT}"]
            if several
            else sizes
        )
    sizes = [
        f"--tensor-parallel-size={wanted.tensor}",
        f"--pipeline-parallel-size={wanted.pipeline}",
        f"--data-parallel-size={wanted.data}",
    ]
    nodes = [
        "--distributed-executor-backend=mp",
        f"--nnodes={_GROUP_SIZE}",
        f"--node-rank={_WORKER_INDEX}",
        f"--master-addr={_LEADER_ADDRESS}",
        f"--master-port={VLLM_MASTER_PORT}",
        *(["--headless"] if worker else []),
    ]
    return [*sizes, *nodes] if several else sizes


def make_member_env(service: InferenceService, worker: bool) -> list[Object]:
    """Return the environment variables that tell a supervisor to which group its pod belongs."""
    member = {
        "index": f"$({_KEY_ENV})",
        "worker": worker,
        "subdomain": names.make_group_set_name(service),
    }
    field = {"apiVersion": "v1", "fieldPath": f"metadata.labels['{LWS_GROUP_LABEL}']"}
    return [
        {"name": _KEY_ENV, "valueFrom": {"fieldRef": field}},
        {"name": GROUP_ENV, "value": json.dumps(member)},
    ]


def get_workload_kind_and_name(service: InferenceService) -> tuple[str, str]:
    """Return the kind and the name of the workload that creates the service's pods."""
    if service.spec.nodes > 1:
        return LWS_KIND, names.make_group_set_name(service)
    return "Deployment", service.metadata.name


def make_leader_worker_set(
    service: InferenceService,
    template: Object,
    revision_hash: str,
    paused: bool = False,
    shared_claims: Collection[str] = (),
) -> Object:
    """Build the LeaderWorkerSet with the group template of the revision ``revision_hash``.

    ``shared_claims`` are the claims that pods on several nodes may mount.
    """
    return {
        "apiVersion": f"{LWS_API}/v1",
        "kind": LWS_KIND,
        "metadata": {
            "name": names.make_group_set_name(service),
            "annotations": {POD_HASH_ANNOTATION: revision_hash, **make_restart_annotation(service)},
        },
        "spec": {
            # An autoscaler owns the replicas: see compare.add_current_replicas.
            **({} if service.spec.autoscaling else {"replicas": service.spec.replicas}),
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {
                    **_make_group_rolling_update(service, template, shared_claims),
                    "partition": MAX_SERVICE_REPLICAS if paused else 0,
                },
            },
            "leaderWorkerTemplate": template,
        },
    }


# At least one group can be replaced.
def _make_group_rolling_update(
    service: InferenceService, template: Object, shared_claims: Collection[str]
) -> Object:
    spec = template["leaderTemplate"]["spec"]
    limits = make_rolling_update(service, spec, shared_claims)
    surge, unavailable = (_limit_percentage(limits[key]) for key in ("maxSurge", "maxUnavailable"))
    if surge in (0, "0%") and isinstance(unavailable, str):
        share = int(unavailable.removesuffix("%"))
        unavailable = max(1, share * compute_initial_replicas(service) // 100)
    return {"maxSurge": surge, "maxUnavailable": unavailable}


def _limit_percentage(count: int | str) -> int | str:
    return "100%" if isinstance(count, str) and int(count.removesuffix("%")) > 100 else count
