"""Render the pod template, which meets the restricted Pod Security Standard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from plimsoll_api.engines import EngineType
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
    fit_resources,
    make_device_claims,
    make_http_probe,
    make_resources,
    make_restricted_context,
)
from plimsoll_operator.render.deployment import compute_pod_hash
from plimsoll_operator.render.engine import make_api_key_volumes, make_engine_container
from plimsoll_operator.render.eviction import mark_evictable_volumes
from plimsoll_operator.render.groups import GROUP_RESTART_POLICY, make_member_env
from plimsoll_operator.render.paths import POD_LAYOUT
from plimsoll_operator.render.probe import add_probe
from plimsoll_operator.render.supervisor import make_supervisor_args

USER_ID = 10001
"""User ID of the engine and the supervisor, which can inspect only processes of its own user."""

PICKER_ENGINE_LABEL = "inference.networking.k8s.io/engine-type"

STOP_MARGIN_S = 30
"""Time after a drain in which engine and supervisor can still free memory and write files."""

TOKEN_LIFETIME_S = 3600


def make_revision_template(service: InferenceService, images: Images) -> dict[str, Any]:
    """Build the template of the current revision, for a pod or for a group on several nodes."""
    if service.spec.nodes == 1:
        return make_pod_template(service, images)
    return {
        "size": service.spec.nodes,
        "restartPolicy": GROUP_RESTART_POLICY,
        "leaderTemplate": make_pod_template(service, images),
        "workerTemplate": make_pod_template(service, images, worker=True),
    }


def make_pod_template(
    service: InferenceService, images: Images, worker: bool = False
) -> dict[str, Any]:
    """Build the pod template of ``service``, including its ``podTemplate``."""
    base = make_base_template(service, images, worker)
    template = merge_template(base, service.spec.pod_template or {})
    # A merge must not remove the labels that the Service, the watches and the supervisor need.
    own = names.make_labels(service.metadata.name) | {REVISION_LABEL: compute_pod_hash(service)}
    meta = template["metadata"]
    meta["labels"] = (meta.get("labels") or {}) | own
    annotations = meta.get("annotations") or {}
    meta["annotations"] = annotations | mark_evictable_volumes(
        annotations,
        template["spec"]["volumes"],
        {volume["name"] for volume in base["spec"]["volumes"]},
    )
    return template


def make_base_template(
    service: InferenceService, images: Images, worker: bool = False
) -> dict[str, Any]:
    """Build the pod template of ``service`` without its ``podTemplate``."""
    meta = service.metadata
    return {
        "metadata": {
            "labels": names.make_labels(meta.name) | _make_picker_labels(service),
            "annotations": {"kubectl.kubernetes.io/default-container": names.ENGINE},
        },
        "spec": {
            "serviceAccountName": names.make_supervisor_name(meta.name),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "shareProcessNamespace": True,
            "terminationGracePeriodSeconds": compute_grace_period_s(service),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "seccompProfile": {"type": "RuntimeDefault"},
                **_make_pod_security_context(service),
            },
            **_make_containers(service, images, worker),
        },
    }


# Without the label, a picker expects vLLM's metrics, which a ``plimsoll`` engine has, too. See
# ``mapping_registry.go`` of the Gateway API Inference Extension, v1.5.0.
def _make_picker_labels(service: InferenceService) -> dict[str, str]:
    engine = service.spec.engine.type
    return {PICKER_ENGINE_LABEL: engine.value} if engine is EngineType.SGLANG else {}


def _make_containers(service: InferenceService, images: Images, worker: bool) -> dict[str, Any]:
    engine, wanted = make_engine_container(service, images, worker), service.spec.supervisor
    supervisor = make_supervisor_container(
        wanted, wanted.image or images.supervisor, images.resources, [engine]
    )
    if service.spec.nodes > 1:
        supervisor["env"] += make_member_env(service, worker)
    downloads = model.make_download_containers(service, images)
    pod = {
        # Downloads come first: the supervisor starts only when they are complete.
        "initContainers": [*downloads, supervisor],
        "containers": [engine],
        "volumes": _make_volumes(service),
    }
    claims, of_engine = make_device_claims(service.spec.engine.resources)
    if claims:
        pod["resourceClaims"] = claims
        engine["resources"]["claims"] = of_engine
    add_pull_secrets(pod, wanted, images.pull_secrets)
    if service.spec.probe.enabled:
        add_probe(pod, engine, supervisor, service.spec.probe.image or images.probe)
    return pod


# The download needs ``fsGroup`` to write to a new claim, which root owns.
def _make_pod_security_context(service: InferenceService) -> dict[str, Any]:
    if service.spec.model.cache is None:
        return {}
    return {"fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch"}


def compute_grace_period_s(service: InferenceService) -> int:
    """Return the termination grace period in seconds: drain deadline plus :data:`STOP_MARGIN_S`."""
    return math.ceil(service.spec.supervision.drain.deadline_s) + STOP_MARGIN_S


def add_pull_secrets(
    pod: dict[str, Any], supervisor: SupervisorSettings, default: Sequence[str]
) -> None:
    """Add the pull secrets for the supervisor's image to ``pod``, in place.

    ``default`` are the Secrets to use if ``supervisor`` lists none.
    """
    wanted = [one.name for one in supervisor.image_pull_secrets] or default
    other_containers = [
        one for one in pod.get("imagePullSecrets") or () if one.get("name") not in wanted
    ]
    if wanted:
        pod["imagePullSecrets"] = [*other_containers, *({"name": name} for name in wanted)]


def make_supervisor_container(
    supervisor: SupervisorSettings,
    image: str,
    default: Resources,
    other_containers: Iterable[dict[str, Any]],
    layout: paths.SupervisorLayout = POD_LAYOUT,
) -> dict[str, Any]:
    """Return the supervisor's container, a native sidecar for ``initContainers``.

    Without resources in ``supervisor``, it gets ``default``, adapted to ``other_containers``.
    """
    own = supervisor.resources
    return {
        "name": names.SUPERVISOR,
        "image": image,
        "command": ["python", "-m", SUPERVISOR_MODULE, *make_supervisor_args(layout)],
        # A restartable init container starts before the engine and stops after it.
        "restartPolicy": "Always",
        "env": [
            _make_field_variable("POD_NAME", "metadata.name"),
            _make_field_variable("POD_NAMESPACE", "metadata.namespace"),
            *_make_exporter_env(supervisor),
        ],
        "ports": [
            {"name": "metrics", "containerPort": layout.metrics_port, "protocol": "TCP"},
            {"name": "probe", "containerPort": layout.probe_port, "protocol": "TCP"},
        ],
        "resources": fit_resources(default, other_containers)
        if own is None
        else make_resources(own),
        # The engine starts once this probe succeeds, when the admin token exists.
        "startupProbe": make_http_probe("/live", layout.probe_port)
        | {"periodSeconds": 1, "failureThreshold": 60},
        # It fails while an engine drains, but not if the supervisor crashes behind the launcher.
        "readinessProbe": make_http_probe("/ready", layout.probe_port)
        | {"periodSeconds": 1, "failureThreshold": 1},
        "livenessProbe": make_http_probe("/live", layout.probe_port)
        | {"periodSeconds": 10, "failureThreshold": 6},
        **LOG_ON_ERROR,
        "securityContext": make_restricted_context(),
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


def _make_exporter_env(supervisor: SupervisorSettings) -> list[dict[str, Any]]:
    ports = {
        DCGM_EXPORTER_PORT_ENV: supervisor.dcgm_exporter_port,
        AMD_EXPORTER_PORT_ENV: supervisor.amd_exporter_port,
    }
    named = [{"name": name, "value": f"{port}"} for name, port in ports.items() if port is not None]
    return [_make_field_variable(NODE_IP_ENV, "status.hostIP"), *named] if named else []


def _make_volumes(service: InferenceService) -> list[dict[str, Any]]:
    name = service.metadata.name
    return [
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "state", "emptyDir": {"sizeLimit": "256Mi"}},
        {"name": "cache", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
        # It is optional, as in injected pods: the engine never waits for a ConfigMap.
        {
            "name": "config",
            "configMap": {"name": names.make_supervisor_name(name), "optional": True},
        },
        {"name": "token", "projected": {"sources": make_token_sources()}},
        *model.make_model_volumes(service),
        *make_api_key_volumes(service),
    ]


def make_token_sources() -> list[dict[str, Any]]:
    """Return the sources of the supervisor's token volume, as with automountServiceAccountToken."""
    field = {"apiVersion": "v1", "fieldPath": "metadata.namespace"}
    ca = [{"key": "ca.crt", "path": "ca.crt"}]
    return [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_LIFETIME_S}},
        {"configMap": {"name": "kube-root-ca.crt", "items": ca, "optional": True}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": field}]}},
    ]


def _make_field_variable(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
