"""Arguments and environment of the engine, the same in a pod and in local mode."""

from __future__ import annotations

from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.units import parse_duration
from plimsoll_operator.render.paths import KEYS_DIR, KEYS_FILE, Places, in_pod


def engine_args(service: InferenceService, places: Places | None = None) -> list[str]:
    """Return the arguments after ``python -m plimsoll_engine``."""
    at = places or in_pod(service)
    engine = service.spec.engine
    return [
        "serve",
        f"--model={at.model_dir}",
        f"--served-model-name={service.served_name}",
        f"--host={at.host}",
        f"--port={at.port}",
        f"--admin-port={at.admin_port}",
        f"--run-dir={at.run_dir}",
        f"--startup-timeout={seconds(parse_duration(engine.startup_timeout))}",
        *([f"--api-key-file={KEYS_DIR}/{KEYS_FILE}"] if engine.api_key_secret_ref else []),
        *engine.args,
    ]


def drain_args(service: InferenceService, places: Places | None = None) -> list[str]:
    """Return the arguments after ``python -m plimsoll_engine`` that drain it before a pod ends."""
    at = places or in_pod(service)
    deadline = service.spec.supervision.drain.deadline_s
    return [
        "drain",
        f"--admin-port={at.admin_port}",
        f"--run-dir={at.run_dir}",
        f"--deadline={seconds(deadline)}",
    ]


def engine_env(service: InferenceService) -> list[dict[str, Any]]:
    """Return the manifest's variables as a container takes them, in the manifest's order."""
    return [
        variable.model_dump(by_alias=True, exclude_none=True)
        for variable in service.spec.engine.env
    ]


def plain_env(service: InferenceService) -> dict[str, str]:
    """Return the manifest's variables as a process takes them.

    Raises ValueError if one of them, or the engine's API keys, refers to another object.
    """
    if service.spec.engine.api_key_secret_ref is not None:
        raise ValueError(
            "spec.engine.apiKeySecretRef needs a cluster; to run without one, leave it out and "
            "name a file in spec.engine.args: --api-key-file=FILE"
        )
    variables: dict[str, str] = {}
    for index, variable in enumerate(service.spec.engine.env):
        if variable.value_from is not None:
            raise ValueError(
                f"spec.engine.env[{index}].valueFrom: {variable.name} needs a cluster; "
                "write its value here to run without one"
            )
        variables[variable.name] = variable.value or ""
    return variables


def seconds(value: float) -> str:
    """``30`` rather than ``30.0``, ``0.5`` where it is not whole."""
    return f"{value:g}" if value < 1e6 else f"{value:.0f}"
