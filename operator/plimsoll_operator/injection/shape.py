"""Check the types of a pod spec's fields before other code reads them."""

from __future__ import annotations

from typing import Any

from plimsoll_operator.injection.errors import InjectionError

Object = dict[str, Any]
TypeShape = Any
"""Expected type of a value: a type, a dict of fields, or a list with the shape of its items."""

STRING_LIST_SHAPE = [str]
NAMED_LIST_SHAPE = [{"name": str}]
MOUNTED_FILES_SHAPE = {"name": str, "items": [{"key": str, "path": str}]}
PROBE_SHAPE = {"httpGet": {"scheme": str, "path": str}, "exec": {"command": STRING_LIST_SHAPE}}
CONTAINER_SHAPE = {
    "name": str,
    "image": str,
    "command": STRING_LIST_SHAPE,
    "args": STRING_LIST_SHAPE,
    "env": [{"name": str, "value": str, "valueFrom": {}}],
    "envFrom": [{"configMapRef": {"name": str}, "secretRef": {}, "prefix": str}],
    "ports": [{"name": str}],
    "volumeMounts": [{"name": str, "mountPath": str, "subPath": str}],
    "resources": {"limits": {}, "requests": {}},
    "securityContext": {"capabilities": {"add": STRING_LIST_SHAPE, "drop": STRING_LIST_SHAPE}},
    "lifecycle": {"preStop": PROBE_SHAPE, "postStart": PROBE_SHAPE},
    "startupProbe": PROBE_SHAPE,
    "readinessProbe": PROBE_SHAPE,
    "livenessProbe": PROBE_SHAPE,
    "restartPolicy": str,
}
POD_SHAPE = {
    "containers": [CONTAINER_SHAPE],
    "initContainers": [CONTAINER_SHAPE],
    "model": {**CONTAINER_SHAPE, "modelFormat": {"name": str}, "runtime": str},
    "volumes": [
        {
            "name": str,
            "configMap": MOUNTED_FILES_SHAPE,
            "projected": {"sources": [{"configMap": MOUNTED_FILES_SHAPE}]},
        }
    ],
    "imagePullSecrets": NAMED_LIST_SHAPE,
    "supportedModelFormats": NAMED_LIST_SHAPE,
    "securityContext": {},
    "nodeSelector": {},
    "os": {"name": str},
    "restartPolicy": str,
}
REQUIRED_FIELDS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("name", "mountPath"),
}
"""Fields that each item of a list must have."""
TYPE_NAMES: dict[Any, str] = {str: "a string", dict: "an object", list: "a list"}


def check_types(pod: Object, path: str) -> None:
    """Reject a pod spec with a field of the wrong type. Raises InjectionError."""
    _check_value(pod, POD_SHAPE, path, "")


def _check_value(value: Any, shape: TypeShape, path: str, field: str) -> None:
    kind: type = shape if isinstance(shape, type) else type(shape)
    if value is None:
        return
    if not isinstance(value, kind):
        raise InjectionError(f"{path} must be {TYPE_NAMES[kind]}, not {_describe_value(value)}")
    if isinstance(value, dict):
        for key in sorted(shape.keys() & value.keys()):
            _check_value(value[key], shape[key], f"{path}.{key}", key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            name = item.get("name") if isinstance(item, dict) else None
            item_path = f"{path}[{name if isinstance(name, str) else index}]"
            if item is None:
                raise InjectionError(f"{item_path} must not be empty")
            _check_value(item, shape[0], item_path, field)
            for needed in REQUIRED_FIELDS.get(field, ()):
                if not item.get(needed):
                    raise InjectionError(f"{item_path}.{needed}: required")


def _describe_value(value: Any) -> str:
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {value}"
    return TYPE_NAMES.get(type(value), "nothing")
