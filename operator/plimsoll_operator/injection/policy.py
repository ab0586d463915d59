"""Add a supervisor to a pod that a SupervisionPolicy selects, or record why the pod gets none.

All pods of a policy share a ConfigMap, so an environment variable describes each pod's engine to
its supervisor.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from plimsoll_api.names import (
    METRICS_PORT,
    POLICY_LABEL,
    PROBE_PORT,
    REFUSED_ANNOTATION,
    ROLE_LABEL,
    make_policy_object_name,
)
from plimsoll_api.roles import find_role
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervision_policy_status import MAX_STATUS_REASON_CHARS
from plimsoll_api.supervisor_config import POD_ENGINE_ENV, GroupMember, PodEngine
from plimsoll_api.workloads import (
    LWS_NAME_LABEL,
    LWS_WORKER_LABEL,
    PART_OF_KSERVE_LLM,
    PART_OF_LABEL,
    RAY_HEAD,
    RAY_NODE_TYPE_LABEL,
    RAY_WORKER,
    find_lws_group,
    find_membership,
    make_ray_service_name,
)
from plimsoll_operator.injection.checks import (
    check_engine,
    check_pod_fields,
    check_reserved_names,
    choose_supervisor_layout,
    parse_memory_limit,
)
from plimsoll_operator.injection.configuration import make_endpoint, make_pod_engine_variable
from plimsoll_operator.injection.engine import EngineContainer, describe_containers, find_engine
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.notes import describe_engine
from plimsoll_operator.injection.options import InjectionOptions, OptionNames, make_options
from plimsoll_operator.injection.pods import WORKERS_MESSAGE
from plimsoll_operator.injection.ray import find_worker_container
from plimsoll_operator.injection.shape import check_types
from plimsoll_operator.injection.sidecar import add_supervisor, mark_supervisor_volumes
from plimsoll_operator.render import names
from plimsoll_operator.render.containers import Images
from plimsoll_operator.render.paths import POD_LAYOUT

Object = dict[str, Any]

INJECTED_IMAGES_ANNOTATION = "plimsoll.dev/injected-images"
"""Annotation of a pod: the injected images, in the form of :func:`format_images`."""
ENGINE_ANNOTATION = "plimsoll.dev/engine"
"""Annotation of a pod: the detected engine and the evidence."""
POD_PATH = "spec"
"""Path of the pod spec in messages."""
ALLOW_GROUP_RESTARTS_ANNOTATION = "plimsoll.dev/allow-group-restarts"
"""Annotation of a LeaderWorkerSet's pods: the user accepts that a restart of the supervisor
restarts the whole group."""
ALLOW_HOST_PORTS_ANNOTATION = "plimsoll.dev/allow-host-ports"
"""Annotation of pods in the host network: the user accepts that a node can run only one of them."""
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""Annotation of the object with which a kubelet shows a static pod."""
LWS_LEADER_ANNOTATION = "leaderworkerset.sigs.k8s.io/leader-name"
"""Annotation of a LeaderWorkerSet's workers, whose label may be missing at admission."""
MAX_LABEL_CHARS = 63
MAX_ANNOTATIONS_BYTES = 1 << 18
"""Maximum total size of a pod's annotations; the API server rejects more."""
POLICY_OPTION_NAMES = OptionNames(
    engine="the policy's spec.engine.type",
    container="the policy's spec.engine.container",
    port="the policy's spec.engine.port",
    mode="spec.supervision.mode: Observe",
    unrecognized="the policy's spec.engine.type: custom",
    exclude="the policy's spec.selector",
    group_restarts=f"the annotation {ALLOW_GROUP_RESTARTS_ANNOTATION}",
    host_budget="the policy's spec.memory.host.growthBudget",
    run_as_user="runAsUser",
    platform="",
    probe="the policy's spec.probe",
    selector="the policy's spec.selector",
)


@dataclass(frozen=True)
class AdmittedPod:
    """Pod to create; ``refusal`` is why the pod gets no supervisor, or None."""

    pod: Object
    refusal: str | None = None


def format_images(policy: SupervisionPolicy, images: Images) -> str:
    """Return the images that the injection adds to pods of ``policy``, separated by commas."""
    probe = images.probe if policy.spec.probe.enabled else None
    return ", ".join(dict.fromkeys([images.supervisor, probe or images.supervisor]))


def inject_pod(pod: Object, policy: SupervisionPolicy, images: Images) -> AdmittedPod:
    """Return a copy of ``pod`` with a supervisor, or with an annotation that says why not."""
    changed = copy.deepcopy(pod)
    try:
        _check_pod(changed)
        engine = _inject_supervisor(changed, policy, images)
    except InjectionError as error:
        refused = copy.deepcopy(pod)
        reason = " ".join(str(error).split())[:MAX_STATUS_REASON_CHARS]
        if (
            _count_annotation_bytes(pod["metadata"])
            + len(REFUSED_ANNOTATION)
            + 4 * MAX_STATUS_REASON_CHARS
            <= MAX_ANNOTATIONS_BYTES
        ):
            _set_metadata(refused["metadata"], "annotations", REFUSED_ANNOTATION, reason)
        return AdmittedPod(refused, reason)
    _set_metadata(changed["metadata"], "labels", POLICY_LABEL, policy.metadata.name)
    # Another webhook may rewrite the images, for example to a private registry.
    _set_metadata(
        changed["metadata"],
        "annotations",
        INJECTED_IMAGES_ANNOTATION,
        format_images(policy, images),
    )
    changed["metadata"]["annotations"].pop(REFUSED_ANNOTATION, None)
    mark_supervisor_volumes(changed["metadata"], changed["spec"])
    _set_metadata(
        changed["metadata"],
        "annotations",
        ENGINE_ANNOTATION,
        describe_engine(engine)[:MAX_STATUS_REASON_CHARS],
    )
    return AdmittedPod(changed)


def _count_annotation_bytes(metadata: Object) -> int:
    annotations = metadata.get("annotations") or {}
    return sum(len(f"{key}{value}".encode()) for key, value in annotations.items())


def _set_metadata(metadata: Object, field: str, key: str, value: str) -> None:
    metadata[field] = (metadata.get(field) or {}) | {key: value}


def _check_pod(pod: Object) -> None:
    meta, spec = pod["metadata"], pod["spec"]
    annotations = meta.get("annotations") or {}
    if MIRROR_ANNOTATION in annotations:
        # The API server would refuse the supervisor's token, and with it the object.
        raise InjectionError(
            "the kubelet runs this static pod from a file on its node, to which nothing can be"
            f" added: exclude the pod with {POLICY_OPTION_NAMES.exclude}"
        )
    check_types(spec, POD_PATH)
    check_pod_fields(spec, POD_PATH, POLICY_OPTION_NAMES)
    grouped = bool(find_membership(meta).ray_cluster) or _is_in_group(meta.get("labels") or {})
    if (
        spec.get("hostNetwork")
        and grouped
        and annotations.get(ALLOW_HOST_PORTS_ANNOTATION) != "true"
    ):
        # All supervisors of a group use the same port to reach each other.
        raise InjectionError(
            f"{POD_PATH}.hostNetwork: true: the supervisors of a multi-node group use ports"
            f" {METRICS_PORT} and {PROBE_PORT} of the node, so a second supervised pod on the node"
            " could not start. If each node runs only one such pod, set the annotation"
            f" {ALLOW_HOST_PORTS_ANNOTATION} to true in the pod template"
        )
    _check_group(meta)
    if not _has_plimsoll_supervisor(pod):
        check_reserved_names(spec, POD_PATH)


# A pod does not show the restart policy of its LeaderWorkerSet, which by default recreates the
# group when a container restarts. The user must therefore accept this with an annotation.
def _check_group(metadata: Object) -> None:
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    if labels.get(RAY_NODE_TYPE_LABEL) == RAY_WORKER and not find_membership(metadata).ray_cluster:
        raise InjectionError(WORKERS_MESSAGE)
    if not _is_in_group(labels) or annotations.get(ALLOW_GROUP_RESTARTS_ANNOTATION) == "true":
        return
    if labels.get(PART_OF_LABEL) == PART_OF_KSERVE_LLM:
        raise InjectionError(
            "KServe sets restartPolicy RecreateGroupOnPodRestart in its LeaderWorkerSets, which"
            " recreates the whole group whenever a container restarts, including the supervisor:"
            f" to accept this, set the annotation {ALLOW_GROUP_RESTARTS_ANNOTATION} to true in the"
            " LLMInferenceService's spec.annotations and spec.prefill.annotations"
        )
    raise InjectionError(
        "a LeaderWorkerSet with restartPolicy RecreateGroupOnPodRestart, the default, recreates"
        " the whole group whenever a container restarts, including the supervisor: to accept this,"
        f" or if the restartPolicy is None, set the annotation {ALLOW_GROUP_RESTARTS_ANNOTATION}"
        " to true in the pod templates"
    )


def _is_in_group(labels: Object) -> bool:
    return LWS_NAME_LABEL in labels or LWS_WORKER_LABEL in labels


def find_group_name(metadata: Object) -> str:
    """Return a new pod's multi-node group; empty if the pod is in none.

    The result is the name of a RayCluster, or of a LeaderWorkerSet's leader.
    """
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    if cluster := find_membership(metadata).ray_cluster:
        return f"RayCluster {cluster}"
    if _is_in_group(labels):
        return str(annotations.get(LWS_LEADER_ANNOTATION) or metadata.get("name") or "")
    return ""


def _find_group_member(pod: Object, policy: str) -> GroupMember | None:
    meta = pod["metadata"]
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    cluster, node = find_membership(meta).ray_cluster, labels.get(RAY_NODE_TYPE_LABEL)
    if cluster and node in (RAY_HEAD, RAY_WORKER):
        return GroupMember(
            key=cluster[:MAX_LABEL_CHARS],
            worker=node == RAY_WORKER,
            subdomain=make_ray_service_name(policy, cluster),
        )
    if not _is_in_group(labels):
        return None
    return GroupMember(
        key=find_lws_group(labels)[:MAX_LABEL_CHARS],
        worker=labels.get(LWS_WORKER_LABEL, "0") != "0" or LWS_LEADER_ANNOTATION in annotations,
        subdomain=str(pod["spec"].get("subdomain") or "")[:MAX_LABEL_CHARS],
    )


def _has_plimsoll_supervisor(pod: Object) -> bool:
    return any(
        one.get("name") == names.SUPERVISOR
        and any(variable.get("name") == POD_ENGINE_ENV for variable in one.get("env") or ())
        for one in pod["spec"].get("initContainers") or ()
    )


def _inject_supervisor(pod: Object, policy: SupervisionPolicy, images: Images) -> EngineContainer:
    spec = pod["spec"]
    options = make_options(policy, images.supervisor, POLICY_OPTION_NAMES)
    options = replace(
        options,
        token=True,
        probe_image=images.probe,
        resources=images.resources,
        pull_secrets=images.pull_secrets,
        selector=None,
    )
    group = _find_group_member(pod, policy.metadata.name)
    labels = pod["metadata"].get("labels") or {}
    engine = _find_engine(pod, group, options)
    if engine is None:
        raise InjectionError(
            f"no container runs vLLM or SGLang (containers: {describe_containers(spec, options)}):"
            f" set {POLICY_OPTION_NAMES.unrecognized}"
        )
    layout = choose_supervisor_layout(spec, engine) if group is None else POD_LAYOUT
    check_engine(spec, spec.get("containers") or [], engine, POD_PATH, options, layout)
    member = find_membership(pod["metadata"])
    detected = PodEngine(
        engine=make_endpoint(engine, serves=group is None or not group.worker),
        workload=member.workload,
        graph=member.graph,
        group=group,
        memory_limit_bytes=parse_memory_limit(engine) or None,
        shared_device=engine.shares_device,
        restarts=not engine.no_restart_reason,
        role=find_role(labels, engine.words, None if group is None else group.worker),
    )
    if detected.role is not None:
        _set_metadata(pod["metadata"], "labels", ROLE_LABEL, detected.role.value)
    config_map = make_policy_object_name(policy.metadata.name)
    add_supervisor(spec, engine, options, config_map, (make_pod_engine_variable(detected),), layout)
    return engine


# The command of a Ray worker starts Ray and does not show the engine, so any type is accepted.
def _find_engine(
    pod: Object, group: GroupMember | None, options: InjectionOptions
) -> EngineContainer | None:
    is_worker = group is not None and group.worker
    if is_worker and find_membership(pod["metadata"]).ray_cluster:
        named = find_worker_container(pod["spec"], POD_PATH, options)
        engine = options.engine.model_copy(update={"container": named})
        options = replace(options, engine=engine, unrecognized=True)
    annotations = pod["metadata"].get("annotations") or ()
    return find_engine(pod["spec"], POD_PATH, options, is_worker, annotations=annotations)
