"""Which policy supervises a pod: of those that select it, the oldest one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_operator.kinds import Object
from plimsoll_operator.plan import InvalidSpec, read


def in_order(items: Iterable[Object]) -> list[SupervisionPolicy]:
    """Read the policies of one namespace, oldest first; of two of the same second, by name.

    A policy that is invalid or is being deleted selects nothing.
    """
    found = []
    for item in items:
        meta = item["metadata"]
        if meta.get("deletionTimestamp"):
            continue
        try:
            policy = read(SupervisionPolicy, item)
        except InvalidSpec:
            continue
        found.append((str(meta.get("creationTimestamp") or "~"), policy.metadata.name, policy))
    return [policy for _, _, policy in sorted(found, key=lambda one: one[:2])]


def selecting(
    policies: Iterable[SupervisionPolicy], labels: Mapping[str, str]
) -> list[SupervisionPolicy]:
    """Those of ``policies`` that select a pod with ``labels``; the first of them supervises it."""
    return [one for one in policies if one.spec.selector.matches(labels)]
