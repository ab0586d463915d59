"""Render the Deployment, and the ControllerRevision that stores its pod template.

The operator keeps the first template that it renders for a spec, so that an upgrade restarts no
engines.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import POD_HASH_ANNOTATION, RESTART_ID_ANNOTATION
from plimsoll_api.operation import parse_count_or_percent
from plimsoll_api.supervision import Drain
from plimsoll_api.units import format_duration, parse_duration
from plimsoll_operator.render import names
from plimsoll_operator.render.names import compute_digest

SCHEDULE_AND_PULL_MARGIN_S = 300
"""Time for scheduling a pod and pulling its images, in addition to the startup timeout."""


def compute_pod_hash(service: InferenceService) -> str:
    """Return the hash of the parts of the spec that affect pods.

    Defaults are omitted, so that a new field does not change the hash.
    """
    parts = {"model", "engine", "supervisor", "pod_template", "restart"}
    spec = service.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, include=parts)
    concerns = {
        key: spec.get(key) for key in ("model", "engine", "supervisor", "podTemplate", "restart")
    }
    drain_s = service.spec.supervision.drain.deadline_s
    drain = None if drain_s == Drain().deadline_s else format_duration(drain_s)
    return compute_digest({"drainDeadline": drain, **concerns, **_get_optional_fields(service)})


# Earlier releases did not hash these fields.
def _get_optional_fields(service: InferenceService) -> dict[str, Any]:
    probe, parallelism = service.spec.probe, service.spec.parallelism
    parts: dict[str, Any] = {"probe": {"image": probe.image}} if probe.enabled else {}
    if parallelism is not None:
        parts["parallelism"] = parallelism.model_dump(by_alias=True, exclude_none=True)
    return parts


def make_controller_revision(service: InferenceService, template: dict[str, Any]) -> dict[str, Any]:
    """Return the ControllerRevision that stores ``template``."""
    name = names.make_revision_name(service.metadata.name, compute_pod_hash(service))
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {"name": name},
        "revision": 1,
        "data": template,
    }


def make_deployment(
    service: InferenceService,
    template: dict[str, Any],
    revision_hash: str,
    paused: bool = False,
    shared_claims: Collection[str] = (),
) -> dict[str, Any]:
    """Return the Deployment with the pod template of the revision ``revision_hash``.

    ``shared_claims`` are the claims that pods on several nodes may mount.
    """
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": service.metadata.name,
            "annotations": {POD_HASH_ANNOTATION: revision_hash, **make_restart_annotation(service)},
        },
        "spec": {
            # An autoscaler owns the replicas: see compare.add_current_replicas.
            **({} if service.spec.autoscaling else {"replicas": service.spec.replicas}),
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": _compute_deadline_s(service),
            **({"paused": True} if paused else {}),
            "selector": {"matchLabels": names.make_selector(service.metadata.name)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": make_rolling_update(service, template["spec"], shared_claims),
            },
            "template": template,
        },
    }


def make_restart_annotation(service: InferenceService) -> dict[str, str]:
    """Return the annotation with ``restart.id`` for the service's workload; empty without an ID."""
    restart_id = service.spec.restart.id
    return {RESTART_ID_ANNOTATION: restart_id} if restart_id else {}


def _compute_deadline_s(service: InferenceService) -> int:
    own = service.spec.rollout.progress_deadline
    if own is not None:
        return max(1, int(parse_duration(own)))
    return int(parse_duration(service.spec.engine.startup_timeout)) + SCHEDULE_AND_PULL_MARGIN_S


def make_rolling_update(
    service: InferenceService, spec: dict[str, Any], shared_claims: Collection[str]
) -> dict[str, Any]:
    """Return the rolling-update limits for pods with this ``spec``.

    If only one pod can hold a resource of the pods, the old pod is deleted first.
    """
    wanted = service.spec.rollout
    is_exclusive = _has_exclusive_resource(spec, shared_claims)
    surge = "0" if is_exclusive else "1"
    unavailable = "1" if is_exclusive else "0"
    if wanted.max_surge is not None:
        surge = wanted.max_surge
        unavailable = "1" if surge in _ZERO_COUNTS else unavailable
    if wanted.max_unavailable is not None:
        unavailable = wanted.max_unavailable
        # If only maxUnavailable is set, to 0, maxSurge must allow progress.
        surge = "1" if unavailable in _ZERO_COUNTS and wanted.max_surge is None else surge
    return {
        "maxSurge": parse_count_or_percent(surge),
        "maxUnavailable": parse_count_or_percent(unavailable),
    }


_ZERO_COUNTS = ("0", "0%")


# Such resources are devices, host ports, and claims that are not in ``shared_claims``.
def _has_exclusive_resource(spec: dict[str, Any], shared_claims: Collection[str]) -> bool:
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    taken = any(_has_devices(one) or _has_host_ports(one) for one in containers)
    claimed = any(name not in shared_claims for name in list_claims(spec))
    return bool(spec.get("hostNetwork") or spec.get("resourceClaims")) or taken or claimed


def list_claims(spec: dict[str, Any]) -> list[str]:
    """Return the names of the PersistentVolumeClaims that a pod spec mounts."""
    sources = [one.get("persistentVolumeClaim") or {} for one in spec.get("volumes") or ()]
    return [one["claimName"] for one in sources if one.get("claimName")]


# An extended resource has a domain, such as ``nvidia.com/gpu``.
def _has_devices(container: dict[str, Any]) -> bool:
    held = container.get("resources") or {}
    named = [*(held.get("limits") or {}), *(held.get("requests") or {})]
    return bool(held.get("claims")) or any("/" in resource for resource in named)


def _has_host_ports(container: dict[str, Any]) -> bool:
    return any(one.get("hostPort") for one in container.get("ports") or ())
