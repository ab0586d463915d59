"""Whether an object must be applied again: compare the wanted object with the live one."""

from __future__ import annotations

from typing import Any

from plimsoll_api.names import APPLIED_HASH
from plimsoll_api.units import quantity
from plimsoll_operator.render.merge import LIST_KEYS, item_key

_QUANTITIES = frozenset({"limits", "requests", "sizeLimit"})
"""Under these the API server rewrites quantities: ``1000m`` comes back as ``1``."""


def needs_apply(desired: dict[str, Any], live: dict[str, Any] | None) -> bool:
    """Return True if ``live`` is absent, lacks part of ``desired``, or was applied with more."""
    if live is None:
        return True
    return not (_applied_hash(desired) == _applied_hash(live) and contains(live, desired))


def with_replicas(
    desired: dict[str, Any], live: dict[str, Any] | None, first: int
) -> dict[str, Any]:
    """Prepare a Deployment under an autoscaler for apply: with the replicas that it has.

    Server-side apply takes a field away that its owner leaves out, and the default would be one
    replica. The resource version makes the server refuse (409) when the autoscaler was quicker.
    """
    if desired["kind"] != "Deployment" or "replicas" in desired["spec"]:
        return desired
    if live is None:
        return desired | {"spec": desired["spec"] | {"replicas": first}}
    version = {"resourceVersion": live["metadata"]["resourceVersion"]}
    return desired | {
        "metadata": desired["metadata"] | version,
        "spec": desired["spec"] | {"replicas": live["spec"].get("replicas", first)},
    }


def _applied_hash(item: dict[str, Any]) -> str | None:
    found: str | None = (item["metadata"].get("annotations") or {}).get(APPLIED_HASH)
    return found


def contains(live: Any, wanted: Any, field: str = "", amounts: bool = False) -> bool:
    """Whether ``live`` holds all of ``wanted``; what it holds besides does not matter.

    Empty and absent are the same, for the API server drops empty values.
    """
    if wanted in (None, "", [], {}) and live in (None, "", [], {}):
        return True
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(
            contains(live.get(key), value, key, amounts or key in _QUANTITIES)
            for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(live, list) and _list_contains(live, wanted, field, amounts)
    if amounts and live is not None and live != wanted:
        return _same_amount(live, wanted)
    return bool(live == wanted)


def _list_contains(live: list[Any], wanted: list[Any], field: str, amounts: bool) -> bool:
    keys = LIST_KEYS.get(field)
    if keys is None or not all(item_key(item, keys) for item in wanted):
        return len(live) == len(wanted) and all(
            contains(one, other, "", amounts) for one, other in zip(live, wanted, strict=True)
        )
    by_key = {item_key(item, keys): item for item in live}
    return all(contains(by_key.get(item_key(item, keys)), item, "", amounts) for item in wanted)


def _same_amount(live: Any, wanted: Any) -> bool:
    try:
        return quantity(live) == quantity(wanted)
    except ValueError:
        return False
