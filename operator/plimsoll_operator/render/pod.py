"""Render the pod template: engine and supervisor, under the restricted Pod Security Standard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import REVISION_LABEL, SUPERVISOR_MODULE
from plimsoll_api.resources import Resources
from plimsoll_api.serving import SupervisorSettings
from plimsoll_api.supervisor_config import (
    AMD_EXPORTER_PORT_ENV,
    DCGM_EXPORTER_PORT_ENV,
    NODE_IP_ENV,
)
from plimsoll_operator.render import model, names, paths
from plimsoll_operator.render.compare import merge_template
from plimsoll_operator.render.containers import (
    LOG_ON_ERROR,
    Images,
    claimed_devices,
    fit_resources,
    probe,
    resources,
    restricted,
)
from plimsoll_operator.render.deployment import pod_hash
from plimsoll_operator.render.engine import engine_container, key_volumes
from plimsoll_operator.render.groups import RESTART_POLICY, member_env
from plimsoll_operator.render.paths import SUPERVISED
from plimsoll_operator.render.probe import add_probe
from plimsoll_operator.render.supervisor import supervisor_args

UID = 10001
"""User ID of both containers. The supervisor can inspect and signal only processes of its own
user."""

STOP_S = 30
"""Seconds after the drain in which the engine frees its memory and the supervisor completes its
journal."""

TOKEN_LIFETIME_S = 3600


def revision_template(service: InferenceService, images: Images) -> dict[str, Any]:
    """Build the template of a revision: of a pod, or of a group of pods for several nodes."""
    if service.spec.nodes == 1:
        return pod_template(service, images)
    return {
        "size": service.spec.nodes,
        "restartPolicy": RESTART_POLICY,
        "leaderTemplate": pod_template(service, images),
        "workerTemplate": pod_template(service, images, worker=True),
    }


def pod_template(service: InferenceService, images: Images, worker: bool = False) -> dict[str, Any]:
    """Build the pod template of ``service``, with its ``podTemplate`` merged over it.

    ``worker`` is whether the pod is a worker of its group.
    """
    template = rendered_template(service, images, worker)
    if service.spec.pod_template:
        template = merge_template(template, service.spec.pod_template)
    # A merge must not remove the labels that the Service, the watches and the supervisor need.
    own = names.labels(service.metadata.name) | {REVISION_LABEL: pod_hash(service)}
    template["metadata"]["labels"] = (template["metadata"].get("labels") or {}) | own
    return template


def rendered_template(
    service: InferenceService, images: Images, worker: bool = False
) -> dict[str, Any]:
    """Build the operator's own part of the pod template."""
    meta = service.metadata
    return {
        "metadata": {
            "labels": names.labels(meta.name),
            "annotations": {"kubectl.kubernetes.io/default-container": names.ENGINE},
        },
        "spec": {
            "serviceAccountName": names.supervisor(meta.name),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "shareProcessNamespace": True,
            "terminationGracePeriodSeconds": grace_period(service),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": UID,
                "runAsGroup": UID,
                "seccompProfile": {"type": "RuntimeDefault"},
                **_group(service),
            },
            **_containers(service, images, worker),
        },
    }


def _containers(service: InferenceService, images: Images, worker: bool) -> dict[str, Any]:
    engine, wanted = engine_container(service, images, worker), service.spec.supervisor
    supervisor = supervisor_container(
        wanted, wanted.image or images.supervisor, images.resources, [engine]
    )
    if service.spec.nodes > 1:
        supervisor["env"] += member_env(service, worker)
    downloads = model.download(service, images)
    pod = {
        # Downloads come first: the supervisor starts only when they are complete.
        "initContainers": [*downloads, supervisor],
        "containers": [engine],
        "volumes": _volumes(service),
    }
    claims, of_engine = claimed_devices(service.spec.engine.resources)
    if claims:
        pod["resourceClaims"] = claims
        engine["resources"]["claims"] = of_engine
    add_pull_secrets(pod, wanted, images.pull_secrets)
    if service.spec.probe.enabled:
        add_probe(pod, engine, supervisor, service.spec.probe.image or images.probe)
    return pod


def _group(service: InferenceService) -> dict[str, Any]:
    """Return the group with which the download can write to a new claim, which root owns."""
    if service.spec.model.cache is None:
        return {}
    return {"fsGroup": UID, "fsGroupChangePolicy": "OnRootMismatch"}


def grace_period(service: InferenceService) -> int:
    """Return the termination grace period in seconds: drain deadline plus :data:`STOP_S`."""
    return math.ceil(service.spec.supervision.drain.deadline_s) + STOP_S


def add_pull_secrets(
    pod: dict[str, Any], supervisor: SupervisorSettings, default: Sequence[str]
) -> None:
    """Add the pull secrets of the supervisor's image, or else the ``default``, to ``pod``.

    The kubelet ignores a Secret that does not exist.
    """
    wanted = [one.name for one in supervisor.image_pull_secrets] or default
    others = [one for one in pod.get("imagePullSecrets") or () if one.get("name") not in wanted]
    if wanted:
        pod["imagePullSecrets"] = [*others, *({"name": name} for name in wanted)]


def supervisor_container(
    supervisor: SupervisorSettings,
    image: str,
    default: Resources,
    others: Iterable[dict[str, Any]],
    at: paths.SupervisorPlaces = SUPERVISED,
) -> dict[str, Any]:
    """Return the supervisor as a native sidecar for ``initContainers``.

    If ``supervisor`` sets no resources, it gets the ``default``, adapted to ``others``, the pod's
    other containers.
    """
    own = supervisor.resources
    return {
        "name": names.SUPERVISOR,
        "image": image,
        "command": ["python", "-m", SUPERVISOR_MODULE, *supervisor_args(at)],
        # A restartable init container starts before the engine and stops after it.
        "restartPolicy": "Always",
        "env": [
            _from_field("POD_NAME", "metadata.name"),
            _from_field("POD_NAMESPACE", "metadata.namespace"),
            *_exporters(supervisor),
        ],
        "ports": [
            {"name": "metrics", "containerPort": at.metrics_port, "protocol": "TCP"},
            {"name": "probe", "containerPort": at.probe_port, "protocol": "TCP"},
        ],
        "resources": fit_resources(default, others) if own is None else resources(own),
        # The engine starts once this probe succeeds, when the admin token exists.
        "startupProbe": probe("/live", at.probe_port)
        | {"periodSeconds": 1, "failureThreshold": 60},
        # It fails while an engine drains, but not if the supervisor crashes behind the launcher.
        "readinessProbe": probe("/ready", at.probe_port)
        | {"periodSeconds": 1, "failureThreshold": 1},
        "livenessProbe": probe("/live", at.probe_port)
        | {"periodSeconds": 10, "failureThreshold": 6},
        **LOG_ON_ERROR,
        "securityContext": restricted(),
        "volumeMounts": [
            {"name": "run", "mountPath": paths.RUN_DIR},
            # The supervisor deletes files here that a terminated engine left behind.
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "state", "mountPath": paths.STATE_DIR},
            {"name": "config", "mountPath": paths.CONFIG_DIR, "readOnly": True},
            {"name": "token", "mountPath": paths.TOKEN_DIR, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def _exporters(supervisor: SupervisorSettings) -> list[dict[str, Any]]:
    ports = {
        DCGM_EXPORTER_PORT_ENV: supervisor.dcgm_exporter_port,
        AMD_EXPORTER_PORT_ENV: supervisor.amd_exporter_port,
    }
    named = [{"name": name, "value": f"{port}"} for name, port in ports.items() if port is not None]
    return [_from_field(NODE_IP_ENV, "status.hostIP"), *named] if named else []


def _volumes(service: InferenceService) -> list[dict[str, Any]]:
    name = service.metadata.name
    return [
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "state", "emptyDir": {"sizeLimit": "256Mi"}},
        {"name": "cache", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
        # It is optional, as in injected pods: the engine never waits for a ConfigMap.
        {"name": "config", "configMap": {"name": names.supervisor(name), "optional": True}},
        {"name": "token", "projected": {"sources": token_sources()}},
        *model.volumes(service),
        *key_volumes(service),
    ]


def token_sources() -> list[dict[str, Any]]:
    """Return the sources that ``automountServiceAccountToken`` would mount, for the supervisor."""
    field = {"apiVersion": "v1", "fieldPath": "metadata.namespace"}
    ca = [{"key": "ca.crt", "path": "ca.crt"}]
    return [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_LIFETIME_S}},
        {"configMap": {"name": "kube-root-ca.crt", "items": ca, "optional": True}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": field}]}},
    ]


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
