"""Adds the supervisor to the pod specs of a document, and writes its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plimsoll_api.names import METRICS_PORT, PROBE_PORT, SERVICE_LABEL
from plimsoll_api.serving import SupervisorContainer
from plimsoll_api.supervision import (
    CONFIG_FILE,
    EngineEndpoint,
    EngineType,
    MemoryBudget,
    MemoryPolicy,
    Mode,
    ServiceRef,
    Supervision,
    SupervisorConfig,
    encode,
)
from plimsoll_api.units import format_bytes, parse_bytes
from plimsoll_operator.injection.engine import EngineContainer, find
from plimsoll_operator.injection.engine import names as container_names
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.pods import (
    WORKERS,
    PodSpec,
    containers_of,
    engine_of,
    engines_of,
    mark,
    pods_of,
)
from plimsoll_operator.render import names
from plimsoll_operator.render.pod import supervisor_container, token_sources
from plimsoll_operator.render.probe import add_probe, remove_probe

Object = dict[str, Any]
PREFIX = "plimsoll-"
VOLUMES: dict[str, Object] = {
    "run": {"emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
    "state": {"emptyDir": {"sizeLimit": "256Mi"}},
    "tmp": {"emptyDir": {"sizeLimit": "64Mi"}},
}
MAX_LABEL = 63


@dataclass(frozen=True)
class Fields:
    """How a person sets each option: a flag of the command line, or a field of a policy."""

    container: str = "--container"
    unrecognized: str = "--container NAME or --all"
    exclude: str = "--name or --selector"
    group_restarts: str = "--allow-group-restarts"
    host_budget: str = "--host-budget"
    run_as_user: str = "--run-as-user"


@dataclass(frozen=True)
class Options:
    """What is wanted. Budgets are bytes, times seconds. ``fields`` says how messages name the
    options."""

    image: str
    mode: Mode = Mode.OBSERVE
    host_budget_bytes: int | None = 2 << 30
    device_budget_bytes: int | None = None
    window_s: float = 86_400.0
    warmup_s: float = 300.0
    container: str | None = None
    run_as_user: int | None = None
    dcgm_exporter_port: int | None = None
    amd_exporter_port: int | None = None
    probe: bool = False
    probe_image: str | None = None
    token: bool = False
    unrecognized: bool = False
    group_restarts: bool = False
    fields: Fields = Fields()


@dataclass(frozen=True)
class Injected:
    """The changed document, its supervisor's ConfigMap, and what a person should know.

    Without a ConfigMap nothing was changed, and ``notes`` say why.
    """

    document: Object
    config_map: Object | None
    notes: tuple[str, ...]


def inject(document: Object, options: Options) -> Injected:
    """Return ``document`` with a supervisor in each of its engine's pods.

    The argument stays as it is. Injecting again replaces what an earlier injection added.
    """
    changed = _copy(document)
    metadata = changed.get("metadata")
    meta: Object = metadata if isinstance(metadata, dict) else {}
    name = str(meta.get("name") or str(meta.get("generateName") or "engine").rstrip("-"))
    where = f"{changed.get('kind')} {name}"
    config_map: Object | None = None
    notes: list[str] = []
    for pod in pods_of(changed, where):
        if pod.worker:
            notes.append(f"{where}: {pod.path}: left unchanged: {WORKERS}")
            continue
        engine = _engine(pod, where, options)
        if isinstance(engine, str):
            notes.append(f"{where}: {pod.path}: left unchanged: {engine}")
            continue
        # Of one document's pods all but one are workers.
        config_map = _supervise(pod, engine, name, meta.get("namespace"), options)
        notes += _notes(f"{where}: {pod.path}", pod.spec, engine, options)
    if config_map is None:
        return Injected(document, None, tuple(notes))
    return Injected(changed, config_map, tuple(notes))


def _copy(value: Any) -> Any:
    """A copy without shared parts: what YAML aliases in one pod must not change in another."""
    if isinstance(value, dict):
        return {key: _copy(held) for key, held in value.items()}
    return [_copy(held) for held in value] if isinstance(value, list) else value


def _engine(pod: PodSpec, where: str, options: Options) -> EngineContainer | str:
    """The engine in ``pod``, or why the pod is left alone. InjectionError where it cannot be."""
    at = f"{where}: {pod.path}"
    spec = pod.spec
    engine = find(
        {**spec, "containers": containers_of(spec)},
        at,
        options.container,
        options.unrecognized,
        options.fields.container,
    )
    if engine is None:
        return (
            "no container runs vLLM or SGLang (containers:"
            f" {container_names(spec)}); use {options.fields.unrecognized} to supervise it"
            " as a custom engine"
        )
    if spec.get("hostPID"):
        raise InjectionError(
            f"{at}.hostPID: true: the supervisor would see, and could signal, every process of the"
            f" node: set it to false, or exclude the workload with {options.fields.exclude}"
        )
    if pod.restarts_group and not options.group_restarts:
        return (
            f"restartPolicy {pod.restarts_group} recreates the whole group whenever a container"
            f" restarts, the supervisor's included; use {options.fields.group_restarts} if you want"
            " that, or"
            " set leaderWorkerTemplate.restartPolicy to None"
        )
    check_ports(containers_of(spec), engine, at)
    return engine


def check_ports(containers: list[Object], engine: EngineContainer, at: str) -> None:
    """All containers of a pod share its ports, and two are the supervisor's."""
    own = (METRICS_PORT, PROBE_PORT)
    if engine.port in own:
        raise InjectionError(
            f"{engine.path}: the supervisor needs ports {METRICS_PORT} and {PROBE_PORT}: let the"
            f" engine serve on a port other than {engine.port}"
        )
    for container in containers:
        for index, port in enumerate(container.get("ports") or []):
            if isinstance(port, dict) and port.get("containerPort") in own:
                raise InjectionError(
                    f"{at}.containers[{container.get('name')}].ports[{index}].containerPort:"
                    f" the supervisor needs ports {METRICS_PORT} and {PROBE_PORT}: use another"
                )


def _supervise(
    pod: PodSpec, engine: EngineContainer, name: str, namespace: object, options: Options
) -> Object:
    """Add the supervisor to ``pod`` and return its ConfigMap."""
    add_supervisor(pod.spec, engine, options, names.supervisor(name))
    pod.labels[SERVICE_LABEL] = name[:MAX_LABEL].rstrip("-.")
    config = _config(name, str(namespace or "default"), engine, options)
    metadata: Object = {"name": names.supervisor(name)}
    if namespace is not None:
        metadata["namespace"] = namespace
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {CONFIG_FILE: encode(config).decode()},
    }


def add_supervisor(
    pod: Object,
    engine: EngineContainer,
    options: Options,
    config_map: str,
    env: tuple[Object, ...] = (),
) -> None:
    """Add the supervisor of ``engine`` to ``pod``, a pod spec, in place.

    It replaces what an earlier call added. ``config_map`` has its configuration, ``env`` is added
    to its environment.
    """
    supervisor = _container(pod, engine, options)
    supervisor["env"] = [*supervisor["env"], *env]
    remove_probe(pod, engines_of(pod))
    _add(pod, supervisor, config_map, options)
    mark(pod, engine.container)
    if options.probe:
        _add_probe(pod, supervisor, engine, options.probe_image)


def _add_probe(pod: Object, supervisor: Object, engine: EngineContainer, image: str | None) -> None:
    container = engine_of(pod, engine.container)
    assert container is not None, "the engine was found in it"
    try:
        add_probe(pod, container, supervisor, image)
    except ValueError as error:
        raise InjectionError(f"{engine.path}: {error}") from None


def _config(
    name: str, namespace: str, engine: EngineContainer, options: Options
) -> SupervisorConfig:
    url = f"{engine.scheme}://127.0.0.1:{engine.port}"
    return SupervisorConfig(
        service=ServiceRef(name=name, namespace=namespace),
        engine=EngineEndpoint(
            type=engine.type,
            admin_url=url,
            serving_url=url,
            model=engine.model or name,
            container=engine.container,
        ),
        memory=MemoryPolicy(
            host=budget(options.host_budget_bytes, memory_limit(engine), engine, options),
            device=budget(options.device_budget_bytes, None, engine, options),
            shared_device=any(resource.endswith(".shared") for resource in engine.limits),
            warmup_s=options.warmup_s,
        ),
        supervision=Supervision(mode=options.mode),
    )


def budget(
    growth: int | None, limit: int | None, engine: EngineContainer, options: Options
) -> MemoryBudget | None:
    """The budget; InjectionError where the engine's limit is below it."""
    if growth is None:
        return None
    if limit is not None and growth > limit:
        raise InjectionError(
            f"{engine.path}.resources.limits.memory: {engine.limit} is less than"
            f" {options.fields.host_budget} {format_bytes(growth)}: set a smaller budget"
        )
    return MemoryBudget(growth_bytes=growth, window_s=options.window_s, limit_bytes=limit)


def memory_limit(engine: EngineContainer) -> int | None:
    """Bytes of the engine's memory limit, None where it has none."""
    if engine.limit is None:
        return None
    try:
        return parse_bytes(engine.limit)
    except ValueError as error:
        raise InjectionError(f"{engine.path}.resources.limits.memory: {error}") from None


def _container(pod: Object, engine: EngineContainer, options: Options) -> Object:
    made = supervisor_container(
        SupervisorContainer(
            dcgm_exporter_port=options.dcgm_exporter_port,
            amd_exporter_port=options.amd_exporter_port,
        ),
        options.image,
    )
    # It publishes nothing without a resource of ours, and then it needs no token of an account.
    unwanted = ("shm",) if options.token else ("token", "shm")
    mounts = [mount for mount in made["volumeMounts"] if mount["name"] not in unwanted]
    # What the engine leaves in shared memory is seen there; the volume is the pod's.
    shm = [engine.shm] if engine.shm is not None else []
    uid = options.run_as_user if options.run_as_user is not None else engine.uid or 0
    same = {
        "runAsUser": uid,
        "runAsNonRoot": uid != 0,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    taken = {
        port.get("name")
        for container in containers_of(pod)
        for port in container.get("ports") or []
        if isinstance(port, dict)
    }
    return made | {
        # A Service finds a target port by its name in any container of the pod.
        "ports": [
            port | {"name": f"{port['name']}-{port['containerPort']}"}
            if port["name"] in taken
            else port
            for port in made["ports"]
        ],
        "volumeMounts": [*(mount | {"name": PREFIX + mount["name"]} for mount in mounts), *shm],
        "securityContext": made["securityContext"] | same,
    }


def _add(pod: Object, container: Object, config_map: str, options: Options) -> None:
    pod["shareProcessNamespace"] = True
    others = [c for c in pod.get("initContainers") or [] if c.get("name") != names.SUPERVISOR]
    # Last of all: it is up before the engine, and downloads are not its concern.
    pod["initContainers"] = [*others, container]
    volumes = {PREFIX + name: source for name, source in VOLUMES.items()}
    volumes[PREFIX + "config"] = {"configMap": {"name": config_map}}
    if options.token:
        volumes[PREFIX + "token"] = {"projected": {"sources": token_sources()}}
    kept = [v for v in pod.get("volumes") or [] if v.get("name") not in volumes]
    pod["volumes"] = [*kept, *({"name": name, **source} for name, source in volumes.items())]


def _notes(where: str, pod: Object, engine: EngineContainer, options: Options) -> list[str]:
    known = engine.type is not EngineType.CUSTOM
    notes = [f"{where}: {engine.type.value} in container {engine.container}, port {engine.port}"]
    if engine.uid is None and options.run_as_user is None:
        notes.append(
            f"{where}: runAsUser is not set, so the supervisor runs as root, the default of these"
            f" images; set the engine's user with {options.fields.run_as_user}"
        )
    if None not in (engine.uid, options.run_as_user) and engine.uid != options.run_as_user:
        notes.append(
            f"{where}: the engine runs as user {engine.uid} and the supervisor as"
            f" {options.run_as_user}: the supervisor cannot see or signal it; omit"
            f" {options.fields.run_as_user}"
        )
    elif engine.hidden and not known:
        notes.append(
            f"{where}: the engine runs as root with capabilities, so the supervisor cannot see its"
            " sockets and will not find it: set runAsUser, or drop all capabilities"
        )
    if pod.get("hostNetwork"):
        notes.append(
            f"{where}.hostNetwork: true: ports {METRICS_PORT} and {PROBE_PORT} must be free on the"
            " node, so a node can run one such pod"
        )
    if engine.limit is None:
        notes.append(f"{where}: the engine has no memory limit: time to exhaustion is the budget's")
    if not known:
        notes.append(
            f"{where}: the type of the engine is unknown: Plimsoll can watch and restart it,"
            " but not trim it"
        )
    if options.probe:
        notes.append(
            f"{where}: inject sets PYTHONPATH for the probe, which overrides a value in the image;"
            " to keep that value, set it in the container's env"
        )
    return notes
