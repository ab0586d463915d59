"""Add the supervisor's container, its volumes and the probe to a pod spec."""

from __future__ import annotations

from typing import Any

from plimsoll_operator.injection.checks import (
    CONFIG_VOLUME,
    SUPERVISOR_VOLUME_NAMES,
    SUPERVISOR_VOLUME_PREFIX,
    SUPERVISOR_VOLUME_SOURCES,
    TOKEN_VOLUME,
)
from plimsoll_operator.injection.engine import EngineContainer
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import InjectionOptions
from plimsoll_operator.injection.pods import (
    find_engine_container,
    list_containers,
    list_engine_objects,
    set_container_name_variable,
)
from plimsoll_operator.render import names
from plimsoll_operator.render.containers import list_native_sidecars, list_other_containers
from plimsoll_operator.render.eviction import mark_evictable_volumes
from plimsoll_operator.render.paths import POD_LAYOUT, SupervisorLayout
from plimsoll_operator.render.pod import (
    add_pull_secrets,
    make_supervisor_container,
    make_token_sources,
)
from plimsoll_operator.render.probe import add_probe, remove_probe

Object = dict[str, Any]


def add_supervisor(
    pod: Object,
    engine: EngineContainer,
    options: InjectionOptions,
    config_map: str,
    env: tuple[Object, ...] = (),
    layout: SupervisorLayout = POD_LAYOUT,
) -> None:
    """Add the supervisor of ``engine`` to the pod spec ``pod``, in place. Raises InjectionError.

    Replace the supervisor of an earlier injection. ``env`` are further variables of the supervisor,
    and ``layout`` its paths and ports.
    """
    supervisor = _make_container(pod, engine, options, layout)
    supervisor["env"] = [*supervisor["env"], *env]
    remove_probe(pod, list_engine_objects(pod))
    _add_container_to_pod(pod, supervisor, engine.container, config_map, options)
    set_container_name_variable(pod, engine.container)
    if options.probe:
        _add_probe(pod, supervisor, engine, options.probe_image)


def mark_supervisor_volumes(metadata: Object, pod: Object, inherited: Object | None = None) -> None:
    """Mark the supervisor's volumes in the pod spec ``pod`` as no reason to keep its node.

    ``metadata`` has the pod's annotations, which override the ``inherited`` ones.
    """
    own = metadata.get("annotations") or {}
    metadata["annotations"] = own | mark_evictable_volumes(
        (inherited or {}) | own, pod["volumes"], SUPERVISOR_VOLUME_NAMES
    )


def _add_probe(pod: Object, supervisor: Object, engine: EngineContainer, image: str | None) -> None:
    container = find_engine_container(pod, engine.container)
    assert container is not None, "find_engine returned a container of this pod"
    try:
        add_probe(pod, container, supervisor, image)
    except ValueError as error:
        raise InjectionError(f"{engine.path}: {error}") from None


def _make_container(
    pod: Object, engine: EngineContainer, options: InjectionOptions, layout: SupervisorLayout
) -> Object:
    containers = list_containers(pod, options.runtimes)
    others = list_other_containers(pod | {"containers": containers})
    base = make_supervisor_container(
        options.supervisor, options.image, options.resources, others, layout
    )
    # Without a policy, the supervisor writes no objects and needs no service account token.
    unwanted = ("shm",) if options.token else ("token", "shm")
    mounts = [mount for mount in base["volumeMounts"] if mount["name"] not in unwanted]
    # The supervisor searches the engine's own shared memory for leftover files.
    shm = [engine.shm] if engine.shm is not None else []
    uid = options.run_as_user if options.run_as_user is not None else engine.user_id
    security: Object = {"seccompProfile": {"type": "RuntimeDefault"}}
    if uid is not None or not options.assigned_user:
        security |= {"runAsUser": uid or 0, "runAsNonRoot": bool(uid)}
    used = {
        port.get("name")
        for container in (*containers, *list_native_sidecars(pod))
        for port in container.get("ports") or []
        if isinstance(port, dict)
    }
    return base | {
        # A Service resolves a named target port in any container, so names must be unique.
        "ports": [
            port | {"name": f"{port['name']}-{port['containerPort']}"}
            if port["name"] in used
            else port
            for port in base["ports"]
        ],
        "volumeMounts": [
            *(mount | {"name": SUPERVISOR_VOLUME_PREFIX + mount["name"]} for mount in mounts),
            *shm,
        ],
        "securityContext": base["securityContext"] | security,
    }


def _add_container_to_pod(
    pod: Object, container: Object, engine: str, config_map: str, options: InjectionOptions
) -> None:
    pod["shareProcessNamespace"] = True
    add_pull_secrets(pod, options.supervisor, options.pull_secrets)
    others = [c for c in pod.get("initContainers") or [] if c.get("name") != names.SUPERVISOR]
    # The supervisor starts before the engine and stops after it, but after any model download.
    at = next((n for n, one in enumerate(others) if one.get("name") == engine), len(others))
    pod["initContainers"] = [*others[:at], container, *others[at:]]
    volumes = {
        SUPERVISOR_VOLUME_PREFIX + name: source
        for name, source in SUPERVISOR_VOLUME_SOURCES.items()
    }
    # The ConfigMap may not exist when a pod is created, and is deleted with its policy. The pod
    # must start without it: the supervisor then only observes.
    volumes[CONFIG_VOLUME] = {"configMap": {"name": config_map, "optional": True}}
    if options.token:
        volumes[TOKEN_VOLUME] = {"projected": {"sources": make_token_sources()}}
    kept = [v for v in pod.get("volumes") or [] if v.get("name") not in volumes]
    pod["volumes"] = [*kept, *({"name": name, **source} for name, source in volumes.items())]
