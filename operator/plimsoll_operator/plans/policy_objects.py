"""The objects of a policy: configuration and rights of supervisors, slots, Services.

Each RayCluster gets a Service.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from plimsoll_api.engines import EngineType
from plimsoll_api.names import (
    API_GROUP,
    METRICS_PORT,
    POLICY_KIND,
    POLICY_LABEL,
    POLICY_PLURAL,
    SERVICE_LABEL,
    SLOT_REPLICAS,
    SLOT_WORKLOAD,
    object_name,
)
from plimsoll_api.supervision_policy import SelectedType, SupervisionPolicy
from plimsoll_api.supervisor_config import (
    CONFIG_FILE,
    EngineEndpoint,
    ServiceRef,
    SupervisorConfig,
    encode,
)
from plimsoll_api.workloads import RAY_CLUSTER, service_of_ray, slots_of
from plimsoll_operator.fleet.workloads import Workload
from plimsoll_operator.kinds import Key, Object
from plimsoll_operator.render.names import MANAGED_BY, MANAGER, owned
from plimsoll_operator.render.objects import rule, supervisor_binding, supervisor_role
from plimsoll_operator.render.supervisor import peers_data

REPORT = "report"
"""Verb on a SupervisionPolicy: to write incidents and to take slots in its name. The admission
policies ask for it; the API server itself does not know it."""

DEFAULT_PORT = 8000


def key_of(policy: SupervisionPolicy) -> Key:
    """Return the policy's key."""
    return Key(policy.metadata.namespace, policy.metadata.name, POLICY_KIND)


def supervisor_config(policy: SupervisionPolicy) -> SupervisorConfig:
    """Write down what all of the policy's pods have in common.

    Each supervisor replaces ``engine`` with what was found in its pod
    (:class:`plimsoll_api.supervisor_config.PodEngine`).
    """
    meta, spec = policy.metadata, policy.spec
    url = f"http://127.0.0.1:{spec.engine.port or DEFAULT_PORT}"
    kind = spec.engine.type
    return SupervisorConfig(
        service=ServiceRef(meta.name, meta.namespace, meta.uid, POLICY_KIND),
        engine=EngineEndpoint(
            type=EngineType.CUSTOM if kind is SelectedType.AUTO else EngineType(kind.value),
            admin_url=url,
            serving_url=url,
            container=spec.engine.container or "",
        ),
        memory=spec.memory,
        supervision=spec.supervision,
        slots=slots_of(meta.name, None, spec.supervision.max_unavailable) if meta.uid else (),
    )


def render(
    policy: SupervisionPolicy,
    accounts: Collection[str],
    workloads: Sequence[Workload] = (),
    held: Collection[str] = (),
    peers: str = "",
) -> list[Object]:
    """All objects of ``policy``, in the order in which they are to be applied.

    ``accounts`` are the ServiceAccounts of the pods that it supervises. ``workloads`` are those
    that have slots. ``held`` names slots that are no longer wanted and still held: their holders
    give them back. ``peers`` is what the supervisors are told of each other's growth.
    """
    name = object_name(policy.metadata.name)
    config: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {CONFIG_FILE: encode(supervisor_config(policy)).decode()} | peers_data(peers),
    }
    owners = list(workloads)
    if all(one.ref is not None for one in owners):
        owners.insert(0, Workload(None, "", ()))
    leases = [lease for one in owners for lease in _leases(policy, one)]
    slots = [one["metadata"]["name"] for one in leases]
    rights = [role(policy, (*slots, *sorted(set(held) - set(slots))))]
    if accounts:
        rights.append(supervisor_binding(name, sorted(accounts), policy.metadata.namespace))
    services = [_service(policy, ray) for one in workloads if (ray := one.ray_cluster)]
    return [
        owned(item, POLICY_KIND, policy.metadata, _labels(policy))
        for item in (config, *leases, *rights, *services)
    ]


def _leases(policy: SupervisionPolicy, workload: Workload) -> list[Object]:
    """Build the slots of one workload.

    The admission policy for slots selects Leases by their label, and lets only the pods take one
    that its annotation names.
    """
    name = policy.metadata.name
    annotations = {SLOT_REPLICAS: workload.replicas()}
    if workload.ref is not None:
        annotations[SLOT_WORKLOAD] = str(workload.ref)
    return [
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": slot,
                "labels": {SERVICE_LABEL: object_name(name)},
                "annotations": annotations,
            },
        }
        for slot in workload.slots(name, policy.spec.supervision.max_unavailable)
    ]


def _service(policy: SupervisionPolicy, cluster: str) -> Object:
    """Build a Service that lists the supervised pods of a RayCluster, ready or not.

    The head's supervisor finds the addresses of its workers there. KubeRay makes a Service for the
    head only.
    """
    name = policy.metadata.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": service_of_ray(name, cluster)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {POLICY_LABEL: name, RAY_CLUSTER: cluster},
            "ports": [{"name": "metrics", "port": METRICS_PORT, "protocol": "TCP"}],
        },
    }


def role(policy: SupervisionPolicy, slots: Collection[str]) -> Object:
    """Build the Role with what the supervisors use.

    The admission policies hold each supervisor to what its own pod has.
    """
    name = policy.metadata.name
    report = rule(API_GROUP, [POLICY_PLURAL], [REPORT]) | {"resourceNames": [name]}
    return supervisor_role(object_name(name), list(slots), report)


def _labels(policy: SupervisionPolicy) -> dict[str, str]:
    return {
        POLICY_LABEL: policy.metadata.name,
        MANAGED_BY: MANAGER,
        "app.kubernetes.io/name": "supervision-policy",
        "app.kubernetes.io/instance": policy.metadata.name,
    }
