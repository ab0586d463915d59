"""Incidents of a cluster."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll_api.names import INCIDENT_PLURAL as PLURAL
from plimsoll_cli.cluster.client import PAGE, Cluster
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.incident_view import IncidentView, UnreadableError, of_object


def every(cluster: Cluster, service: str | None, tell: Callable[[str], None]) -> list[IncidentView]:
    """All incidents that can be read, by page. A label narrows the list at the API server.
    ``tell`` hears how far it is."""
    chosen = {"labelSelector": f"plimsoll.dev/service={service[:63]}"} if service else {}
    try:
        found = []
        for item in cluster.pages(PLURAL, **chosen):
            found.append(of_object(item))
            if len(found) % PAGE == 0:
                tell(f"reading incidents: {len(found)}")
        return found
    except UnreadableError as error:
        raise RunError(f"{error}: another version of Plimsoll may have written it") from None


def one(cluster: Cluster, name: str) -> IncidentView:
    """The incident of that name."""
    item = cluster.named(PLURAL, name)
    if item is None:
        space = cluster.namespace or "default"
        raise UsageError(f"incident {name}: not in namespace {space}; see: plimsoll incidents -A")
    try:
        return of_object(item)
    except UnreadableError as error:
        raise RunError(str(error)) from None
