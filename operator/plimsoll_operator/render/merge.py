"""Merges ``podTemplate`` over the rendered pod template, as a strategic merge patch would.

Objects merge by key and null removes a key. A list in :data:`LIST_KEYS` merges by its key where
all items have it; every other list is replaced as a whole.
"""

from __future__ import annotations

from typing import Any

LIST_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}
"""Field of a pod -> the key its items merge by (``patchMergeKey`` of core/v1)."""


def merge(base: Any, patch: Any, field: str = "") -> Any:
    """``base`` with ``patch`` over it; neither is changed."""
    if isinstance(patch, dict):
        merged = dict(base) if isinstance(base, dict) else {}
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = merge(merged.get(key), value, key)
        return merged
    if isinstance(patch, list) and field in LIST_KEYS and _keyed(patch, LIST_KEYS[field]):
        return _merge_list(base if isinstance(base, list) else [], patch, LIST_KEYS[field])
    return patch


def _keyed(items: list[Any], key: str) -> bool:
    return all(isinstance(item, dict) and isinstance(item.get(key), str | int) for item in items)


def _merge_list(base: list[Any], patch: list[Any], key: str) -> list[Any]:
    merged = list(base)
    index = {item.get(key): i for i, item in enumerate(base) if isinstance(item, dict)}
    for item in patch:
        at = index.get(item[key])
        if at is None:
            index[item[key]] = len(merged)
            merged.append(merge({}, item))
        else:
            merged[at] = merge(merged[at], item)
    return merged


def merge_template(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """The pod template with ``patch`` over it.

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
