"""The policies that a replica knows: what admission decides by, without asking the API server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_operator.fleet.selected_pods import in_order, selecting
from plimsoll_operator.kinds import Object


class _Known(NamedTuple):
    """A policy; ``parsed`` is empty if it selects nothing. ``age`` sorts, the oldest first."""

    asked: tuple[object, ...]
    age: tuple[str, str]
    parsed: list[SupervisionPolicy]
    status: Object


class Policies:
    """The policies as the watch of this replica shows them."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, _Known]] = {}
        self._ordered: dict[str, list[SupervisionPolicy]] = {}

    def take(self, item: Object, gone: bool) -> None:
        """Take a policy in, or that it is gone. A change of its status alone is not parsed."""
        meta = item["metadata"]
        namespace, name = meta["namespace"], meta["name"]
        held = self._known.setdefault(namespace, {})
        before = held.pop(name, None)
        # The status is the operator's own; all else is what somebody asked for.
        parts = ("uid", "generation", "deletionTimestamp", "annotations", "creationTimestamp")
        asked = tuple(meta.get(part) for part in parts)
        same = before is not None and before.asked == asked and not gone
        if not gone:
            age = (str(meta.get("creationTimestamp") or "~"), name)
            parsed = before.parsed if same and before else in_order([item])
            held[name] = _Known(asked, age, parsed, item.get("status") or {})
        if not same:
            ages = sorted(held.values(), key=lambda one: one.age)
            self._ordered[namespace] = [policy for one in ages for policy in one.parsed]

    def all(self) -> list[SupervisionPolicy]:
        """All valid policies, by namespace, the oldest first."""
        return [one for _, held in sorted(self._ordered.items()) for one in held]

    def of(self, namespace: str, labels: Mapping[str, str]) -> SupervisionPolicy | None:
        """Find the policy that supervises a pod: the oldest of those that select it."""
        found = selecting(self._ordered.get(namespace, ()), labels)
        return found[0] if found else None

    def status(self, policy: SupervisionPolicy) -> Object:
        """Return the policy's status."""
        found = self._known.get(policy.metadata.namespace, {}).get(policy.metadata.name)
        return found.status if found else {}
