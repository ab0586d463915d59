"""Objects as the API server merges and compares them.

``podTemplate`` merges over the rendered pod template as a strategic merge patch would: objects
merge by key and null removes a key. A list in :data:`LIST_KEYS` merges by its key where all items
have it; every other list is replaced as a whole. Whether an object must be applied again follows
from the live one by the same keys.
"""

from __future__ import annotations

from typing import Any

from plimsoll_api.names import APPLIED_HASH
from plimsoll_api.units import quantity

LIST_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort",),
    "hostAliases": ("ip",),
    # The list map keys: there may be a hard and a soft constraint on one topology.
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "resourceClaims": ("name",),
}
"""Field of a pod -> what its items merge by (``patchMergeKey`` of core/v1)."""


def item_key(item: Any, keys: tuple[str, ...]) -> tuple[str | int, ...] | None:
    """Return what ``item`` merges by, None if it lacks it."""
    if not isinstance(item, dict):
        return None
    found = tuple(item.get(key) for key in keys)
    return found if all(isinstance(one, str | int) for one in found) else None  # type: ignore[return-value]


def merge(base: Any, patch: Any, field: str = "") -> Any:
    """Merge ``patch`` over ``base``; neither is changed."""
    if isinstance(patch, dict):
        merged = dict(base) if isinstance(base, dict) else {}
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = merge(merged.get(key), value, key)
        return merged
    keys = LIST_KEYS.get(field)
    if isinstance(patch, list) and keys and all(item_key(one, keys) for one in patch):
        return _merge_list(base if isinstance(base, list) else [], patch, keys)
    return patch


def _merge_list(base: list[Any], patch: list[Any], keys: tuple[str, ...]) -> list[Any]:
    merged = list(base)
    index = {item_key(item, keys): i for i, item in enumerate(base)}
    for item in patch:
        key = item_key(item, keys)
        at = index.get(key)
        if at is None:
            index[key] = len(merged)
            merged.append(merge({}, item))
        else:
            merged[at] = merge(merged[at], item)
    return merged


def merge_template(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Merge ``patch`` over the pod template.

    The supervisor runs as an init container (a native sidecar); a patch that names it under
    ``containers``, where people look for it, means that one.
    """
    spec = dict(patch.get("spec") or {})
    rendered_init = {item["name"] for item in base["spec"].get("initContainers", ())}
    containers = spec.get("containers") or []
    moved = [item for item in containers if item.get("name") in rendered_init]
    if moved:
        spec["containers"] = [item for item in containers if item not in moved]
        spec["initContainers"] = [*(spec.get("initContainers") or ()), *moved]
    merged: dict[str, Any] = merge(base, {**patch, "spec": spec})
    return merged


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
