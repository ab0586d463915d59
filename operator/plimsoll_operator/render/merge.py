"""Merges ``podTemplate`` over the rendered pod template, as a strategic merge patch would.

Objects merge by key and null removes a key. A list in :data:`LIST_KEYS` merges by its key where
all items have it; every other list is replaced as a whole.
"""

from __future__ import annotations

from typing import Any

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
