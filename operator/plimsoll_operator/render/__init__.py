"""Render the objects of an InferenceService, in pure functions.

The operator uses all of them, local mode only those for the engine and the supervisor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import SERVICE_KIND as KIND
from plimsoll_operator.render import names
from plimsoll_operator.render.containers import Images
from plimsoll_operator.render.deployment import deployment, pod_hash, revision
from plimsoll_operator.render.engine import drain_args, engine_args, engine_env, process_env
from plimsoll_operator.render.groups import leader_worker_set
from plimsoll_operator.render.monitoring import pod_monitor, prometheus_rule
from plimsoll_operator.render.names import owned
from plimsoll_operator.render.objects import (
    autoscaler,
    disruption_budget,
    gateway_objects,
    headless_service,
    network_policy,
    role,
    role_binding,
    service_account,
    service_object,
    slot_leases,
)
from plimsoll_operator.render.paths import ReplicaPlaces, SupervisorPlaces, in_pod, model_dir
from plimsoll_operator.render.pod import revision_template
from plimsoll_operator.render.supervisor import config_map, supervisor_args, supervisor_config

__all__ = [
    "Images",
    "ReplicaPlaces",
    "SupervisorPlaces",
    "drain_args",
    "engine_args",
    "engine_env",
    "in_pod",
    "model_dir",
    "process_env",
    "render",
    "supervisor_args",
    "supervisor_config",
]


def render(
    service: InferenceService,
    images: Images,
    pinned: dict[str, Any] | None = None,
    held: Sequence[str] = (),
    instead: tuple[str, dict[str, Any]] | None = None,
    paused: bool = False,
    beside: Mapping[str, str] = MappingProxyType({}),
    shared: Collection[str] = (),
    hold_scale_in: bool = False,
) -> list[dict[str, Any]]:
    """Return all objects of ``service``, in the order of application.

    ``pinned`` is the stored template of the spec's revision; None if there is none. ``held`` are
    the names of slot Leases that supervisors hold. ``instead`` is the hash and template of another
    revision to run in place of the spec's. ``paused`` pauses a rollout. ``beside`` contains the
    other files of the supervisors' ConfigMap, by name. ``shared`` are the names of claims that pods
    on several nodes may mount. ``hold_scale_in`` keeps an autoscaler from removing replicas.
    """
    template = pinned or revision_template(service, images)
    workload = deployment if service.spec.nodes == 1 else leader_worker_set
    of, running = instead or (pod_hash(service), template)
    objects = [
        service_account(service),
        role(service, held),
        role_binding(service),
        config_map(service, beside),
        *slot_leases(service),
        *disruption_budget(service),
        *network_policy(service),
        service_object(service),
        *headless_service(service),
        revision(service, template),
        workload(service, running, of, paused, shared),
        *autoscaler(service, hold_scale_in),
        *gateway_objects(service),
        *pod_monitor(service),
        *prometheus_rule(service),
    ]
    labels = names.labels(service.metadata.name)
    return [owned(item, KIND, service.metadata, labels) for item in objects]
