"""The pod template: engine and supervisor, under the restricted pod security standard."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from plimsoll_api.inferenceservice import InferenceService, Resources
from plimsoll_api.units import parse_duration
from plimsoll_operator.render import names, paths
from plimsoll_operator.render.engine import drain_args, engine_args, engine_env
from plimsoll_operator.render.merge import merge_template
from plimsoll_operator.render.supervisor import supervisor_args

UID = 10001
"""Of both containers: the supervisor reads smaps_rollup and signals only its own UID."""

STOP_S = 30
"""After the drain: the engine frees its memory, then the supervisor writes its last record."""

STARTUP_MARGIN_S = 30
"""An engine gives up by itself, with a message, before the kubelet does."""

PROBE_PERIOD_S = 2
TOKEN_LIFETIME_S = 3600


@dataclass(frozen=True)
class Images:
    """Images for services that name none."""

    engine: str
    supervisor: str


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
            },
            "initContainers": [_supervisor(service, images)],
            "containers": [_engine(service, images)],
            "volumes": _volumes(service),
        },
    }
    if service.spec.pod_template:
        template = merge_template(template, service.spec.pod_template)
    # What the Service, the watches and the supervisor rely on is not for a merge to lose.
    template["metadata"]["labels"] = (template["metadata"].get("labels") or {}) | names.labels(
        meta.name
    )
    return template


def grace_period(service: InferenceService) -> int:
    """Seconds from the kubelet's first signal to its last: the drain and the stop after it."""
    return math.ceil(parse_duration(service.spec.supervision.drain.deadline)) + STOP_S


def _engine(service: InferenceService, images: Images) -> dict[str, Any]:
    engine = service.spec.engine
    budget_s = parse_duration(engine.startup_timeout) + STARTUP_MARGIN_S
    return {
        "name": names.ENGINE,
        "image": engine.image or images.engine,
        "command": ["python", "-m", "plimsoll_engine", *engine_args(service)],
        "env": [
            {"name": "HOME", "value": paths.CACHE_DIR},
            {"name": "HF_HOME", "value": f"{paths.CACHE_DIR}/huggingface"},
            {"name": "TRITON_CACHE_DIR", "value": f"{paths.CACHE_DIR}/triton"},
            *engine_env(service),
        ],
        "ports": [{"name": "http", "containerPort": engine.port, "protocol": "TCP"}],
        "resources": _resources(engine.resources),
        "startupProbe": _probe("/ready", engine.port)
        | {"failureThreshold": math.ceil(budget_s / PROBE_PERIOD_S)},
        "readinessProbe": _probe("/ready", engine.port) | {"failureThreshold": 2},
        # Liveness means that the frontend answers. A stalled worker is the supervisor's business:
        # the kubelet would restart it outside of slot, budget and journal.
        "livenessProbe": _probe("/health", engine.port)
        | {"periodSeconds": 10, "failureThreshold": 6},
        # An exec: an HTTP hook cannot reach a loopback port.
        "lifecycle": {
            "preStop": {
                "exec": {"command": ["python", "-m", "plimsoll_engine", *drain_args(service)]}
            }
        },
        "securityContext": _restricted(),
        "volumeMounts": _engine_mounts(service),
    }


def _engine_mounts(service: InferenceService) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "run", "mountPath": paths.RUN_DIR},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "cache", "mountPath": paths.CACHE_DIR},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if paths.claim(service.spec.model.uri):
        mounts.append({"name": "model", "mountPath": paths.CLAIM_DIR, "readOnly": True})
    return mounts


def _supervisor(service: InferenceService, images: Images) -> dict[str, Any]:
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
        ],
        "ports": [
            {"name": "metrics", "containerPort": paths.METRICS_PORT, "protocol": "TCP"},
            {"name": "probe", "containerPort": paths.PROBE_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(supervisor.resources),
        # The engine starts when this one has succeeded: then the admin token is there.
        "startupProbe": _probe("/live", paths.PROBE_PORT)
        | {"periodSeconds": 1, "failureThreshold": 60},
        # Unready while it drains an engine; a crash of the supervisor behind the launcher is not.
        "readinessProbe": _probe("/ready", paths.PROBE_PORT)
        | {"periodSeconds": 1, "failureThreshold": 1},
        "livenessProbe": _probe("/live", paths.PROBE_PORT)
        | {"periodSeconds": 10, "failureThreshold": 6},
        "securityContext": _restricted(),
        "volumeMounts": [
            {"name": "run", "mountPath": paths.RUN_DIR},
            {"name": "state", "mountPath": paths.STATE_DIR},
            {"name": "config", "mountPath": paths.CONFIG_DIR, "readOnly": True},
            {"name": "token", "mountPath": paths.TOKEN_DIR, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def _volumes(service: InferenceService) -> list[dict[str, Any]]:
    name = service.metadata.name
    volumes: list[dict[str, Any]] = [
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "state", "emptyDir": {"sizeLimit": "256Mi"}},
        {"name": "cache", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "config", "configMap": {"name": names.supervisor(name)}},
        {"name": "token", "projected": {"sources": _token_sources()}},
    ]
    claim = paths.claim(service.spec.model.uri)
    if claim:
        source = {"claimName": claim[0], "readOnly": True}
        volumes.append({"name": "model", "persistentVolumeClaim": source})
    return volumes


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


def _probe(path: str, port: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": PROBE_PERIOD_S,
        "timeoutSeconds": 5,
    }


def _restricted() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def _resources(resources: Resources) -> dict[str, Any]:
    return resources.model_dump(by_alias=True)
