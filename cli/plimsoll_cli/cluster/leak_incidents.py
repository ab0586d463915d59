"""Incidents of a cluster."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll_api.names import INCIDENT_PLURAL as PLURAL
from plimsoll_api.names import POLICY_KIND, POLICY_LABEL, SERVICE_LABEL
from plimsoll_cli.cluster.client import PAGE, Cluster
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.incident_view import IncidentView, UnreadableError, of_object
from plimsoll_cli.targets import parse

MAX_LABEL = 63


def every(cluster: Cluster, target: str | None, tell: Callable[[str], None]) -> list[IncidentView]:
    """List all incidents that may be of ``target``, page by page.

    Labels narrow the list at the API server; ``tell`` hears how far it is. Raises RunError.
    """
    found: dict[tuple[str, str], IncidentView] = {}
    try:
        for query in queries(target):
            for item in cluster.pages(PLURAL, **query):
                one = of_object(item)
                found[one.namespace, one.name] = one
                if len(found) % PAGE == 0:
                    tell(f"reading incidents: {len(found)}")
        return list(found.values())
    except UnreadableError as error:
        raise RunError(f"{error}: another version of Plimsoll may have written it") from None


def queries(target: str | None) -> list[dict[str, str]]:
    """Return the list queries that together find all incidents of ``target``."""
    if target is None or ((meant := parse(target)).is_pod and "/" in target):
        return [{}]
    # A name alone may be a service's, a workload's or a policy's.
    keys = [POLICY_LABEL] if meant.kind == POLICY_KIND else [SERVICE_LABEL]
    keys += [POLICY_LABEL] if meant.is_pod else []
    value = meant.name[:MAX_LABEL].rstrip("-.")
    return [{"labelSelector": f"{key}={value}"} for key in keys]


def one(cluster: Cluster, name: str) -> IncidentView:
    """Read the incident of that name, or with that name in its supervisor's page and log.

    Raises UsageError and RunError.
    """
    item = cluster.named(PLURAL, name) or next(
        (one for one in cluster.pages(PLURAL) if (one.get("spec") or {}).get("id") == name), None
    )
    if item is None:
        space = cluster.namespace or "default"
        raise UsageError(f"incident {name}: not in namespace {space}; see: plimsoll incidents -A")
    try:
        return of_object(item)
    except UnreadableError as error:
        raise RunError(str(error)) from None
