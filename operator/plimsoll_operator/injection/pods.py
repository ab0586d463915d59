"""Where each kind of workload keeps its pod specs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from plimsoll_api.names import SERVICE_KIND
from plimsoll_api.supervisor_config import CONTAINER_ENV
from plimsoll_api.workloads import LWS_API, LWS_KIND, LWS_NAME, RAY_API
from plimsoll_operator.injection.errors import InjectionError

Object = dict[str, Any]

KSERVE_API, KSERVE_SERVICE = "serving.kserve.io", "serving.kserve.io/inferenceservice"
TEMPLATE = ("spec", "template")
TEMPLATES: dict[tuple[str, str], tuple[str, ...]] = {
    ("", "ReplicationController"): TEMPLATE,
    ("apps", "Deployment"): TEMPLATE,
    ("apps", "StatefulSet"): TEMPLATE,
    ("apps", "DaemonSet"): TEMPLATE,
    ("apps", "ReplicaSet"): TEMPLATE,
    ("batch", "Job"): TEMPLATE,
    ("batch", "CronJob"): ("spec", "jobTemplate", "spec", "template"),
}
"""API group and kind to the path of the pod template."""

RECREATES_GROUP = frozenset({"RecreateGroupOnPodRestart", "RecreateGroupAfterStart"})
"""Restart policies of a LeaderWorkerSet; the others restart one container."""
RAY_CLUSTERS = {
    "RayCluster": ("spec",),
    "RayJob": ("spec", "rayClusterSpec"),
    "RayService": ("spec", "rayClusterConfig"),
}
KINDS = (
    "a Deployment, StatefulSet, DaemonSet, ReplicaSet, Job, CronJob, Pod, LeaderWorkerSet,"
    " RayCluster, RayService, RayJob, or KServe's InferenceService or LLMInferenceService"
)
WORKERS = (
    "these pods of a multi-node engine serve no port: the supervisor of the leader watches the"
    " leader's pod only"
)


@dataclass(frozen=True)
class PodSpec:
    """A pod spec in a document. ``spec`` and ``labels`` are changed in place.

    ``path`` is its place in the document. ``worker`` is true for the pods of a multi-node engine
    that serve no port. ``restarts_group`` is the restart policy by which the restart of one
    container restarts every pod of the group, empty if that is not so. ``inherited`` are labels
    that the pods get from elsewhere in the document, or from the controller that makes them.
    ``needs_images`` is false where a controller merges containers of its own into the pods.
    """

    path: str
    spec: Object
    labels: Object
    worker: bool = False
    restarts_group: str = ""
    inherited: Object = field(default_factory=dict)
    needs_images: bool = True


def pods_of(document: Object, where: str) -> list[PodSpec]:
    """Return the pod specs of ``document``, none for a kind without pods.

    InjectionError, which begins with ``where``, if something stands where an object is due.
    """
    kind = str(document.get("kind", ""))
    group = str(document.get("apiVersion", "")).rpartition("/")[0]
    if kind == "Pod" and not group:
        metadata = _object(document, ("metadata",), where)
        return [PodSpec("spec", _object(document, ("spec",), where), _labels(metadata, where))]
    if (path := TEMPLATES.get((group, kind))) is not None:
        return [_template(document, path, where)]
    if group == LWS_API and kind == LWS_KIND:
        return _inheriting(document, _leader_worker_set(document, where))
    if group == RAY_API and kind in RAY_CLUSTERS:
        return list(_ray_cluster(document, RAY_CLUSTERS[kind], where))
    if group == KSERVE_API and kind == SERVICE_KIND:
        return _inheriting(document, _predictor(document, where))
    return []


def _inheriting(document: Object, pods: Iterable[PodSpec]) -> list[PodSpec]:
    """With the labels by which the pods of a group or of a predictor are known."""
    held = document.get("metadata")
    metadata = held if isinstance(held, dict) else {}
    name, own = str(metadata.get("name", "")), metadata.get("labels")
    labels: Object = {LWS_NAME: name}
    if document["kind"] == SERVICE_KIND:
        # KServe hands the service's own labels on.
        labels = {**(own if isinstance(own, dict) else {}), KSERVE_SERVICE: name}
    return [replace(one, inherited=labels) for one in pods]


def containers_of(pod: Object) -> list[Object]:
    """Return the pod's containers.

    For a KServe predictor with a model, the container that its runtime makes is among them: KServe
    merges a container of that name in the predictor with it.
    """
    listed: list[Object] = pod.get("containers") or []
    model = pod.get("model")
    if isinstance(model, dict) and not any(one.get("name") == "kserve-container" for one in listed):
        runtime = model.get("runtime") or (model.get("modelFormat") or {}).get("name", "")
        # KServe names the container, whatever the model says.
        return [*listed, {"image": str(runtime), **model, "name": "kserve-container"}]
    return listed


def engines_of(pod: Object) -> list[Object]:
    """Return the objects that become containers of the pod, to be changed in place.

    These are the listed ones, and the model that KServe makes one of.
    """
    model = pod.get("model")
    return [*(pod.get("containers") or []), *([model] if isinstance(model, dict) else [])]


def engine_of(pod: Object, container: str) -> Object | None:
    """Find the container itself, or the model that KServe makes it of."""
    listed: list[Object] = pod.get("containers") or []
    model = pod.get("model")
    made = model if isinstance(model, dict) else None
    return next((one for one in listed if one.get("name") == container), made)


def mark(pod: Object, container: str) -> None:
    """Put the container's name into its own environment.

    The supervisor knows the engine's processes by it. KServe takes it from a predictor's model.
    """
    made = engine_of(pod, container)
    if made is not None:
        kept = [one for one in made.get("env") or [] if one.get("name") != CONTAINER_ENV]
        made["env"] = [*kept, {"name": CONTAINER_ENV, "value": container}]


def _leader_worker_set(document: Object, where: str) -> Iterator[PodSpec]:
    """Without a template for the leader, the template of the workers makes the leader, too."""
    path = ("spec", "leaderWorkerTemplate")
    group = _object(document, path, where)
    # The default of the LeaderWorkerSet API.
    policy = str(group.get("restartPolicy") or "RecreateGroupOnPodRestart")
    restarts_group = policy if policy in RECREATES_GROUP else ""
    leader = group.get("leaderTemplate") is not None
    if leader:
        yield _template(document, (*path, "leaderTemplate"), where, restarts_group=restarts_group)
    yield _template(
        document,
        (*path, "workerTemplate"),
        where,
        worker=leader,
        restarts_group=restarts_group,
    )


def _ray_cluster(document: Object, path: tuple[str, ...], where: str) -> Iterator[PodSpec]:
    yield _template(document, (*path, "headGroupSpec", "template"), where)
    groups = _object(document, path, where).get("workerGroupSpecs") or []
    if not isinstance(groups, list):
        raise InjectionError(f"{where}: {'.'.join(path)}.workerGroupSpecs: must be a list")
    for index, group in enumerate(groups):
        at = f"{'.'.join(path)}.workerGroupSpecs[{index}]"
        if not isinstance(group, dict):
            raise InjectionError(f"{where}: {at}: must be an object")
        found = _template(group, ("template",), where)
        yield PodSpec(f"{at}.{found.path}", found.spec, found.labels, worker=True)


def _predictor(document: Object, where: str) -> Iterator[PodSpec]:
    """KServe merges the fields of a pod spec that stand in the predictor."""
    path = ("spec", "predictor")
    predictor = _object(document, path, where)
    yield PodSpec("spec.predictor", predictor, _labels(predictor, where), needs_images=False)
    if predictor.get("workerSpec") is not None:
        workers = _object(document, (*path, "workerSpec"), where)
        yield PodSpec("spec.predictor.workerSpec", workers, {}, worker=True)


def _template(
    document: Object,
    path: tuple[str, ...],
    where: str,
    worker: bool = False,
    restarts_group: str = "",
) -> PodSpec:
    template = _object(document, path, where)
    # Nothing is added to pods without a supervisor, not even empty labels.
    labels = {} if worker else _labels(_object(template, ("metadata",), where), where)
    spec = _object(template, ("spec",), where)
    return PodSpec(".".join((*path, "spec")), spec, labels, worker, restarts_group)


def _object(document: Object, path: tuple[str, ...], where: str) -> Object:
    """Return the object at ``path``, made if it is absent."""
    found = document
    for at, key in enumerate(path):
        if found.get(key) is None:
            found[key] = {}
        found = found[key]
        if not isinstance(found, dict):
            raise InjectionError(f"{where}: {'.'.join(path[: at + 1])}: must be an object")
    return found


def _labels(metadata: Object, where: str) -> Object:
    return _object(metadata, ("labels",), where)
