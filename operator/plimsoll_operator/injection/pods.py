"""Find the pod specs in each kind of workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plimsoll_api.names import SERVICE_KIND
from plimsoll_api.supervisor_config import CONTAINER_ENV
from plimsoll_api.workloads import KSERVE_API, LWS_API, LWS_KIND, LWS_NAME_LABEL, RAY_API
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.listening import KSERVE_CONTAINER
from plimsoll_operator.render.containers import list_native_sidecars

Object = dict[str, Any]

KSERVE_SERVICE_LABEL = "serving.kserve.io/inferenceservice"
TEMPLATE_PATH = ("spec", "template")
TEMPLATE_PATHS: dict[tuple[str, str], tuple[str, ...]] = {
    ("", "ReplicationController"): TEMPLATE_PATH,
    ("apps", "Deployment"): TEMPLATE_PATH,
    ("apps", "StatefulSet"): TEMPLATE_PATH,
    ("apps", "DaemonSet"): TEMPLATE_PATH,
    ("apps", "ReplicaSet"): TEMPLATE_PATH,
    ("batch", "Job"): TEMPLATE_PATH,
    ("batch", "CronJob"): ("spec", "jobTemplate", "spec", "template"),
}
"""Path of the pod template, by API group and kind."""

GROUP_RESTART_POLICIES = frozenset({"RecreateGroupOnPodRestart", "RecreateGroupAfterStart"})
"""Policies with which a LeaderWorkerSet recreates the whole group when a container restarts."""
AIBRIX_API = "orchestration.aibrix.ai"
RAY_CLUSTER_PATHS: dict[tuple[str, str], tuple[str, ...]] = {
    (RAY_API, "RayCluster"): ("spec",),
    (RAY_API, "RayJob"): ("spec", "rayClusterSpec"),
    (RAY_API, "RayService"): ("spec", "rayClusterConfig"),
    (AIBRIX_API, "RayClusterFleet"): ("spec", "template", "spec"),
    (AIBRIX_API, "RayClusterReplicaSet"): ("spec", "template", "spec"),
}
"""Path of the spec of a RayCluster, by API group and kind."""
SUPPORTED_KINDS = (
    "a Deployment, StatefulSet, DaemonSet, ReplicaSet, Job, CronJob, Pod, LeaderWorkerSet,"
    " RayCluster, RayService, RayJob, AIBrix's RayClusterFleet, or KServe's InferenceService or"
    " LLMInferenceService"
)
RUNTIME_KINDS = ("ServingRuntime", "ClusterServingRuntime")
WORKERS_MESSAGE = (
    "these pods of a multi-node engine serve no port, and the supervisor of the leader watches"
    " only the leader's pod"
)


@dataclass(frozen=True)
class PodSpec:
    """A pod spec in a document. An injection changes it and its ``metadata`` in place.

    Attributes:
        path: The path of the pod spec in the document.
        worker: Whether the pods are workers of a multi-node engine, which serve no port.
        restarts_group: The restart policy with which the restart of one container recreates the
            whole group; empty if there is none.
        inherited: Labels that a controller adds to the pods.
        needs_images: False if a controller may set the containers' images.
        ray: Whether KubeRay starts Ray in the pods.
        no_restart_reason: Why a controller sets a restart policy that restarts no container;
            empty otherwise.
        annotations: The annotations of the pods.
        metadata: The object with the pods' own labels and annotations.

    """

    path: str
    spec: Object
    labels: Object
    worker: bool = False
    restarts_group: str = ""
    inherited: Object = field(default_factory=dict)
    needs_images: bool = True
    ray: bool = False
    no_restart_reason: str = ""
    annotations: Object = field(default_factory=dict)
    metadata: Object = field(default_factory=dict)


def list_pod_specs(document: Object, location: str) -> list[PodSpec]:
    """Return the pod specs of ``document``; empty for a kind without pods.

    Raises InjectionError if a field has the wrong type.
    """
    kind = str(document.get("kind", ""))
    group = str(document.get("apiVersion", "")).rpartition("/")[0]
    if kind == "Pod" and not group:
        metadata = _get_or_create_object(document, ("metadata",), location)
        spec, labels = (
            _get_or_create_object(document, ("spec",), location),
            _get_labels(metadata, location),
        )
        annotations = _get_annotations(metadata)
        return [PodSpec("spec", spec, labels, annotations=annotations, metadata=metadata)]
    if (path := TEMPLATE_PATHS.get((group, kind))) is not None:
        return [_make_pod_spec(document, path, location)]
    if group == LWS_API and kind == LWS_KIND:
        return _add_controller_labels(document, _iterate_leader_worker_set(document, location))
    if (path := RAY_CLUSTER_PATHS.get((group, kind))) is not None:
        return list(_iterate_ray_cluster(document, path, location))
    if group == KSERVE_API and kind == SERVICE_KIND:
        return _add_controller_labels(document, _iterate_predictor(document, location))
    return []


def _add_controller_labels(document: Object, pods: Iterable[PodSpec]) -> list[PodSpec]:
    held = document.get("metadata")
    metadata = held if isinstance(held, dict) else {}
    name, own = str(metadata.get("name", "")), metadata.get("labels")
    labels: Object = {LWS_NAME_LABEL: name}
    annotations: Object = {}
    if document["kind"] == SERVICE_KIND:
        # KServe copies the service's own labels and annotations to the pods.
        labels = {**(own if isinstance(own, dict) else {}), KSERVE_SERVICE_LABEL: name}
        annotations = _get_annotations(metadata)
    return [
        replace(one, inherited=labels, annotations=annotations | one.annotations) for one in pods
    ]


def list_containers(pod: Object, runtimes: Mapping[str, Object]) -> list[Object]:
    """Return the pod's containers, including those that KServe adds to a predictor with a model.

    A runtime that is not in ``runtimes`` counts as a single container.
    """
    listed: list[Object] = pod.get("containers") or []
    model = pod.get("model")
    names = {one.get("name") for one in listed}
    if not isinstance(model, dict) or KSERVE_CONTAINER in names:
        return listed
    known = _find_runtime(model, runtimes)
    added = [one for one in (known or {}).get("containers") or () if one["name"] not in names]
    base = next((one for one in added if one["name"] == KSERVE_CONTAINER), None)
    others = [one for one in added if one is not base]
    if base is None:
        runtime = model.get("runtime") or (model.get("modelFormat") or {}).get("name", "")
        base = {"image": str(runtime)}
    # KServe appends arguments and merges variables by name; the model's take precedence.
    merged = {**base, **model, "name": KSERVE_CONTAINER}
    merged["args"] = [*(base.get("args") or ()), *(model.get("args") or ())]
    env = [*(base.get("env") or ()), *(model.get("env") or ())]
    merged["env"] = list({one["name"]: one for one in env}.values())
    preset, given = base.get("resources") or {}, model.get("resources") or {}
    merged["resources"] = {
        key: (preset.get(key) or {}) | (given.get(key) or {}) for key in ("limits", "requests")
    }
    return [*listed, merged, *others]


def _find_runtime(model: Object, runtimes: Mapping[str, Object]) -> Object | None:
    if (name := model.get("runtime")) is not None:
        return runtimes.get(str(name))
    model_format = (model.get("modelFormat") or {}).get("name")
    matching = [
        runtime
        for runtime in runtimes.values()
        if any(
            one.get("autoSelect") is True and one.get("name") == model_format
            for one in runtime.get("supportedModelFormats") or ()
        )
    ]
    return matching[0] if len(matching) == 1 else None


def list_engine_objects(pod: Object) -> list[Object]:
    """Return the pod's containers, native sidecars, and the model for which KServe adds one."""
    model = pod.get("model")
    models = [model] if isinstance(model, dict) else []
    return [*(pod.get("containers") or []), *list_native_sidecars(pod), *models]


def find_engine_container(pod: Object, container: str) -> Object | None:
    """Return the container with this name, or the model for which KServe adds it, or None."""
    model = pod.get("model")
    default = model if isinstance(model, dict) else None
    return next((one for one in list_engine_objects(pod) if one.get("name") == container), default)


def set_container_name_variable(pod: Object, container: str) -> None:
    """Set the environment variable that tells the supervisor which container a process is in."""
    engine = find_engine_container(pod, container)
    if engine is not None:
        kept = [one for one in engine.get("env") or [] if one.get("name") != CONTAINER_ENV]
        engine["env"] = [*kept, {"name": CONTAINER_ENV, "value": container}]


# Leaders and workers may share a template.
def _iterate_leader_worker_set(document: Object, location: str) -> Iterator[PodSpec]:
    path = ("spec", "leaderWorkerTemplate")
    group = _get_or_create_object(document, path, location)
    # The default of the LeaderWorkerSet API.
    policy = str(group.get("restartPolicy") or "RecreateGroupOnPodRestart")
    restarts_group = policy if policy in GROUP_RESTART_POLICIES else ""
    leader = group.get("leaderTemplate") is not None
    if leader:
        yield _make_pod_spec(
            document, (*path, "leaderTemplate"), location, restarts_group=restarts_group
        )
    yield _make_pod_spec(
        document,
        (*path, "workerTemplate"),
        location,
        worker=leader,
        restarts_group=restarts_group,
    )


def _iterate_ray_cluster(
    document: Object, path: tuple[str, ...], location: str
) -> Iterator[PodSpec]:
    head = _make_pod_spec(document, (*path, "headGroupSpec", "template"), location)
    yield replace(
        head, ray=True, no_restart_reason=_find_ray_restart_obstacle(document, path, location)
    )
    groups = _get_or_create_object(document, path, location).get("workerGroupSpecs") or []
    if not isinstance(groups, list):
        raise InjectionError(f"{location}: {'.'.join(path)}.workerGroupSpecs must be a list")
    for index, group in enumerate(groups):
        at = f"{'.'.join(path)}.workerGroupSpecs[{index}]"
        if not isinstance(group, dict):
            raise InjectionError(f"{location}: {at} must be an object")
        found = _make_pod_spec(group, ("template",), location)
        yield PodSpec(f"{at}.{found.path}", found.spec, found.labels, worker=True)


def _find_ray_restart_obstacle(document: Object, path: tuple[str, ...], location: str) -> str:
    """Return why KubeRay sets ``restartPolicy: Never`` for a Ray head; empty if it does not."""
    cluster = _get_or_create_object(document, path, location)
    options = cluster.get("autoscalerOptions")
    version = options.get("version") if isinstance(options, dict) else None
    if cluster.get("enableInTreeAutoscaling") is True and version == "v2":
        return f"{'.'.join(path)}.autoscalerOptions.version: v2: KubeRay sets restartPolicy: Never"
    if document["kind"] == "RayJob" and document["spec"].get("submissionMode") == "SidecarMode":
        return "with spec.submissionMode SidecarMode, KubeRay sets restartPolicy to Never"
    return ""


def _iterate_predictor(document: Object, location: str) -> Iterator[PodSpec]:
    path = ("spec", "predictor")
    predictor = _get_or_create_object(document, path, location)
    yield PodSpec(
        "spec.predictor",
        predictor,
        _get_labels(predictor, location),
        needs_images=False,
        annotations=_get_annotations(predictor),
        metadata=predictor,
    )
    if predictor.get("workerSpec") is not None:
        workers = _get_or_create_object(document, (*path, "workerSpec"), location)
        yield PodSpec("spec.predictor.workerSpec", workers, {}, worker=True)


def _make_pod_spec(
    document: Object,
    path: tuple[str, ...],
    location: str,
    worker: bool = False,
    restarts_group: str = "",
) -> PodSpec:
    template = _get_or_create_object(document, path, location)
    # Add nothing to pods without a supervisor, not even empty labels.
    metadata: Object = {} if worker else _get_or_create_object(template, ("metadata",), location)
    labels = {} if worker else _get_labels(metadata, location)
    spec, at = _get_or_create_object(template, ("spec",), location), ".".join((*path, "spec"))
    annotations = _get_annotations(metadata)
    return PodSpec(
        at, spec, labels, worker, restarts_group, annotations=annotations, metadata=metadata
    )


def _get_or_create_object(document: Object, path: tuple[str, ...], location: str) -> Object:
    found = document
    for at, key in enumerate(path):
        if found.get(key) is None:
            found[key] = {}
        found = found[key]
        if not isinstance(found, dict):
            raise InjectionError(f"{location}: {'.'.join(path[: at + 1])} must be an object")
    return found


def _get_annotations(metadata: Object) -> Object:
    found = metadata.get("annotations")
    return found if isinstance(found, dict) else {}


def _get_labels(metadata: Object, location: str) -> Object:
    return _get_or_create_object(metadata, ("labels",), location)
