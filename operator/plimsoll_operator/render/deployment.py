"""The Deployment, and the revision that pins its pod template.

The template that was rendered first for a spec stays until the parts of the spec that concern pods
change: a new operator renders other templates, and must not roll engines that hold requests.
It is kept in a ControllerRevision, whose data the API server does not let anybody change.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import POD_HASH, RESTART_ID
from plimsoll_api.operation import count
from plimsoll_api.supervision import Drain
from plimsoll_api.units import format_duration, parse_duration
from plimsoll_operator.render import names
from plimsoll_operator.render.names import digest

PULL_S = 300
"""Time on top of the startup budget for scheduling and pulling an image."""


def pod_hash(service: InferenceService) -> str:
    """Hash of what the spec says about pods.

    Defaults are left out, so that a field that a later version adds does not change it.
    """
    parts = {"model", "engine", "supervisor", "pod_template", "restart"}
    spec = service.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, include=parts)
    concerns = {
        key: spec.get(key) for key in ("model", "engine", "supervisor", "podTemplate", "restart")
    }
    drain_s = service.spec.supervision.drain.deadline_s
    drain = None if drain_s == Drain().deadline_s else format_duration(drain_s)
    return digest({"drainDeadline": drain, **concerns, **_probe(service)})


def _probe(service: InferenceService) -> dict[str, Any]:
    """Return what the hash says about the probe: nothing without one, as before there was one."""
    probe = service.spec.probe
    return {"probe": {"image": probe.image}} if probe.enabled else {}


def revision(service: InferenceService, template: dict[str, Any]) -> dict[str, Any]:
    """Build the ControllerRevision that holds ``template``."""
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
    """Build the Deployment with the template ``of`` a revision; ``paused`` holds a rollout.

    ``shared`` names the claims whose volumes pods of several nodes may mount.
    """
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": service.metadata.name,
            "annotations": {POD_HASH: of, **_restart(service)},
        },
        "spec": {
            # What an autoscaler set is not ours to say: see compare.with_replicas.
            **({} if service.spec.autoscaling else {"replicas": service.spec.replicas}),
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": _deadline(service),
            **({"paused": True} if paused else {}),
            "selector": {"matchLabels": names.selector(service.metadata.name)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": _rolling(service, template, shared),
            },
            "template": template,
        },
    }


def _restart(service: InferenceService) -> dict[str, str]:
    """Not on the pods: their hash holds it already."""
    restart_id = service.spec.restart.id
    return {RESTART_ID: restart_id} if restart_id else {}


def _deadline(service: InferenceService) -> int:
    own = service.spec.rollout.progress_deadline
    if own is not None:
        return max(1, int(parse_duration(own)))
    return int(parse_duration(service.spec.engine.startup_timeout)) + PULL_S


def _rolling(
    service: InferenceService, template: dict[str, Any], shared: Collection[str]
) -> dict[str, Any]:
    """Let one go before the next one comes where that one would wait for what the first holds."""
    wanted = service.spec.rollout
    holds = _holds(template["spec"], shared)
    surge = "0" if holds else "1"
    missing = "1" if holds else "0"
    if wanted.max_surge is not None:
        surge = wanted.max_surge
        missing = "1" if surge in _NONE else missing
    if wanted.max_unavailable is not None:
        missing = wanted.max_unavailable
        # Only one is given, and it is 0: the other must let the roll-out move.
        surge = "1" if missing in _NONE and wanted.max_surge is None else surge
    return {"maxSurge": count(surge), "maxUnavailable": count(missing)}


_NONE = ("0", "0%")


def _holds(spec: dict[str, Any], shared: Collection[str]) -> bool:
    """Whether a pod holds what another one cannot have at the same time.

    That are devices, by a device plugin or by a claim, ports of the node, and volumes of claims
    that are not ``shared``.
    """
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    taken = any(_devices(one) or _node_ports(one) for one in containers)
    claimed = any(name not in shared for name in claims(spec))
    return bool(spec.get("hostNetwork") or spec.get("resourceClaims")) or taken or claimed


def claims(spec: dict[str, Any]) -> list[str]:
    """Name the PersistentVolumeClaims that a pod spec mounts."""
    sources = [one.get("persistentVolumeClaim") or {} for one in spec.get("volumes") or ()]
    return [one["claimName"] for one in sources if one.get("claimName")]


def _devices(container: dict[str, Any]) -> bool:
    """Return whether the container asks for devices.

    Extended resources (``nvidia.com/gpu``) have a domain; cpu and memory have none.
    """
    held = container.get("resources") or {}
    named = [*(held.get("limits") or {}), *(held.get("requests") or {})]
    return bool(held.get("claims")) or any("/" in resource for resource in named)


def _node_ports(container: dict[str, Any]) -> bool:
    return any(one.get("hostPort") for one in container.get("ports") or ())
