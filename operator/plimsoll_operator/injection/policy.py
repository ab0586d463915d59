"""One pod that a SupervisionPolicy selects: with a supervisor, or with the reason why not.

It adds what ``plimsoll inject`` adds, by the same function. The policy's ConfigMap is the same for
all of its pods, so the supervisor's environment says what is this pod's own: its engine.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import msgspec

from plimsoll_api.names import POLICY_LABEL, REFUSED, object_name
from plimsoll_api.supervision import (
    POD_ENGINE_ENV,
    EngineEndpoint,
    EngineType,
    GroupMember,
    PodEngine,
)
from plimsoll_api.supervision_policy import SelectedType, SupervisionPolicy
from plimsoll_api.supervision_policy_status import MAX_REASON
from plimsoll_api.workloads import LWS_GROUP, LWS_NAME, LWS_WORKER, RAY_NODE, membership
from plimsoll_operator.injection.engine import EngineContainer, find
from plimsoll_operator.injection.engine import names as container_names
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.pods import WORKERS
from plimsoll_operator.injection.sidecar import (
    PREFIX,
    VOLUMES,
    Fields,
    Options,
    add_supervisor,
    budget,
    check_ports,
    memory_limit,
)
from plimsoll_operator.render import names
from plimsoll_operator.render.containers import Images
from plimsoll_operator.render.probe import CODE_DIR, SOCKET_DIR, SOCKETS
from plimsoll_operator.render.probe import NAME as PROBE

Object = dict[str, Any]

ALLOW_GROUP_RESTARTS = "plimsoll.dev/allow-group-restarts"
"""Annotation of the pods of a LeaderWorkerSet: ``true`` accepts that the group restarts whenever
the supervisor does."""
LWS_LEADER = "leaderworkerset.sigs.k8s.io/leader-name"
"""Annotation of a LeaderWorkerSet's workers. The label with their index is there only after the
admission of LeaderWorkerSets, which may be called after ours."""
MAX_LABEL = 63
OWN_VOLUMES = frozenset(
    {PREFIX + name for name in (*VOLUMES, "config", "token")} | {PROBE, SOCKETS}
)
OWN_CONTAINERS = frozenset({names.SUPERVISOR, PROBE})
FIELDS = Fields(
    container="the policy's spec.engine.container",
    unrecognized="the policy's spec.engine.type: custom",
    exclude="the policy's spec.selector",
    group_restarts=f"the annotation {ALLOW_GROUP_RESTARTS}",
    host_budget="the policy's spec.memory.host.growthBudget",
    run_as_user="runAsUser",
)


@dataclass(frozen=True)
class Admitted:
    """The pod as it is to be created. ``refusal`` says why it has no supervisor, None if it has."""

    pod: Object
    refusal: str | None = None


def admit(pod: Object, policy: SupervisionPolicy, images: Images) -> Admitted:
    """Return ``pod`` with a supervisor, or with an annotation that says why it has none.

    The argument stays as it is. A pod that has the supervisor already gets the same one again.
    """
    changed = copy.deepcopy(pod)
    try:
        _check(changed)
        _inject(changed, policy, images)
    except InjectionError as error:
        refused = copy.deepcopy(pod)
        reason = " ".join(str(error).split())[:MAX_REASON]
        _put(refused["metadata"], "annotations", REFUSED, reason)
        return Admitted(refused, reason)
    _put(changed["metadata"], "labels", POLICY_LABEL, policy.metadata.name)
    annotations = changed["metadata"].get("annotations") or {}
    if annotations.pop(REFUSED, None) is not None and not annotations:
        del changed["metadata"]["annotations"]
    return Admitted(changed)


def _put(metadata: Object, field: str, key: str, value: str) -> None:
    metadata[field] = (metadata.get(field) or {}) | {key: value}


def _check(pod: Object) -> None:
    """InjectionError for a pod whose shape rules a supervisor out, whatever its engine is."""
    meta, spec = pod["metadata"], pod["spec"]
    if spec.get("hostPID"):
        raise InjectionError(
            "spec.hostPID is true: the supervisor would see, and could signal, every process of the"
            " node: set it to false"
        )
    if (spec.get("os") or {}).get("name") == "windows":
        raise InjectionError("spec.os.name is windows: the supervisor runs on Linux only")
    if spec.get("resources"):
        raise InjectionError(
            "spec.resources bounds all containers together, and the supervisor has limits of its"
            " own: set the limits of each container instead"
        )
    _check_group(meta.get("labels") or {}, meta.get("annotations") or {})
    if not _has_ours(pod):
        _check_names(spec)


def _check_group(labels: Object, annotations: Object) -> None:
    """A pod does not say its LeaderWorkerSet's restart policy, whose default restarts the group."""
    if labels.get(RAY_NODE) == "worker":
        raise InjectionError(WORKERS)
    if _in_group(labels) and annotations.get(ALLOW_GROUP_RESTARTS) != "true":
        raise InjectionError(
            "a LeaderWorkerSet with restartPolicy RecreateGroupOnPodRestart, the default, recreates"
            " the whole group whenever a container restarts, the supervisor's included: set the"
            f" annotation {ALLOW_GROUP_RESTARTS} to true in its pod templates if you want that,"
            " or if its restartPolicy is None"
        )


def _in_group(labels: Object) -> bool:
    return LWS_NAME in labels or LWS_WORKER in labels


def _group(pod: Object) -> GroupMember | None:
    """The place of the pod in a group of a LeaderWorkerSet; None where it is in none."""
    meta = pod["metadata"]
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    if not _in_group(labels):
        return None
    return GroupMember(
        index=str(labels.get(LWS_GROUP, ""))[:MAX_LABEL],
        worker=labels.get(LWS_WORKER, "0") != "0" or LWS_LEADER in annotations,
        subdomain=str(pod["spec"].get("subdomain") or "")[:MAX_LABEL],
    )


def _has_ours(pod: Object) -> bool:
    """Whether this function gave the pod its supervisor."""
    return any(
        one.get("name") == names.SUPERVISOR
        and any(variable.get("name") == POD_ENGINE_ENV for variable in one.get("env") or ())
        for one in pod["spec"].get("initContainers") or ()
    )


def _check_names(spec: Object) -> None:
    for field in ("initContainers", "containers"):
        for one in spec.get(field) or ():
            if one.get("name") in OWN_CONTAINERS:
                raise InjectionError(
                    f"spec.{field}[{one['name']}]: a container of this name is there already:"
                    " remove it from the workload, or give it another name"
                )
    for one in spec.get("volumes") or ():
        if one.get("name") in OWN_VOLUMES:
            raise InjectionError(
                f"spec.volumes[{one['name']}]: the supervisor's volume has this name: use another"
            )


def _inject(pod: Object, policy: SupervisionPolicy, images: Images) -> None:
    spec, wanted = pod["spec"], policy.spec
    selected = wanted.engine.type
    kind = None if selected is SelectedType.AUTO else EngineType(selected.value)
    engine = find(
        spec,
        "spec",
        wanted.engine.container,
        unrecognized=kind is not None,
        field=FIELDS.container,
        kind=kind,
        port=wanted.engine.port,
    )
    if engine is None or (kind is None and engine.type is EngineType.CUSTOM):
        raise InjectionError(
            f"no container runs vLLM or SGLang (containers: {container_names(spec)}): set"
            f" {FIELDS.unrecognized}"
        )
    sidecars = [one for one in spec.get("initContainers") or () if _stays(one)]
    check_ports([*spec["containers"], *sidecars], engine, "spec")
    _check_user(spec, engine)
    host = wanted.memory.host
    options = Options(
        image=images.supervisor,
        host_budget_bytes=host.growth_bytes if host is not None else None,
        probe=wanted.probe.enabled,
        probe_image=wanted.probe.image or images.probe,
        token=True,
        fields=FIELDS,
    )
    if options.probe:
        _check_mounts(spec, engine)
    limit = memory_limit(engine)
    budget(options.host_budget_bytes, limit, engine, options)
    group = _group(pod)
    found = PodEngine(
        engine=_endpoint(engine, serves=group is None or not group.worker),
        workload=membership(pod["metadata"]).workload,
        group=group,
        memory_limit_bytes=limit or None,
        shared_device=any(name.endswith(".shared") for name in engine.limits),
    )
    text = msgspec.json.encode(found, order="sorted").decode()
    # Kubernetes expands $(NAME) in values; $$ stands for a dollar.
    env = {"name": POD_ENGINE_ENV, "value": text.replace("$", "$$")}
    add_supervisor(spec, engine, options, object_name(policy.metadata.name), (env,))


def _check_mounts(spec: Object, engine: EngineContainer) -> None:
    """The API server refuses a container with two mounts at one path."""
    container = next(one for one in spec["containers"] if one["name"] == engine.container)
    for mount in container.get("volumeMounts") or ():
        if mount["mountPath"] in (CODE_DIR, SOCKET_DIR) and mount["name"] not in (PROBE, SOCKETS):
            raise InjectionError(
                f"{engine.path}.volumeMounts[{mount['mountPath']}]: the probe is mounted there: use"
                " another path, or turn the policy's spec.probe off"
            )


def _stays(container: Object) -> bool:
    """Whether an init container runs beside the engine, and is not ours."""
    return container.get("restartPolicy") == "Always" and container["name"] not in OWN_CONTAINERS


def _check_user(spec: Object, engine: EngineContainer) -> None:
    """The supervisor needs the engine's user ID, and must not be root where the pod may not be."""
    container = next(one for one in spec["containers"] if one["name"] == engine.container)
    own, whole = container.get("securityContext") or {}, spec.get("securityContext") or {}
    non_root = own.get("runAsNonRoot", whole.get("runAsNonRoot"))
    if engine.uid is None and (non_root or whole.get("runAsNonRoot")):
        raise InjectionError(
            f"{engine.path}.securityContext: runAsNonRoot is true and runAsUser is not set, so the"
            " user of the engine is unknown: set runAsUser to the user of its image"
        )


def _endpoint(engine: EngineContainer, serves: bool) -> EngineEndpoint:
    url = f"{engine.scheme}://127.0.0.1:{engine.port}"
    return EngineEndpoint(
        type=engine.type,
        admin_url=url,
        serving_url=url,
        model=engine.model,
        container=engine.container,
        serves=serves,
    )
