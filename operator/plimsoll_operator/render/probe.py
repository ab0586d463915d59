"""Add the probe to a pod.

An init container copies the probe's code into a directory on the engine's PYTHONPATH.
"""

from __future__ import annotations

from typing import Any

from plimsoll_api.resources import Resources
from plimsoll_api.supervisor_config import PROBE_DIR_ENV
from plimsoll_operator.render import names
from plimsoll_operator.render.containers import LOG_ON_ERROR, fit_resources, list_other_containers

Object = dict[str, Any]

PROBE_NAME = names.PROBE
"""Name of the init container, and of the volume with the code."""
SOCKET_VOLUME = "plimsoll-probe-run"
CODE_DIR = "/opt/plimsoll-probe"
SOCKET_DIR = "/run/plimsoll-probe"
PYTHONPATH_ENV = "PYTHONPATH"
PROBE_VOLUMES: tuple[Object, ...] = (
    {"name": PROBE_NAME, "emptyDir": {"sizeLimit": "4Mi"}},
    {"name": SOCKET_VOLUME, "emptyDir": {"sizeLimit": "1Mi"}},
)
PROBE_RESOURCES = Resources(
    requests={"cpu": "50m", "memory": "64Mi"}, limits={"cpu": "500m", "memory": "128Mi"}
)


def add_probe(pod: Object, engine: Object, supervisor: Object, image: str | None = None) -> None:
    """Add the probe to ``engine``, a container of ``pod``, for ``supervisor``.

    ``image`` contains the probe's code; None means the supervisor's image. Raises ValueError if
    PYTHONPATH comes from ``valueFrom``, to which nothing can be appended.
    """
    engine["env"] = _append_probe_folders(engine.get("env") or [])
    engine["volumeMounts"] = [
        *(engine.get("volumeMounts") or []),
        {"name": PROBE_NAME, "mountPath": CODE_DIR, "readOnly": True},
        {"name": SOCKET_VOLUME, "mountPath": SOCKET_DIR},
    ]
    supervisor["env"] = [*supervisor["env"], {"name": PROBE_DIR_ENV, "value": SOCKET_DIR}]
    supervisor["volumeMounts"] = [
        *supervisor["volumeMounts"],
        {"name": SOCKET_VOLUME, "mountPath": SOCKET_DIR, "readOnly": True},
    ]
    init_container = {
        "name": PROBE_NAME,
        "image": image or supervisor["image"],
        "command": ["python", "-m", "plimsoll_probe.install", CODE_DIR],
        "resources": fit_resources(PROBE_RESOURCES, list_other_containers(pod)),
        **LOG_ON_ERROR,
        "securityContext": supervisor["securityContext"],
        "volumeMounts": [{"name": PROBE_NAME, "mountPath": CODE_DIR}],
    }
    position = pod["initContainers"].index(supervisor)
    pod["initContainers"].insert(position, init_container)
    pod["volumes"] = [*pod["volumes"], *(dict(volume) for volume in PROBE_VOLUMES)]


def remove_probe(pod: Object, engines: list[Object]) -> None:
    """Undo :func:`add_probe` in ``pod`` and in its containers ``engines``."""
    own = {PROBE_NAME, SOCKET_VOLUME}
    _remove_named_items(pod, "initContainers", {PROBE_NAME})
    _remove_named_items(pod, "volumes", own)
    for engine in engines:
        _remove_named_items(engine, "volumeMounts", own)
        _remove_named_items(engine, "env", {PROBE_DIR_ENV})
        for entry in list(engine.get("env") or []):
            folders = _split_folders(str(entry.get("value") or ""))
            if entry.get("name") == PYTHONPATH_ENV and CODE_DIR in folders:
                entry["value"] = ":".join(folder for folder in folders if folder != CODE_DIR)
                if not entry["value"]:
                    _remove_named_items(engine, "env", {PYTHONPATH_ENV})


# The list itself is deleted if no item is left.
def _remove_named_items(owner: Object, key: str, dropped: set[str]) -> None:
    listed = owner.get(key) or []
    kept = [one for one in listed if one.get("name") not in dropped]
    if len(kept) == len(listed):
        return
    if kept:
        owner[key] = kept
    else:
        del owner[key]


def _append_probe_folders(env: list[Object]) -> list[Object]:
    path = next((one for one in env if one.get("name") == PYTHONPATH_ENV), None)
    if path is not None and "valueFrom" in path:
        raise ValueError(
            f"{PYTHONPATH_ENV} is set with valueFrom, so the probe's directory cannot be appended:"
            " set a value, or turn the probe off"
        )
    if path is not None and not path.get("value"):
        # Python ignores an empty value, and :func:`remove_probe` removes it.
        env, path = [one for one in env if one is not path], None
    folders = [*_split_folders(str((path or {}).get("value") or "")), CODE_DIR]
    with_probe = {"name": PYTHONPATH_ENV, "value": ":".join(folders)}
    # Keep its position, because later variables may refer to it.
    kept = [with_probe if one is path else one for one in env]
    return [
        *kept,
        *([with_probe] if path is None else []),
        {"name": PROBE_DIR_ENV, "value": SOCKET_DIR},
    ]


def _split_folders(value: str) -> list[str]:
    return [folder for folder in value.split(":") if folder]
