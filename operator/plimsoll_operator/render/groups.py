"""Render the LeaderWorkerSet of a service whose replicas are groups of pods on several nodes.

The leader serves the OpenAI API; workers only compute. vLLM and SGLang connect their nodes
themselves, without Ray: each node gets the leader's address and its own rank from the variables
that the LeaderWorkerSet controller adds. A node cannot rejoin its group, so the group is recreated
when any of its containers terminates.
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
from plimsoll_operator.render.deployment import restart_annotation, rolling_update
from plimsoll_operator.render.objects import first_replicas

Object = dict[str, Any]

VLLM_PORT, SGLANG_PORT = 29501, 20000
"""Ports of the leader to which the nodes connect: vLLM's default, and the usual one for SGLang."""
RESTART_POLICY = "RecreateGroupOnPodRestart"
_ADDRESS, _SIZE, _RANK = "$(LWS_LEADER_ADDRESS)", "$(LWS_GROUP_SIZE)", "$(LWS_WORKER_INDEX)"
_KEY_ENV = "PLIMSOLL_GROUP_KEY"


def parallel_args(service: InferenceService, worker: bool) -> list[str]:
    """Return the engine's arguments for parallelism and, on several nodes, for its group."""
    wanted, several = service.spec.parallelism, service.spec.nodes > 1
    if wanted is None:
        return []
    if service.spec.engine.type is EngineType.SGLANG:
        sizes = [f"--tp-size={wanted.tensor}", f"--pp-size={wanted.pipeline}"]
        nodes = [f"--nnodes={_SIZE}", f"--node-rank={_RANK}"]
        return [*sizes, *nodes, f"--dist-init-addr={_ADDRESS}:{SGLANG_PORT}"] if several else sizes
    sizes = [
        f"--tensor-parallel-size={wanted.tensor}",
        f"--pipeline-parallel-size={wanted.pipeline}",
        f"--data-parallel-size={wanted.data}",
    ]
    nodes = [
        "--distributed-executor-backend=mp",
        f"--nnodes={_SIZE}",
        f"--node-rank={_RANK}",
        f"--master-addr={_ADDRESS}",
        f"--master-port={VLLM_PORT}",
        *(["--headless"] if worker else []),
    ]
    return [*sizes, *nodes] if several else sizes


def member_env(service: InferenceService, worker: bool) -> list[Object]:
    """Return the variables that tell a supervisor its pod's membership in the group.

    The group's key is a label that the pod gets at admission.
    """
    member = {"index": f"$({_KEY_ENV})", "worker": worker, "subdomain": names.group_set(service)}
    field = {"apiVersion": "v1", "fieldPath": f"metadata.labels['{LWS_GROUP_LABEL}']"}
    return [
        {"name": _KEY_ENV, "valueFrom": {"fieldRef": field}},
        {"name": GROUP_ENV, "value": json.dumps(member)},
    ]


def workload_of(service: InferenceService) -> tuple[str, str]:
    """Return kind and name of the object that creates the service's pods."""
    if service.spec.nodes > 1:
        return LWS_KIND, names.group_set(service)
    return "Deployment", service.metadata.name


def leader_worker_set(
    service: InferenceService,
    template: Object,
    of: str,
    paused: bool = False,
    shared: Collection[str] = (),
) -> Object:
    """Build the LeaderWorkerSet with the ``template`` of revision ``of``.

    ``paused`` pauses a rollout: groups that have not been updated keep their template. ``shared``
    are the claims whose volumes pods on several nodes may mount.
    """
    return {
        "apiVersion": f"{LWS_API}/v1",
        "kind": LWS_KIND,
        "metadata": {
            "name": names.group_set(service),
            "annotations": {POD_HASH_ANNOTATION: of, **restart_annotation(service)},
        },
        "spec": {
            # An autoscaler owns the replicas: see compare.with_replicas.
            **({} if service.spec.autoscaling else {"replicas": service.spec.replicas}),
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {
                    **_whole_groups(service, template, shared),
                    "partition": MAX_SERVICE_REPLICAS if paused else 0,
                },
            },
            "leaderWorkerTemplate": template,
        },
    }


def _whole_groups(service: InferenceService, template: Object, shared: Collection[str]) -> Object:
    """Return the rolling-update limits, in which a percentage allows at least one group to move."""
    spec = template["leaderTemplate"]["spec"]
    limits = rolling_update(service, spec, shared)
    surge, unavailable = (_at_most_all(limits[key]) for key in ("maxSurge", "maxUnavailable"))
    if surge in (0, "0%") and isinstance(unavailable, str):
        share = int(unavailable.removesuffix("%"))
        unavailable = max(1, share * first_replicas(service) // 100)
    return {"maxSurge": surge, "maxUnavailable": unavailable}


def _at_most_all(count: int | str) -> int | str:
    return "100%" if isinstance(count, str) and int(count.removesuffix("%")) > 100 else count
