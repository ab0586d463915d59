"""Render the Deployment, and the ControllerRevision that stores its pod template.

The first template rendered for a spec is used until a part of the spec that affects pods changes.
An upgraded operator renders other templates, but must not restart engines with running requests.
The template is stored in a ControllerRevision, because its data is immutable.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import POD_HASH_ANNOTATION, RESTART_ID_ANNOTATION
from plimsoll_api.operation import parse_count
from plimsoll_api.supervision import Drain
from plimsoll_api.units import format_duration, parse_duration
from plimsoll_operator.render import names
from plimsoll_operator.render.names import digest

PULL_MARGIN_S = 300
"""Seconds for scheduling and pulling an image, in addition to the startup timeout."""


def pod_hash(service: InferenceService) -> str:
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
    return digest({"drainDeadline": drain, **concerns, **_later_parts(service)})


def _later_parts(service: InferenceService) -> dict[str, Any]:
    """Return the probe and the parallelism for the hash, if set: older hashes contain neither."""
    probe, parallelism = service.spec.probe, service.spec.parallelism
    parts: dict[str, Any] = {"probe": {"image": probe.image}} if probe.enabled else {}
    if parallelism is not None:
        parts["parallelism"] = parallelism.model_dump(by_alias=True, exclude_none=True)
    return parts


def revision(service: InferenceService, template: dict[str, Any]) -> dict[str, Any]:
    """Return the ControllerRevision that stores ``template``."""
    name = names.revision(service.metadata.name, pod_hash(service))
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {"name": name},
        "revision": 1,
        "data": template,
    }


def deployment(
    service: InferenceService,
    template: dict[str, Any],
    of: str,
    paused: bool = False,
    shared: Collection[str] = (),
) -> dict[str, Any]:
    """Return the Deployment with the ``template`` of revision ``of``; ``paused`` pauses a rollout.

    ``shared`` are claims whose volumes pods on several nodes may mount.
    """
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": service.metadata.name,
            "annotations": {POD_HASH_ANNOTATION: of, **restart_annotation(service)},
        },
        "spec": {
            # An autoscaler owns the replicas: see compare.with_replicas.
            **({} if service.spec.autoscaling else {"replicas": service.spec.replicas}),
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": _deadline(service),
            **({"paused": True} if paused else {}),
            "selector": {"matchLabels": names.selector(service.metadata.name)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": rolling_update(service, template["spec"], shared),
            },
            "template": template,
        },
    }


def restart_annotation(service: InferenceService) -> dict[str, str]:
    """Return the annotation with ``restart.id``, for objects whose pod template contains it.

    Pods that the operator creates need no annotation, because the hash of their spec covers the ID.
    """
    restart_id = service.spec.restart.id
    return {RESTART_ID_ANNOTATION: restart_id} if restart_id else {}


def _deadline(service: InferenceService) -> int:
    own = service.spec.rollout.progress_deadline
    if own is not None:
        return max(1, int(parse_duration(own)))
    return int(parse_duration(service.spec.engine.startup_timeout)) + PULL_MARGIN_S


def rolling_update(
    service: InferenceService, spec: dict[str, Any], shared: Collection[str]
) -> dict[str, Any]:
    """Return the rolling-update limits. A pod is deleted first if the next one needs its resources.

    ``spec`` is the pod's spec.
    """
    wanted = service.spec.rollout
    is_exclusive = _is_exclusive(spec, shared)
    surge = "0" if is_exclusive else "1"
    unavailable = "1" if is_exclusive else "0"
    if wanted.max_surge is not None:
        surge = wanted.max_surge
        unavailable = "1" if surge in _NONE else unavailable
    if wanted.max_unavailable is not None:
        unavailable = wanted.max_unavailable
        # If only maxUnavailable is set, to 0, maxSurge must allow progress.
        surge = "1" if unavailable in _NONE and wanted.max_surge is None else surge
    return {"maxSurge": parse_count(surge), "maxUnavailable": parse_count(unavailable)}


_NONE = ("0", "0%")


def _is_exclusive(spec: dict[str, Any], shared: Collection[str]) -> bool:
    """Report whether a pod holds a resource that no other pod can have at the same time.

    Such resources are devices (from a device plugin or a claim), host ports, and volumes of claims
    that are not ``shared``.
    """
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    taken = any(_has_devices(one) or _has_node_ports(one) for one in containers)
    claimed = any(name not in shared for name in claims(spec))
    return bool(spec.get("hostNetwork") or spec.get("resourceClaims")) or taken or claimed


def claims(spec: dict[str, Any]) -> list[str]:
    """Return the names of the PersistentVolumeClaims that a pod spec mounts."""
    sources = [one.get("persistentVolumeClaim") or {} for one in spec.get("volumes") or ()]
    return [one["claimName"] for one in sources if one.get("claimName")]


def _has_devices(container: dict[str, Any]) -> bool:
    """Report whether the container requests devices.

    The names of extended resources (``nvidia.com/gpu``) have a domain; cpu and memory have none.
    """
    held = container.get("resources") or {}
    named = [*(held.get("limits") or {}), *(held.get("requests") or {})]
    return bool(held.get("claims")) or any("/" in resource for resource in named)


def _has_node_ports(container: dict[str, Any]) -> bool:
    return any(one.get("hostPort") for one in container.get("ports") or ())
