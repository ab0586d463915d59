"""Render the objects of an InferenceService, in pure functions.

Local mode uses only the functions for the engine and the supervisor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import SERVICE_KIND as KIND
from plimsoll_operator.render import names
from plimsoll_operator.render.containers import Images
from plimsoll_operator.render.deployment import (
    compute_pod_hash,
    make_controller_revision,
    make_deployment,
)
from plimsoll_operator.render.engine import (
    make_drain_args,
    make_engine_args,
    make_engine_env,
    make_process_env,
)
from plimsoll_operator.render.groups import make_leader_worker_set
from plimsoll_operator.render.monitoring import make_pod_monitor, make_prometheus_rule
from plimsoll_operator.render.names import add_owner
from plimsoll_operator.render.objects import (
    make_autoscaler,
    make_disruption_budget,
    make_gateway_objects,
    make_headless_service,
    make_network_policy,
    make_role,
    make_role_binding,
    make_service,
    make_service_account,
    make_slot_leases,
)
from plimsoll_operator.render.paths import (
    ReplicaLayout,
    SupervisorLayout,
    get_model_dir,
    make_pod_layout,
)
from plimsoll_operator.render.pod import make_revision_template
from plimsoll_operator.render.supervisor import (
    make_config_map,
    make_supervisor_args,
    make_supervisor_config,
)

__all__ = [
    "Images",
    "ReplicaLayout",
    "SupervisorLayout",
    "get_model_dir",
    "make_drain_args",
    "make_engine_args",
    "make_engine_env",
    "make_pod_layout",
    "make_process_env",
    "make_supervisor_args",
    "make_supervisor_config",
    "render_objects",
]


def render_objects(
    service: InferenceService,
    images: Images,
    pinned: dict[str, Any] | None = None,
    held_slots: Sequence[str] = (),
    replacement: tuple[str, dict[str, Any]] | None = None,
    paused: bool = False,
    extra_files: Mapping[str, str] = MappingProxyType({}),
    shared_claims: Collection[str] = (),
    hold_scale_in: bool = False,
) -> list[dict[str, Any]]:
    """Return all objects of ``service``, in the order of application.

    ``pinned`` is the stored pod template of the spec's revision. ``replacement`` is the hash and
    the template of a revision to run instead. ``held_slots`` are the slot Leases that a pod holds,
    and ``shared_claims`` the claims that pods on several nodes may mount. ``hold_scale_in`` keeps
    an autoscaler from removing replicas.
    """
    template = pinned or make_revision_template(service, images)
    workload = make_deployment if service.spec.nodes == 1 else make_leader_worker_set
    of, running = replacement or (compute_pod_hash(service), template)
    objects = [
        make_service_account(service),
        make_role(service, held_slots),
        make_role_binding(service),
        make_config_map(service, extra_files),
        *make_slot_leases(service),
        *make_disruption_budget(service),
        *make_network_policy(service),
        make_service(service),
        *make_headless_service(service),
        make_controller_revision(service, template),
        workload(service, running, of, paused, shared_claims),
        *make_autoscaler(service, hold_scale_in),
        *make_gateway_objects(service),
        *make_pod_monitor(service),
        *make_prometheus_rule(service),
    ]
    labels = names.make_labels(service.metadata.name)
    return [add_owner(item, KIND, service.metadata, labels) for item in objects]
