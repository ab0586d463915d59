"""Incidents of a cluster."""

from __future__ import annotations

from plimsoll_api.leakincident import PLURAL
from plimsoll_cli.cluster.client import Cluster
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.told import Told, UnreadableError, of_object


def every(cluster: Cluster, service: str | None) -> list[Told]:
    """All incidents that can be read, by page. A label narrows the list at the API server."""
    chosen = {"labelSelector": f"plimsoll.dev/service={service[:63]}"} if service else {}
    try:
        return [of_object(item) for item in cluster.pages(PLURAL, **chosen)]
    except UnreadableError as error:
        raise RunError(f"{error}: was it written by another version?") from None


def one(cluster: Cluster, name: str) -> Told:
    """The incident of that name."""
    item = cluster.named(PLURAL, name)
    if item is None:
        space = cluster.namespace or "default"
        raise UsageError(f"incident {name}: not in namespace {space}; see: plimsoll incidents -A")
    try:
        return of_object(item)
    except UnreadableError as error:
        raise RunError(str(error)) from None
