"""Render a service's objects other than its workload, such as Services, slots and permissions."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import (
    API_GROUP,
    EXPECTED_REPLICAS_ANNOTATION,
    INCIDENT_PLURAL,
    METRICS_PORT,
    PROBE_PORT,
)
from plimsoll_api.operation import Autoscaling, parse_count_or_percent
from plimsoll_api.units import parse_duration
from plimsoll_api.workloads import LWS_API, LWS_KIND
from plimsoll_operator.render import names

SERVICE_PORT = 80


def make_service(service: InferenceService) -> dict[str, Any]:
    """Return the ClusterIP Service for the ready replicas."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": service.metadata.name},
        "spec": {
            "type": "ClusterIP",
            "selector": names.make_serving_selector(service),
            "ports": [
                {"name": "http", "port": SERVICE_PORT, "targetPort": "http", "protocol": "TCP"}
            ],
        },
    }


def make_headless_service(service: InferenceService) -> list[dict[str, Any]]:
    """Return the headless Service, which resolves to ready replicas; empty if it is disabled."""
    if not service.spec.service.headless:
        return []
    base = make_service(service)
    spec: dict[str, Any] = base["spec"] | {"clusterIP": "None"}
    return [
        base
        | {
            "metadata": {"name": names.make_headless_service_name(service.metadata.name)},
            "spec": spec,
        }
    ]


def make_service_url(service: InferenceService) -> str:
    """Return the URL of the OpenAI API inside the cluster."""
    host = f"{service.metadata.name}.{service.metadata.namespace}.svc"
    is_tls = service.spec.engine.url_scheme == "https"
    return f"https://{host}:{SERVICE_PORT}" if is_tls else f"http://{host}"


def make_disruption_budget(service: InferenceService) -> list[dict[str, Any]]:
    """Return the PodDisruptionBudget; empty if it is disabled.

    By default, it allows as many evictions at a time as ``supervision.maxUnavailable`` allows
    restarts. Pods that are not ready can always be evicted.
    """
    wanted = service.spec.disruption
    if not wanted.enabled:
        return []
    own = wanted.max_unavailable
    missing = (
        service.spec.supervision.max_unavailable if own is None else parse_count_or_percent(own)
    )
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": service.metadata.name},
            "spec": {
                "maxUnavailable": _convert_to_pod_limit(missing, service.spec.nodes),
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": names.make_selector(service.metadata.name)},
            },
        }
    ]


# A replica is a group of ``nodes`` pods, and the eviction of one pod ends its whole group. With a
# limit of N replicas, a pod may therefore be evicted while at most N - 1 groups are unavailable.
def _convert_to_pod_limit(replicas: int | str, nodes: int) -> int | str:
    return (replicas - 1) * nodes + 1 if isinstance(replicas, int) and replicas else replicas


def make_slot_leases(service: InferenceService) -> list[dict[str, Any]]:
    """Return a Lease for each restart slot.

    The Leases have no ``spec``, because the supervisors own this field.
    """
    wanted = names.make_slot_names(service.metadata.name, service.spec.supervision.max_unavailable)
    metadata: dict[str, Any] = {}
    if service.spec.nodes > 1:
        scaling = service.spec.autoscaling
        expected = service.spec.replicas if scaling is None else scaling.min_replicas
        metadata["annotations"] = {EXPECTED_REPLICAS_ANNOTATION: str(expected)}
    return [
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name} | metadata,
        }
        for name in wanted
    ]


def make_network_policy(service: InferenceService) -> list[dict[str, Any]]:
    """Return the NetworkPolicy, which admits clients and monitoring; empty if it is disabled.

    The kubelet can reach the probe port anyway, because no policy blocks a pod's own node.
    """
    wanted = service.spec.network_policy
    if not wanted.enabled:
        return []
    port = service.spec.engine.port
    # Engines serve their metrics on the serving port, to which access may be restricted.
    scraped = (port, METRICS_PORT) if wanted.monitoring else (METRICS_PORT,)
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": service.metadata.name},
            "spec": {
                "podSelector": {"matchLabels": names.make_selector(service.metadata.name)},
                "policyTypes": ["Ingress"],
                "ingress": [
                    _make_ingress_rule(wanted.clients, port),
                    _make_ingress_rule(wanted.monitoring, *scraped),
                    *([_make_ingress_rule(wanted.probes, PROBE_PORT)] if wanted.probes else []),
                    *_make_group_rules(service),
                ],
            },
        }
    ]


# An empty ``peers`` allows all sources.
def _make_ingress_rule(peers: list[dict[str, Any]], *ports: int) -> dict[str, Any]:
    rule: dict[str, Any] = {"ports": [{"port": port, "protocol": "TCP"} for port in ports]}
    return rule | ({"from": peers} if peers else {})


# The nodes of an engine may use any port.
def _make_group_rules(service: InferenceService) -> list[dict[str, Any]]:
    if service.spec.nodes == 1:
        return []
    return [
        {"from": [{"podSelector": {"matchLabels": names.make_selector(service.metadata.name)}}]}
    ]


def make_autoscaler(service: InferenceService, hold_scale_in: bool = False) -> list[dict[str, Any]]:
    """Return the autoscaler, which then owns the workload's replicas; empty if it is disabled.

    With ``hold_scale_in``, the autoscaler removes no replicas.
    """
    wanted = service.spec.autoscaling
    if wanted is None:
        return []
    if wanted.target is None:
        return [_make_scaled_object(service, wanted, hold_scale_in)]
    target = wanted.target
    if target.metric is not None:
        metric: dict[str, Any] = {
            "type": "Pods",
            "pods": {
                "metric": {"name": target.metric.name},
                "target": {"type": "AverageValue", "averageValue": target.metric.average_value},
            },
        }
    else:
        utilization = {"type": "Utilization", "averageUtilization": target.cpu_percent}
        metric = {"type": "Resource", "resource": {"name": "cpu", "target": utilization}}
    name = service.metadata.name
    return [
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": name},
            "spec": {
                "scaleTargetRef": _make_scale_target(service),
                "minReplicas": wanted.min_replicas,
                "maxReplicas": wanted.max_replicas,
                "metrics": [metric],
                **(
                    {"behavior": {"scaleDown": {"selectPolicy": "Disabled"}}}
                    if hold_scale_in
                    else {}
                ),
            },
        }
    ]


def _make_scale_target(service: InferenceService) -> dict[str, Any]:
    if service.spec.nodes > 1:
        name = names.make_group_set_name(service)
        return {"apiVersion": f"{LWS_API}/v1", "kind": LWS_KIND, "name": name}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": service.metadata.name}


PAUSED_SCALE_IN_ANNOTATION = "autoscaling.keda.sh/paused-scale-in"


def _make_scaled_object(
    service: InferenceService, autoscaling: Autoscaling, hold_scale_in: bool
) -> dict[str, Any]:
    name = service.metadata.name
    cooldown_s = math.ceil(parse_duration(autoscaling.cooldown))
    triggers = [
        one.model_dump(by_alias=True, exclude_none=True, mode="json")
        for one in autoscaling.triggers
    ]
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {
            "name": name,
            "annotations": {PAUSED_SCALE_IN_ANNOTATION: "true"} if hold_scale_in else {},
        },
        "spec": {
            "scaleTargetRef": _make_scale_target(service),
            "minReplicaCount": autoscaling.min_replicas,
            "maxReplicaCount": autoscaling.max_replicas,
            "cooldownPeriod": cooldown_s,
            # The default is 0: if no trigger has been active yet, KEDA's first poll scales to
            # zero, before the first replica is ready. Source: scaleToZeroOrIdle in
            # pkg/scaling/executor/scale_scaledobjects.go, v2.21.0.
            "initialCooldownPeriod": cooldown_s,
            "triggers": triggers,
        },
    }


POOL_API_GROUP = "inference.networking.k8s.io"


def make_gateway_objects(service: InferenceService) -> list[dict[str, Any]]:
    """Return the InferencePool of the replicas and its HTTPRoute; empty if they are disabled."""
    wanted = service.spec.gateway
    if wanted is None:
        return []
    name, picker = service.metadata.name, wanted.endpoint_picker
    parents = [one.model_dump(by_alias=True, exclude_none=True) for one in wanted.parent_refs]
    return [
        {
            "apiVersion": f"{POOL_API_GROUP}/v1",
            "kind": "InferencePool",
            "metadata": {"name": name},
            "spec": {
                "selector": {"matchLabels": names.make_serving_selector(service)},
                "targetPorts": [{"number": service.spec.engine.port}],
                "endpointPickerRef": {
                    "name": picker.name,
                    "port": {"number": picker.port},
                    "failureMode": picker.failure_mode,
                },
            },
        },
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "HTTPRoute",
            "metadata": {"name": name},
            "spec": {
                "parentRefs": parents,
                **({"hostnames": list(wanted.hostnames)} if wanted.hostnames else {}),
                "rules": [
                    {
                        "backendRefs": [
                            {"group": POOL_API_GROUP, "kind": "InferencePool", "name": name}
                        ]
                    }
                ],
            },
        },
    ]


def compute_initial_replicas(service: InferenceService) -> int:
    """Return the number of replicas with which the workload is created."""
    scaling = service.spec.autoscaling
    if scaling is None:
        return service.spec.replicas
    return min(max(service.spec.replicas, scaling.min_replicas), scaling.max_replicas)


RBAC_API_GROUP = "rbac.authorization.k8s.io"


def make_service_account(service: InferenceService) -> dict[str, Any]:
    """Return the ServiceAccount of the pods; only the supervisor's container mounts its token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": names.make_supervisor_name(service.metadata.name)},
        "automountServiceAccountToken": False,
    }


def make_role(service: InferenceService, held_slots: Collection[str] = ()) -> dict[str, Any]:
    """Return the Role of the service's supervisors.

    ``held_slots`` are the slots that a pod still holds, including surplus slots.
    """
    slots = names.make_slot_names(service.metadata.name, service.spec.supervision.max_unavailable)
    return make_supervisor_role(
        names.make_supervisor_name(service.metadata.name),
        (*slots, *sorted(set(held_slots) - set(slots))),
    )


def make_role_binding(service: InferenceService) -> dict[str, Any]:
    """Return the RoleBinding of the service's supervisors."""
    name = names.make_supervisor_name(service.metadata.name)
    return make_supervisor_binding(name, [name], service.metadata.namespace)


def make_supervisor_role(
    name: str, slots: Sequence[str], *additional_rules: dict[str, Any]
) -> dict[str, Any]:
    """Return the Role that supervisors need, for example for incidents and slot Leases."""
    return {
        "apiVersion": f"{RBAC_API_GROUP}/v1",
        "kind": "Role",
        "metadata": {"name": name},
        "rules": [
            make_role_rule(API_GROUP, [INCIDENT_PLURAL], ["create", "get", "patch"]),
            make_role_rule(API_GROUP, [f"{INCIDENT_PLURAL}/status"], ["get", "patch"]),
            *additional_rules,
            make_role_rule("", ["events"], ["create"]),
            make_role_rule("discovery.k8s.io", ["endpointslices"], ["list"]),
            make_role_rule("coordination.k8s.io", ["leases"], ["get", "update"])
            | {"resourceNames": list(slots)},
        ],
    }


def make_supervisor_binding(name: str, accounts: Sequence[str], namespace: str) -> dict[str, Any]:
    """Return the RoleBinding that grants the Role ``name`` to ServiceAccounts in ``namespace``."""
    return {
        "apiVersion": f"{RBAC_API_GROUP}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": RBAC_API_GROUP, "kind": "Role", "name": name},
        "subjects": [
            {"kind": "ServiceAccount", "name": account, "namespace": namespace}
            for account in accounts
        ],
    }


def make_role_rule(group: str, resources: list[str], verbs: list[str]) -> dict[str, Any]:
    """Return a rule of a Role."""
    return {"apiGroups": [group], "resources": resources, "verbs": verbs}
