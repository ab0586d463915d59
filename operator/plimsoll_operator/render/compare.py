"""Merge and compare objects like the API server.

A ``podTemplate`` is merged like a strategic merge patch, with the keys in :data:`LIST_MERGE_KEYS`.
An object is applied again only if the hash of the desired object has changed, or the hash of the
fields that Plimsoll owns. Neither changes if the API server formats a quantity differently or a
webhook rewrites an image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plimsoll_api.names import APPLIED_HASH_ANNOTATION
from plimsoll_api.units import parse_quantity
from plimsoll_api.workloads import LWS_KIND
from plimsoll_operator.render.names import OWNED_FIELDS_KEY

LIST_MERGE_KEYS: dict[str, tuple[str, ...]] = {
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
    # Use both keys, because a topology may have a hard and a soft constraint.
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "resourceClaims": ("name",),
}
"""Keys by which the lists of a pod spec merge (``patchMergeKey`` of core/v1), by field."""


def get_item_key(item: Any, keys: tuple[str, ...]) -> tuple[str | int, ...] | None:
    """Return the values of ``keys`` in ``item``; None if a key is missing."""
    if not isinstance(item, dict):
        return None
    values = tuple(item.get(key) for key in keys)
    return values if all(isinstance(value, str | int) for value in values) else None  # type: ignore[return-value]


def merge_patch(base: Any, patch: Any, field: str = "") -> Any:
    """Return ``base`` with ``patch`` merged over it, without changing either."""
    if isinstance(patch, dict):
        merged = dict(base) if isinstance(base, dict) else {}
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = merge_patch(merged.get(key), value, key)
        return merged
    keys = LIST_MERGE_KEYS.get(field)
    if isinstance(patch, list) and keys and all(get_item_key(one, keys) for one in patch):
        return _merge_list(base if isinstance(base, list) else [], patch, keys)
    return patch


def _merge_list(base: list[Any], patch: list[Any], keys: tuple[str, ...]) -> list[Any]:
    merged = list(base)
    index = {get_item_key(item, keys): i for i, item in enumerate(base)}
    for item in patch:
        key = get_item_key(item, keys)
        position = index.get(key)
        if position is None:
            index[key] = len(merged)
            merged.append(merge_patch({}, item))
        else:
            merged[position] = merge_patch(merged[position], item)
    return merged


def merge_template(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return the pod template ``base`` with ``patch`` merged over it.

    A patch may list the supervisor, which is an init container, under ``containers``.
    """
    spec = dict(patch.get("spec") or {})
    rendered_init = {item["name"] for item in base["spec"].get("initContainers", ())}
    containers = spec.get("containers") or []
    moved = [item for item in containers if item.get("name") in rendered_init]
    if moved:
        spec["containers"] = [item for item in containers if item not in moved]
        spec["initContainers"] = [*(spec.get("initContainers") or ()), *moved]
    merged: dict[str, Any] = merge_patch(base, {**patch, "spec": spec})
    return merged


WORKLOAD_KINDS = ("Deployment", LWS_KIND)
"""Kinds of workloads that create a service's pods: for a single node, and for several nodes."""
MAX_LISTED_MISSING_FIELDS = 8
_TEXT_FIELDS = frozenset(
    {"annotations", "args", "command", "data", "labels", "matchLabels", "value"}
)
"""Fields whose values are compared as text, even if they look like quantities."""


def needs_apply(
    desired: dict[str, Any], live: dict[str, Any] | None, fields_hash: str | None = None
) -> bool:
    """Report whether ``desired`` must be applied, because ``live`` is missing or differs.

    ``fields_hash`` covers Plimsoll's fields after the last application; None after a restart of
    the operator.
    """
    if live is None or _get_applied_hash(desired) != _get_applied_hash(live):
        return True
    if fields_hash is None:
        return not has_all_fields(live, desired)
    return get_owned_fields_hash(live, desired) != fields_hash


def get_owned_fields_hash(live: dict[str, Any], desired: dict[str, Any]) -> str | None:
    """Return the hash of the fields in ``live`` that Plimsoll owns; None if the hash is unknown."""
    fields: str | None = live["metadata"].get(OWNED_FIELDS_KEY)
    if fields is None or "replicas" in (desired.get("spec") or {}):
        return fields
    return fields.removesuffix("+replicas")


def list_missing_fields(live: dict[str, Any], desired: dict[str, Any]) -> list[str]:
    """Return the fields of ``desired`` that ``live`` lacks.

    If there are too many, the last item gives the number of the rest. A default value that the API
    server drops (false, 0, empty) does not count as missing.
    """
    missing = list(_iterate_missing_fields(live, desired, "", ""))
    unlisted = len(missing) - MAX_LISTED_MISSING_FIELDS
    more = [f"{unlisted} more"] if unlisted > 0 else []
    return missing[:MAX_LISTED_MISSING_FIELDS] + more


def _iterate_missing_fields(live: Any, desired: Any, field: str, path: str) -> Iterator[str]:
    if desired in (None, "", False, 0, [], {}):
        return
    if live is None:
        yield path
    elif isinstance(desired, dict) and isinstance(live, dict):
        for key, value in desired.items():
            yield from _iterate_missing_fields(
                live.get(key), value, key, f"{path}.{key}".lstrip(".")
            )
    elif isinstance(desired, list) and isinstance(live, list):
        keys = LIST_MERGE_KEYS.get(field)
        if keys is not None and all(get_item_key(one, keys) for one in desired):
            live_by_key = {get_item_key(one, keys): one for one in live}
            for one in desired:
                key = get_item_key(one, keys)
                name = ",".join(map(str, key or ()))
                yield from _iterate_missing_fields(live_by_key.get(key), one, "", f"{path}[{name}]")
        elif len(live) == len(desired):
            for index, pair in enumerate(zip(live, desired, strict=True)):
                yield from _iterate_missing_fields(*pair, "", f"{path}[{index}]")


def add_current_replicas(
    desired: dict[str, Any], live: dict[str, Any] | None, initial_replicas: int
) -> dict[str, Any]:
    """Return ``desired`` with the current replicas if an autoscaler sets them.

    A new workload gets ``initial_replicas``. The result contains the resource version, so that the
    API server rejects it (409) if the autoscaler changes the workload meanwhile.
    """
    if desired["kind"] not in WORKLOAD_KINDS or "replicas" in desired["spec"]:
        return desired
    if live is None:
        return desired | {"spec": desired["spec"] | {"replicas": initial_replicas}}
    version = {"resourceVersion": live["metadata"]["resourceVersion"]}
    return desired | {
        "metadata": desired["metadata"] | version,
        "spec": desired["spec"] | {"replicas": live["spec"].get("replicas", initial_replicas)},
    }


def _get_applied_hash(item: dict[str, Any]) -> str | None:
    applied: str | None = (item["metadata"].get("annotations") or {}).get(APPLIED_HASH_ANNOTATION)
    return applied


def has_all_fields(live: Any, desired: Any, field: str = "", as_text: bool = False) -> bool:
    """Report whether ``live`` contains everything in ``desired``; ``live`` may contain more.

    Empty and missing values are equal, as are quantities of the same amount (``1000m`` and ``1``).
    """
    if desired in (None, "", [], {}) and live in (None, "", [], {}):
        return True
    if isinstance(desired, dict):
        return isinstance(live, dict) and all(
            has_all_fields(live.get(key), value, key, as_text or key in _TEXT_FIELDS)
            for key, value in desired.items()
        )
    if isinstance(desired, list):
        return isinstance(live, list) and _has_all_items(live, desired, field, as_text)
    return bool(live == desired) or (not as_text and _is_same_amount(live, desired))


def _has_all_items(live: list[Any], desired: list[Any], field: str, as_text: bool) -> bool:
    keys = LIST_MERGE_KEYS.get(field)
    if keys is None or not all(get_item_key(item, keys) for item in desired):
        return len(live) == len(desired) and all(
            has_all_fields(one, other, "", as_text)
            for one, other in zip(live, desired, strict=True)
        )
    by_key = {get_item_key(item, keys): item for item in live}
    return all(
        has_all_fields(by_key.get(get_item_key(item, keys)), item, "", as_text) for item in desired
    )


def _is_same_amount(live: Any, desired: Any) -> bool:
    if isinstance(desired, bool) or not isinstance(live, str):
        return False  # the API server returns quantities as text
    try:
        return parse_quantity(live) == parse_quantity(desired)
    except ValueError:
        return False
