"""Render the engine's arguments, environment and container.

The Secret with the API keys is mounted as a directory, so the engine reads changed keys without a
restart.
"""

from __future__ import annotations

import math
from typing import Any

from plimsoll_api.engines import EngineType
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.supervisor_config import CONTAINER_ENV
from plimsoll_api.units import parse_duration
from plimsoll_operator.render import model, names, paths
from plimsoll_operator.render.containers import (
    LOG_ON_ERROR,
    PROBE_PERIOD_S,
    Images,
    make_http_probe,
    make_resources,
    make_restricted_context,
)
from plimsoll_operator.render.groups import make_parallel_args
from plimsoll_operator.render.paths import (
    API_KEYS_DIR,
    API_KEYS_FILE,
    ReplicaLayout,
    make_pod_layout,
)

API_KEYS_VOLUME = "api-keys"


def make_api_key_volumes(service: InferenceService) -> list[dict[str, Any]]:
    """Return the volume with the API keys; empty if the service has no API keys."""
    ref = service.spec.engine.api_key_secret_ref
    if ref is None:
        return []
    item = {"key": ref.key, "path": API_KEYS_FILE}
    return [{"name": API_KEYS_VOLUME, "secret": {"secretName": ref.name, "items": [item]}}]


def make_api_key_mounts(service: InferenceService) -> list[dict[str, Any]]:
    """Return the mount of the API keys for the engine's container; empty without API keys."""
    if service.spec.engine.api_key_secret_ref is None:
        return []
    return [{"name": API_KEYS_VOLUME, "mountPath": API_KEYS_DIR, "readOnly": True}]


def make_engine_args(service: InferenceService, layout: ReplicaLayout | None = None) -> list[str]:
    """Return the arguments after ``python -m plimsoll_engine``."""
    at = layout or make_pod_layout(service)
    engine = service.spec.engine
    return [
        "serve",
        f"--model={at.model_dir}",
        f"--served-model-name={service.served_name}",
        f"--host={at.host}",
        f"--port={at.port}",
        f"--admin-port={at.admin_port}",
        f"--run-dir={at.run_dir}",
        f"--startup-timeout={format_seconds(parse_duration(engine.startup_timeout))}",
        *([f"--api-key-file={API_KEYS_DIR}/{API_KEYS_FILE}"] if engine.api_key_secret_ref else []),
        *engine.args,
    ]


def make_drain_args(service: InferenceService) -> list[str]:
    """Return the arguments after ``python -m plimsoll_engine`` that drain the engine."""
    at = make_pod_layout(service)
    deadline = service.spec.supervision.drain.deadline_s
    return [
        "drain",
        f"--admin-port={at.admin_port}",
        f"--run-dir={at.run_dir}",
        f"--deadline={format_seconds(deadline)}",
    ]


def make_engine_env(service: InferenceService) -> list[dict[str, Any]]:
    """Return the environment variables in the spec, in the form of a container's ``env``."""
    return [
        variable.model_dump(by_alias=True, exclude_none=True)
        for variable in service.spec.engine.env
    ]


def make_process_env(service: InferenceService) -> dict[str, str]:
    """Return the environment variables in the spec for an engine in local mode.

    Raises ValueError if a variable or ``apiKeySecretRef`` refers to an object in a cluster.
    """
    if service.spec.engine.api_key_secret_ref is not None:
        raise ValueError(
            "spec.engine.apiKeySecretRef can only be used in a cluster: without one, remove the"
            " field and add --api-key-file=FILE to spec.engine.args"
        )
    variables: dict[str, str] = {}
    for index, variable in enumerate(service.spec.engine.env):
        if variable.value_from is not None:
            raise ValueError(
                f"spec.engine.env[{index}].valueFrom: {variable.name} can only be read in a"
                " cluster: without one, set the variable's value"
            )
        variables[variable.name] = variable.value or ""
    return variables


def format_seconds(value: float) -> str:
    """Format seconds without a trailing ``.0``: ``30``, but ``0.5``."""
    return f"{value:g}" if value < 1e6 else f"{value:.0f}"


STARTUP_MARGIN_S = 30
"""Time by which the engine's own startup timeout is shorter than the kubelet's, so that the
engine can report the reason."""

ENDPOINT_REMOVAL_S = 5
"""Time between the deletion of a pod and SIGTERM for an external engine, in which the pod is
removed from the endpoints."""


def make_engine_container(
    service: InferenceService, images: Images, worker: bool = False
) -> dict[str, Any]:
    """Build the engine's container; in a ``worker`` pod, the engine serves no port."""
    engine = service.spec.engine
    return {
        "name": names.ENGINE,
        "image": engine.image or images.engine,
        **_make_command(service, images.host, worker),
        "env": _make_environment(service),
        "resources": make_resources(engine.resources),
        **({} if worker else _make_port_and_probes(service)),
        "lifecycle": {"preStop": _make_pre_stop_hook(service)},
        **LOG_ON_ERROR,
        "securityContext": make_restricted_context(),
        "volumeMounts": [
            {"name": "run", "mountPath": paths.RUN_DIR},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": paths.CACHE_DIR},
            {"name": "tmp", "mountPath": "/tmp"},
            *model.make_model_mounts(service),
            *make_api_key_mounts(service),
        ],
    }


def _make_port_and_probes(service: InferenceService) -> dict[str, Any]:
    engine = service.spec.engine
    plimsoll = engine.type is EngineType.PLIMSOLL
    ready = engine.probes.readiness or ("/ready" if plimsoll else "/health")
    budget_s = parse_duration(engine.startup_timeout) + STARTUP_MARGIN_S
    scheme = engine.url_scheme.upper()
    return {
        "ports": [{"name": "http", "containerPort": engine.port, "protocol": "TCP"}],
        "startupProbe": make_http_probe(ready, engine.port, scheme)
        | {"failureThreshold": math.ceil(budget_s / PROBE_PERIOD_S)},
        "readinessProbe": make_http_probe(ready, engine.port, scheme) | {"failureThreshold": 2},
        # Liveness means that the frontend responds. The supervisor handles a stalled worker: the
        # kubelet would restart it without a slot, a budget and an entry in the journal.
        "livenessProbe": make_http_probe(engine.probes.liveness or "/health", engine.port, scheme)
        | {"periodSeconds": 10, "failureThreshold": 6},
    }


# Variables in the spec take precedence.
def _make_environment(service: InferenceService) -> list[dict[str, Any]]:
    variables = [
        {"name": "HOME", "value": paths.CACHE_DIR},
        {"name": "HF_HOME", "value": f"{paths.CACHE_DIR}/huggingface"},
        {"name": "TRITON_CACHE_DIR", "value": f"{paths.CACHE_DIR}/triton"},
        {"name": CONTAINER_ENV, "value": names.ENGINE},
        *_make_custom_engine_env(service),
        *_make_group_env(service),
        *make_engine_env(service),
    ]
    return list({one["name"]: one for one in variables}.values())


# The arguments in the spec come last.
def _make_command(service: InferenceService, host: str, worker: bool) -> dict[str, Any]:
    engine = service.spec.engine
    at = make_pod_layout(service)
    match engine.type:
        case EngineType.PLIMSOLL:
            return {"command": ["python", "-m", "plimsoll_engine", *make_engine_args(service)]}
        case EngineType.VLLM:
            command = ["vllm", "serve", at.model_dir]
        case EngineType.SGLANG:
            command = ["python3", "-m", "sglang.launch_server", f"--model-path={at.model_dir}"]
        case EngineType.CUSTOM:
            return {"args": list(engine.args)}
    address = [f"--host={host}", f"--port={at.port}"]
    named = f"--served-model-name={service.served_name}"
    ranks = make_parallel_args(service, worker)
    return {"command": [*command, named, *address, *ranks, *engine.args]}


# vLLM must know its pod's address.
def _make_group_env(service: InferenceService) -> list[dict[str, Any]]:
    if service.spec.engine.type is not EngineType.VLLM or service.spec.nodes == 1:
        return []
    field = {"apiVersion": "v1", "fieldPath": "status.podIP"}
    return [{"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": field}}]


def _make_custom_engine_env(service: InferenceService) -> list[dict[str, Any]]:
    if service.spec.engine.type is not EngineType.CUSTOM:
        return []
    at = make_pod_layout(service)
    variables = {
        "PLIMSOLL_MODEL_DIR": at.model_dir,
        "PLIMSOLL_MODEL_NAME": service.served_name,
        "PLIMSOLL_PORT": str(at.port),
        "PLIMSOLL_RUN_DIR": at.run_dir,
    }
    return [{"name": name, "value": value} for name, value in variables.items()]


# A drain is an exec hook, because an HTTP hook cannot reach the admin port on loopback. SIGTERM
# drains an external engine, after a pause in which the pod is removed from the endpoints.
def _make_pre_stop_hook(service: InferenceService) -> dict[str, Any]:
    if service.spec.engine.type is EngineType.PLIMSOLL:
        return {"exec": {"command": ["python", "-m", "plimsoll_engine", *make_drain_args(service)]}}
    return {"sleep": {"seconds": ENDPOINT_REMOVAL_S}}
