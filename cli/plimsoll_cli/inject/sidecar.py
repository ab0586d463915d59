"""Adds the supervisor to a pod spec, and writes its configuration."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.supervision import CONFIG_FILE, EngineType, encode
from plimsoll_cli.inject.engine import Engine, find
from plimsoll_cli.inject.pods import containers_of, pod_of
from plimsoll_operator.render import names, paths
from plimsoll_operator.render.containers import Images
from plimsoll_operator.render.pod import supervisor_container
from plimsoll_operator.render.supervisor import supervisor_config

Object = dict[str, Any]
PREFIX = "plimsoll-"
VOLUMES: dict[str, Object] = {
    "run": {"emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
    "state": {"emptyDir": {"sizeLimit": "256Mi"}},
    "tmp": {"emptyDir": {"sizeLimit": "64Mi"}},
}


@dataclass(frozen=True)
class Wish:
    """What the command's flags say."""

    image: str
    mode: str = "Observe"
    host_budget: str | None = "2Gi"
    device_budget: str | None = None
    window: str = "24h"
    warmup: str = "5m"
    container: str | None = None
    run_as_user: int | None = None
    dcgm_exporter_port: int | None = None


@dataclass(frozen=True)
class Injected:
    """The changed document, the ConfigMap for it, and what a person should know."""

    document: Object
    config_map: Object
    notes: tuple[str, ...]


def inject(document: Object, wish: Wish) -> Injected | None:
    """``document`` with a supervisor; None for a kind without pods. The argument stays as it is.

    Injecting again replaces what an earlier injection added.
    """
    document = copy.deepcopy(document)
    found = pod_of(document)
    if found is None:
        return None
    pod, labels = found
    meta = document.setdefault("metadata", {})
    name = str(meta.get("name") or "engine")
    where = f"{document.get('kind')} {name}"
    engine = find({**pod, "containers": containers_of(pod)}, where, wish.container)
    service = _service(name, str(meta.get("namespace") or "default"), engine, wish)
    _add(pod, _container(service, engine, wish), names.supervisor(name))
    labels[names.SERVICE_LABEL] = name[:63].rstrip("-.")
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": names.supervisor(name)}
        | ({"namespace": meta["namespace"]} if "namespace" in meta else {}),
        "data": {CONFIG_FILE: encode(supervisor_config(service)).decode()},
    }
    return Injected(document, config, tuple(_notes(where, engine, wish)))


def _service(name: str, namespace: str, engine: Engine, wish: Wish) -> InferenceService:
    """The InferenceService that would say the same: one renderer writes both configurations."""
    budgets = {
        kind: {"growthBudget": size, "window": wish.window}
        for kind, size in (("host", wish.host_budget), ("device", wish.device_budget))
        if size is not None
    }
    return InferenceService.model_validate(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name[:50].rstrip("-."), "namespace": namespace},
            "spec": {
                "model": {"uri": "file:///unused", "servedName": engine.model or name},
                "engine": {
                    "type": engine.type.value,
                    "image": "unused",
                    "port": engine.port,
                    "resources": {"limits": engine.limits},
                },
                "memory": {**budgets, "warmup": wish.warmup},
                "supervision": {"mode": wish.mode},
                "supervisor": {"dcgmExporterPort": wish.dcgm_exporter_port},
            },
        }
    )


def _container(service: InferenceService, engine: Engine, wish: Wish) -> Object:
    made = supervisor_container(service, Images(engine="unused", supervisor=wish.image))
    # It publishes nothing without an InferenceService, so it needs no token of an account.
    mounts = [mount for mount in made["volumeMounts"] if mount["name"] != "token"]
    uid = wish.run_as_user if wish.run_as_user is not None else engine.uid or 0
    same = {
        "runAsUser": uid,
        "runAsNonRoot": uid != 0,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return made | {
        "volumeMounts": [mount | {"name": PREFIX + mount["name"]} for mount in mounts],
        "securityContext": made["securityContext"] | same,
    }


def _add(pod: Object, container: Object, config_map: str) -> None:
    pod["shareProcessNamespace"] = True
    others = [c for c in pod.get("initContainers") or [] if c.get("name") != names.SUPERVISOR]
    # Last of all: it is up before the engine, and downloads are not its concern.
    pod["initContainers"] = [*others, container]
    volumes = {PREFIX + name: source for name, source in VOLUMES.items()}
    volumes[PREFIX + "config"] = {"configMap": {"name": config_map}}
    kept = [v for v in pod.get("volumes") or [] if v.get("name") not in volumes]
    pod["volumes"] = [*kept, *({"name": name, **source} for name, source in volumes.items())]


def _notes(where: str, engine: Engine, wish: Wish) -> list[str]:
    notes = [f"{where}: {engine.type.value} in container {engine.container}, port {engine.port}"]
    if engine.uid is None and wish.run_as_user is None:
        notes.append(
            f"{where}: no runAsUser is set, so the supervisor runs as root as these images do;"
            " --run-as-user names the engine's user"
        )
    if engine.limit is None:
        notes.append(f"{where}: the engine has no memory limit: time to exhaustion is the budget's")
    if engine.type is EngineType.CUSTOM:
        notes.append(
            f"{where}: the engine is not known: it can be watched and restarted, not trimmed"
        )
    if engine.port in (paths.METRICS_PORT, paths.PROBE_PORT):
        notes.append(f"{where}: port {engine.port} is the supervisor's: move the engine's")
    return notes
