"""The engine's container: command, probes and shutdown of each type of engine."""

from __future__ import annotations

import math
from typing import Any

from plimsoll_api import engines
from plimsoll_api.engines import EngineType
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.supervisor_config import CONTAINER_ENV
from plimsoll_api.units import parse_duration
from plimsoll_operator.render import api_keys, model, names, paths
from plimsoll_operator.render.containers import (
    LAST_WORDS,
    PROBE_PERIOD_S,
    Images,
    probe,
    resources,
    restricted,
)
from plimsoll_operator.render.engine import drain_args, engine_args, engine_env

STARTUP_MARGIN_S = 30
"""An engine gives up by itself, with a message, before the kubelet does."""

ENDPOINTS_S = 5
"""An external engine keeps serving this long after its pod left the endpoints, before SIGTERM."""


def engine_container(service: InferenceService, images: Images) -> dict[str, Any]:
    """Build the container that is named ``engine``."""
    engine = service.spec.engine
    plimsoll = engine.type is EngineType.PLIMSOLL
    ready = engine.probes.readiness or ("/ready" if plimsoll else "/health")
    budget_s = parse_duration(engine.startup_timeout) + STARTUP_MARGIN_S
    scheme = engines.scheme(engine.type, engine.args).upper()
    return {
        "name": names.ENGINE,
        "image": engine.image or images.engine,
        **_start(service),
        "env": _environment(service),
        "ports": [{"name": "http", "containerPort": engine.port, "protocol": "TCP"}],
        "resources": resources(engine.resources),
        "startupProbe": probe(ready, engine.port, scheme)
        | {"failureThreshold": math.ceil(budget_s / PROBE_PERIOD_S)},
        "readinessProbe": probe(ready, engine.port, scheme) | {"failureThreshold": 2},
        # Liveness means that the frontend answers. A stalled worker is the supervisor's business:
        # the kubelet would restart it outside of slot, budget and journal.
        "livenessProbe": probe(engine.probes.liveness or "/health", engine.port, scheme)
        | {"periodSeconds": 10, "failureThreshold": 6},
        "lifecycle": {"preStop": _before_stop(service)},
        **LAST_WORDS,
        "securityContext": restricted(),
        "volumeMounts": [
            {"name": "run", "mountPath": paths.RUN_DIR},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": paths.CACHE_DIR},
            {"name": "tmp", "mountPath": "/tmp"},
            *model.mounts(service),
            *api_keys.mounts(service),
        ],
    }


def _environment(service: InferenceService) -> list[dict[str, Any]]:
    """One variable of a name, for the API server refuses two: the manifest's wins."""
    variables = [
        {"name": "HOME", "value": paths.CACHE_DIR},
        {"name": "HF_HOME", "value": f"{paths.CACHE_DIR}/huggingface"},
        {"name": "TRITON_CACHE_DIR", "value": f"{paths.CACHE_DIR}/triton"},
        {"name": CONTAINER_ENV, "value": names.ENGINE},
        *_coordinates(service),
        *engine_env(service),
    ]
    return list({one["name"]: one for one in variables}.values())


def _start(service: InferenceService) -> dict[str, Any]:
    """Command and arguments. What follows a known engine's arguments are the manifest's."""
    engine = service.spec.engine
    at = paths.in_pod(service)
    match engine.type:
        case EngineType.PLIMSOLL:
            return {"command": ["python", "-m", "plimsoll_engine", *engine_args(service)]}
        case EngineType.VLLM:
            command = ["vllm", "serve", at.model_dir]
        case EngineType.SGLANG:
            command = ["python3", "-m", "sglang.launch_server", f"--model-path={at.model_dir}"]
        case EngineType.CUSTOM:
            return {"args": list(engine.args)}
    address = [f"--host={at.host}", f"--port={at.port}"]
    named = f"--served-model-name={service.served_name}"
    return {"command": [*command, named, *address, *engine.args]}


def _coordinates(service: InferenceService) -> list[dict[str, Any]]:
    """Return what a custom engine has to know; the others are told by arguments."""
    if service.spec.engine.type is not EngineType.CUSTOM:
        return []
    at = paths.in_pod(service)
    variables = {
        "PLIMSOLL_MODEL_DIR": at.model_dir,
        "PLIMSOLL_MODEL_NAME": service.served_name,
        "PLIMSOLL_PORT": str(at.port),
        "PLIMSOLL_RUN_DIR": at.run_dir,
    }
    return [{"name": name, "value": value} for name, value in variables.items()]


def _before_stop(service: InferenceService) -> dict[str, Any]:
    """Our engine drains by an exec: an HTTP hook cannot reach a loopback port.

    In an external engine's image nothing may be presumed to exist: it serves on while endpoints
    follow, then SIGTERM drains it.
    """
    if service.spec.engine.type is EngineType.PLIMSOLL:
        return {"exec": {"command": ["python", "-m", "plimsoll_engine", *drain_args(service)]}}
    return {"sleep": {"seconds": ENDPOINTS_S}}
