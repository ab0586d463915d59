"""Check that a supervisor can run in a pod; raise InjectionError otherwise.

``path`` is the path of the pod spec in the document.
"""

from __future__ import annotations

from typing import Any

from plimsoll_api.memory_policy import MemoryBudget
from plimsoll_api.units import format_bytes, parse_bytes
from plimsoll_operator.injection.engine import EngineContainer
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.first_process import check_first_process
from plimsoll_operator.injection.options import InjectionOptions, OptionNames
from plimsoll_operator.render import names
from plimsoll_operator.render.containers import list_native_sidecars
from plimsoll_operator.render.paths import POD_LAYOUT, SupervisorLayout, make_host_network_layout
from plimsoll_operator.render.probe import CODE_DIR, SOCKET_DIR, SOCKET_VOLUME
from plimsoll_operator.render.probe import PROBE_NAME as PROBE

Object = dict[str, Any]

SUPERVISOR_VOLUME_PREFIX = "plimsoll-"
SUPERVISOR_VOLUME_SOURCES: dict[str, Object] = {
    "run": {"emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
    "state": {"emptyDir": {"sizeLimit": "256Mi"}},
    "tmp": {"emptyDir": {"sizeLimit": "64Mi"}},
}
CONFIG_VOLUME, TOKEN_VOLUME = (
    f"{SUPERVISOR_VOLUME_PREFIX}config",
    f"{SUPERVISOR_VOLUME_PREFIX}token",
)
SUPERVISOR_VOLUME_NAMES = frozenset(
    {SUPERVISOR_VOLUME_PREFIX + name for name in SUPERVISOR_VOLUME_SOURCES}
    | {CONFIG_VOLUME, TOKEN_VOLUME, PROBE, SOCKET_VOLUME}
)
SUPERVISOR_CONTAINER_NAMES = frozenset({names.SUPERVISOR, PROBE})


def find_supervisor(pod: Object) -> Object | None:
    """Return the supervisor container that an earlier injection added to the pod spec, or None.

    The name alone does not suffice, so the container must also mount the supervisor's
    configuration.
    """
    for container in pod.get("initContainers") or ():
        mounted = {mount.get("name") for mount in container.get("volumeMounts") or ()}
        if container.get("name") == names.SUPERVISOR and CONFIG_VOLUME in mounted:
            supervisor: Object = container
            return supervisor
    return None


def check_pod_fields(pod: Object, path: str, fields: OptionNames) -> None:
    """Reject a pod whose fields prevent any supervisor from running. Raises InjectionError."""
    if pod.get("hostPID"):
        raise InjectionError(
            f"{path}.hostPID: true: the supervisor could signal every process on the node: set"
            f" hostPID to false, or exclude the workload with {fields.exclude}"
        )
    if (pod.get("os") or {}).get("name") == "windows":
        raise InjectionError(f"{path}.os.name: windows: the supervisor runs on Linux only")
    if pod.get("resources"):
        raise InjectionError(
            f"{path}.resources: the pod must not limit its containers together, because the"
            " supervisor has limits of its own: set the limits of each container instead"
        )


def check_reserved_names(pod: Object, path: str) -> None:
    """Reject containers and volumes whose names the supervisor needs. Raises InjectionError.

    The pod must not have Plimsoll's supervisor yet.
    """
    for field in ("initContainers", "containers"):
        for one in pod.get(field) or ():
            if one.get("name") in SUPERVISOR_CONTAINER_NAMES:
                raise InjectionError(
                    f"{path}.{field}[{one['name']}]: this name is reserved for a container of the"
                    " supervisor: rename or remove your container"
                )
    for one in pod.get("volumes") or ():
        if one.get("name") in SUPERVISOR_VOLUME_NAMES:
            raise InjectionError(
                f"{path}.volumes[{one['name']}]: this name is reserved for a volume of the"
                " supervisor: rename your volume"
            )


def choose_supervisor_layout(pod: Object, engine: EngineContainer) -> SupervisorLayout:
    """Return the supervisor's paths and ports in a pod that is a replica of its own."""
    return make_host_network_layout(engine.port) if pod.get("hostNetwork") else POD_LAYOUT


def check_ports(
    containers: list[Object], engine: EngineContainer, path: str, layout: SupervisorLayout
) -> None:
    """Reject a pod with a container on one of the supervisor's ports. Raises InjectionError."""
    own = (layout.metrics_port, layout.probe_port)
    if engine.port in own:
        raise InjectionError(
            f"{engine.path}: the engine serves on port {engine.port}, but ports {own[0]} and"
            f" {own[1]} are reserved for the supervisor: use another port"
        )
    for container in containers:
        for index, port in enumerate(container.get("ports") or []):
            if isinstance(port, dict) and port.get("containerPort") in own:
                raise InjectionError(
                    f"{path}.containers[{container.get('name')}].ports[{index}].containerPort:"
                    f" ports {own[0]} and {own[1]} are reserved for the supervisor: use another"
                    " port"
                )


def check_user(
    pod: Object, container: Object, engine: EngineContainer, options: InjectionOptions
) -> None:
    """Reject an engine with an unknown user in a pod that forbids root. Raises InjectionError.

    The supervisor must run as the engine's user, or as root if the user is unknown.
    """
    context, pod_context = container.get("securityContext") or {}, pod.get("securityContext") or {}
    non_root = context.get("runAsNonRoot", pod_context.get("runAsNonRoot"))
    if engine.user_id is not None or options.run_as_user is not None or options.assigned_user:
        return
    if non_root or pod_context.get("runAsNonRoot"):
        raise InjectionError(
            f"{engine.path}.securityContext: runAsNonRoot is true but runAsUser is not set, so the"
            f" engine's user is unknown: set {options.fields.run_as_user} to the user of the"
            " engine's image"
        )


def check_mounts(container: Object, engine: EngineContainer, fields: OptionNames) -> None:
    """Reject an engine with a mount at a path that the probe needs. Raises InjectionError."""
    for mount in container.get("volumeMounts") or ():
        if mount["mountPath"] in (CODE_DIR, SOCKET_DIR) and mount["name"] not in (
            PROBE,
            SOCKET_VOLUME,
        ):
            raise InjectionError(
                f"{engine.path}.volumeMounts[{mount['mountPath']}]: this path is reserved for the"
                f" probe: use another path, or turn {fields.probe} off"
            )


def check_budget(budget: MemoryBudget | None, engine: EngineContainer, fields: OptionNames) -> None:
    """Reject a host budget that exceeds the engine's memory limit. Raises InjectionError."""
    limit = parse_memory_limit(engine)
    if budget is None or budget.auto or limit is None:
        return
    if budget.growth_bytes > limit:
        raise InjectionError(
            f"{engine.path}.resources.limits.memory: {engine.limit} is less than"
            f" {fields.host_budget} {format_bytes(budget.growth_bytes)}: set a smaller budget, or"
            " a higher limit"
        )


def parse_memory_limit(engine: EngineContainer) -> int | None:
    """Return the engine's memory limit in bytes; None if it has none. Raises InjectionError."""
    if engine.limit is None:
        return None
    try:
        return parse_bytes(engine.limit)
    except ValueError as error:
        raise InjectionError(f"{engine.path}.resources.limits.memory: {error}") from None


def check_engine(
    pod: Object,
    containers: list[Object],
    engine: EngineContainer,
    path: str,
    options: InjectionOptions,
    layout: SupervisorLayout,
) -> None:
    """Run all checks that depend on the engine. Raises InjectionError."""
    check_first_process(pod | {"containers": containers}, path, options.fields)
    running = [*containers, *list_native_sidecars(pod)]
    check_ports(running, engine, path, layout)
    container = next(one for one in running if one.get("name") == engine.container)
    check_user(pod, container, engine, options)
    if options.probe:
        check_mounts(container, engine, options.fields)
    check_budget(options.memory.host, engine, options.fields)
    check_restart_policy(engine, path, options)


def check_restart_policy(engine: EngineContainer, path: str, options: InjectionOptions) -> None:
    """Reject mode Recover if the kubelet does not restart the engine. Raises InjectionError."""
    if options.may_act and not options.token and engine.no_restart_reason:
        raise InjectionError(
            f"{path}: {engine.no_restart_reason}: if the supervisor restarted the engine, its pod"
            f" would end: use {options.fields.mode}"
        )
