"""Render the parts of a container spec that all containers of a pod have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plimsoll_api.resources import EngineResources, Resources
from plimsoll_api.serving import DOWNLOAD_RESOURCES, SUPERVISOR_RESOURCES
from plimsoll_api.units import parse_quantity
from plimsoll_operator.render import names

Object = dict[str, Any]

PROBE_PERIOD_S = 2

LOG_ON_ERROR = {"terminationMessagePolicy": "FallbackToLogsOnError"}
"""Container fields that add the end of the log to the pod's status after a failure."""


@dataclass(frozen=True)
class Images:
    """Default images of services and policies, with their pull secrets and resources.

    If ``probe`` is None, the probe uses the supervisor's image. ``host`` is the listen address of
    engines that support only one address family.
    """

    engine: str
    supervisor: str
    probe: str | None = None
    pull_secrets: tuple[str, ...] = ()
    resources: Resources = SUPERVISOR_RESOURCES
    download: Resources = DOWNLOAD_RESOURCES
    host: str = "0.0.0.0"


def make_http_probe(path: str, port: int, scheme: str = "HTTP") -> dict[str, Any]:
    """Return an ``httpGet`` probe without thresholds."""
    return {
        "httpGet": {"path": path, "port": port, "scheme": scheme},
        "periodSeconds": PROBE_PERIOD_S,
        "timeoutSeconds": 5,
    }


def make_restricted_context() -> dict[str, Any]:
    """Return a container's security context for the restricted Pod Security Standard."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def make_resources(resources: Resources) -> dict[str, Any]:
    """Return a container's limits and requests."""
    return resources.model_dump(by_alias=True, include={"limits", "requests"})


def make_device_claims(resources: EngineResources) -> tuple[list[Object], list[Object]]:
    """Return the resource claims of the pod, and the claims of the engine's container."""
    listed = [one.model_dump(by_alias=True, exclude_none=True) for one in resources.resource_claims]
    pod = [{key: one[key] for key in one if key != "request"} for one in listed]
    return pod, [{key: one[key] for key in ("name", "request") if key in one} for one in listed]


QOS_RESOURCES = ("cpu", "memory")
LIMITS_UNDER_QUOTA = {"cpu": "200m", "memory": "256Mi", "ephemeral-storage": "512Mi"}
"""Limits of a container that Plimsoll adds to a pod whose other containers all have limits."""
REQUESTS_UNDER_QUOTA = {"cpu": "20m", "memory": "96Mi", "ephemeral-storage": "64Mi"}
"""Requests of a container that Plimsoll adds to a pod whose other containers all have requests."""


def fit_resources(resources: Resources, other_containers: Iterable[Object]) -> Object:
    """Return limits and requests for a container that Plimsoll adds to ``other_containers``.

    The container sets each resource that all others set, because a ResourceQuota may require it. A
    pod of QoS class Guaranteed keeps the class.
    """
    other_containers = list(other_containers)
    each = [_get_resources(one) for one in other_containers]
    limits, requests = dict(resources.limits), dict(resources.requests)
    for name in LIMITS_UNDER_QUOTA:
        if each and all(name in one["limits"] for one in each):
            limits.setdefault(
                name, max(LIMITS_UNDER_QUOTA[name], requests.get(name, "0"), key=parse_quantity)
            )
        if each and all(name in one["limits"] or name in one["requests"] for one in each):
            requests.setdefault(
                name, limits[name] if name in resources.limits else REQUESTS_UNDER_QUOTA[name]
            )
    if is_guaranteed(other_containers):
        requests |= {name: limits[name] for name in QOS_RESOURCES}
    return {"limits": limits, "requests": requests}


def list_all_containers(spec: Object) -> list[Object]:
    """Return the init containers and containers of a pod's ``spec``."""
    return [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]


def list_other_containers(pod: Object) -> list[Object]:
    """Return the containers of a pod spec, except those that Plimsoll adds."""
    return [
        one
        for one in list_all_containers(pod)
        if one.get("name") not in (names.SUPERVISOR, names.PROBE)
    ]


def list_native_sidecars(pod: Object) -> list[Object]:
    """Return the native sidecars of a pod spec, except Plimsoll's."""
    listed = list_other_containers({"initContainers": pod.get("initContainers")})
    return [one for one in listed if one.get("restartPolicy") == "Always"]


# Malformed limits and requests are empty.
def _get_resources(container: Object) -> dict[str, Object]:
    value = container.get("resources")
    declared = value if isinstance(value, dict) else {}
    return {
        key: part if isinstance(part := declared.get(key), dict) else {}
        for key in ("limits", "requests")
    }


def is_guaranteed(containers: Iterable[Object]) -> bool:
    """Report whether a pod with these containers has the QoS class Guaranteed."""
    # Kubernetes compares sums, with the same result: no request may exceed its limit.
    declared = [_get_resources(one) for one in containers]
    return bool(declared) and all(map(_has_equal_amounts, declared))


def _has_equal_amounts(resources: dict[str, Object]) -> bool:
    try:
        limits = {
            name: parse_quantity(str(resources["limits"].get(name, 0))) for name in QOS_RESOURCES
        }
        requests = {
            name: parse_quantity(
                str(resources["requests"].get(name, resources["limits"].get(name, 0)))
            )
            for name in QOS_RESOURCES
        }
    except ValueError:
        return False
    return all(limits.values()) and limits == requests
