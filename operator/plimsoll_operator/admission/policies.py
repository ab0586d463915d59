"""The policies that a replica knows: what admission decides by, without asking the API server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_operator.fleet.selected_pods import in_order, selecting
from plimsoll_operator.kinds import Object

Version = tuple[str, str]


class Policies:
    """The policies of the newest list. A namespace without a change is not parsed again."""

    def __init__(self) -> None:
        self._versions: dict[str, frozenset[Version]] = {}
        self._by_namespace: dict[str, list[SupervisionPolicy]] = {}
        self._statuses: dict[str, Object] = {}

    def replace(self, items: Iterable[Object]) -> None:
        """Take a list of all policies in."""
        items = list(items)
        held: dict[str, list[Object]] = {}
        for item in items:
            held.setdefault(item["metadata"]["namespace"], []).append(item)
        self._statuses = {
            item["metadata"].get("uid", ""): item.get("status") or {} for item in items
        }
        versions = {namespace: _versions(found) for namespace, found in held.items()}
        self._by_namespace = {
            namespace: self._by_namespace[namespace]
            if versions[namespace] == self._versions.get(namespace)
            else in_order(found)
            for namespace, found in held.items()
        }
        self._versions = versions

    def all(self) -> list[SupervisionPolicy]:
        """All valid policies, by namespace, the oldest first."""
        return [one for _, held in sorted(self._by_namespace.items()) for one in held]

    def of(self, namespace: str, labels: Mapping[str, str]) -> SupervisionPolicy | None:
        """Find the policy that supervises a pod: the oldest of those that select it."""
        found = selecting(self._by_namespace.get(namespace, ()), labels)
        return found[0] if found else None

    def status(self, policy: SupervisionPolicy) -> Object:
        """Return the policy's status."""
        return self._statuses.get(policy.metadata.uid, {})


def _versions(items: Iterable[Object]) -> frozenset[Version]:
    metas = [item["metadata"] for item in items]
    return frozenset((meta.get("uid", ""), meta.get("resourceVersion", "")) for meta in metas)
