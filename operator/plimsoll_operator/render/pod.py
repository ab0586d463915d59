"""The pod template: engine and supervisor, under the restricted pod security standard."""

from __future__ import annotations

import math
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.supervision import EXPORTER_PORT, NODE_IP
from plimsoll_api.units import parse_duration
from plimsoll_operator.render import api_keys, model, names, paths
from plimsoll_operator.render.containers import Images, probe, resources, restricted
from plimsoll_operator.render.deployment import pod_hash
from plimsoll_operator.render.engine_container import engine_container
from plimsoll_operator.render.merge import merge_template
from plimsoll_operator.render.supervisor import supervisor_args

UID = 10001
"""Of both containers: the supervisor reads smaps_rollup and signals only its own UID."""

STOP_S = 30
"""After the drain: the engine frees its memory, then the supervisor writes its last record."""

TOKEN_LIFETIME_S = 3600


def pod_template(service: InferenceService, images: Images) -> dict[str, Any]:
    """The pod template of ``service``, with its ``podTemplate`` merged over it."""
    meta = service.metadata
    template: dict[str, Any] = {
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
            # Downloads come first: the supervisor's clock would run during them.
            "initContainers": [
                *model.download(service, images),
                supervisor_container(service, images),
            ],
            "containers": [engine_container(service, images)],
            "volumes": _volumes(service),
        },
    }
    if service.spec.pod_template:
        template = merge_template(template, service.spec.pod_template)
    # What the Service, the watches and the supervisor rely on is not for a merge to lose.
    own = names.labels(meta.name) | {names.REVISION_LABEL: pod_hash(service)}
    template["metadata"]["labels"] = (template["metadata"].get("labels") or {}) | own
    return template


def _group(service: InferenceService) -> dict[str, Any]:
    """A new claim belongs to root: the download could not write to it."""
    if service.spec.model.cache is None:
        return {}
    return {"fsGroup": UID, "fsGroupChangePolicy": "OnRootMismatch"}


def grace_period(service: InferenceService) -> int:
    """Seconds from the kubelet's first signal to its last: the drain and the stop after it."""
    return math.ceil(parse_duration(service.spec.supervision.drain.deadline)) + STOP_S


def supervisor_container(service: InferenceService, images: Images) -> dict[str, Any]:
    """The native sidecar, as it stands in ``initContainers``."""
    supervisor = service.spec.supervisor
    return {
        "name": names.SUPERVISOR,
        "image": supervisor.image or images.supervisor,
        "command": ["python", "-m", "plimsoll_sidecar.launcher", *supervisor_args(service)],
        # A restartable init container starts before the engine and ends after it.
        "restartPolicy": "Always",
        "env": [
            _from_field("POD_NAME", "metadata.name"),
            _from_field("POD_NAMESPACE", "metadata.namespace"),
            *_exporter(supervisor.dcgm_exporter_port),
        ],
        "ports": [
            {"name": "metrics", "containerPort": paths.METRICS_PORT, "protocol": "TCP"},
            {"name": "probe", "containerPort": paths.PROBE_PORT, "protocol": "TCP"},
        ],
        "resources": resources(supervisor.resources),
        # The engine starts when this one has succeeded: then the admin token is there.
        "startupProbe": probe("/live", paths.PROBE_PORT)
        | {"periodSeconds": 1, "failureThreshold": 60},
        # Unready while it drains an engine; a crash of the supervisor behind the launcher is not.
        "readinessProbe": probe("/ready", paths.PROBE_PORT)
        | {"periodSeconds": 1, "failureThreshold": 1},
        "livenessProbe": probe("/live", paths.PROBE_PORT)
        | {"periodSeconds": 10, "failureThreshold": 6},
        "securityContext": restricted(),
        "volumeMounts": [
            {"name": "run", "mountPath": paths.RUN_DIR},
            {"name": "state", "mountPath": paths.STATE_DIR},
            {"name": "config", "mountPath": paths.CONFIG_DIR, "readOnly": True},
            {"name": "token", "mountPath": paths.TOKEN_DIR, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def _exporter(port: int | None) -> list[dict[str, Any]]:
    if port is None:
        return []
    return [
        _from_field(NODE_IP, "status.hostIP"),
        {"name": EXPORTER_PORT, "value": f"{port}"},
    ]


def _volumes(service: InferenceService) -> list[dict[str, Any]]:
    name = service.metadata.name
    return [
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "state", "emptyDir": {"sizeLimit": "256Mi"}},
        {"name": "cache", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "config", "configMap": {"name": names.supervisor(name)}},
        {"name": "token", "projected": {"sources": _token_sources()}},
        *model.volumes(service),
        *api_keys.volumes(service),
    ]


def _token_sources() -> list[dict[str, Any]]:
    """What ``automountServiceAccountToken`` would mount, for the supervisor alone."""
    field = {"apiVersion": "v1", "fieldPath": "metadata.namespace"}
    ca = [{"key": "ca.crt", "path": "ca.crt"}]
    return [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_LIFETIME_S}},
        {"configMap": {"name": "kube-root-ca.crt", "items": ca}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": field}]}},
    ]


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
