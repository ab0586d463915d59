"""The policies that a replica knows: what admission decides by, without asking the API server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_operator.kinds import Object


class Policies:
    """The policies of the newest list. What did not change is not parsed again."""

    def __init__(self) -> None:
        self._parsed: dict[tuple[str, str], SupervisionPolicy | None] = {}
        self._by_namespace: dict[str, list[SupervisionPolicy]] = {}

    def replace(self, items: Iterable[Object]) -> None:
        """Take a list of all policies in."""
        parsed: dict[tuple[str, str], SupervisionPolicy | None] = {}
        found: list[tuple[str, str, SupervisionPolicy]] = []
        for item in items:
            meta = item["metadata"]
            key = (meta.get("uid", ""), meta.get("resourceVersion", ""))
            policy = parsed[key] = self._parsed[key] if key in self._parsed else _parse(item)
            if policy is not None and not meta.get("deletionTimestamp"):
                found.append((meta.get("creationTimestamp") or "~", policy.metadata.name, policy))
        self._parsed = parsed
        by_namespace: dict[str, list[SupervisionPolicy]] = {}
        for _, _, policy in sorted(found, key=lambda one: one[:2]):
            by_namespace.setdefault(policy.metadata.namespace, []).append(policy)
        self._by_namespace = by_namespace

    def all(self) -> list[SupervisionPolicy]:
        """All valid policies, by namespace, the oldest first."""
        return [one for _, held in sorted(self._by_namespace.items()) for one in held]

    def of(self, namespace: str, labels: Mapping[str, str]) -> SupervisionPolicy | None:
        """The policy that supervises a pod: of those that select it, the oldest one."""
        held = self._by_namespace.get(namespace, ())
        return next((one for one in held if one.spec.selector.matches(labels)), None)


def _parse(item: Object) -> SupervisionPolicy | None:
    """None for one that an older or newer operator's definition let through and this one's does
    not: it selects nothing, and its status says why."""
    wanted = {key: item[key] for key in ("apiVersion", "kind", "metadata", "spec") if key in item}
    try:
        return SupervisionPolicy.model_validate(wanted)
    except ValidationError:
        return None
