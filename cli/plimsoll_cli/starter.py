"""``plimsoll init``: create an InferenceService from options and answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.memory_policy import AUTO_BUDGET
from plimsoll_api.names import API_VERSION, SERVICE_KIND
from plimsoll_cli import yaml_text
from plimsoll_cli.errors import UsageError
from plimsoll_cli.manifest import check_unit, format_problem

AskQuestion = Callable[[str, str], str]
"""Function that asks a person for a field, given its name in :data:`QUESTIONS` and its default,
and returns the answer."""


@dataclass(frozen=True)
class ManifestFields:
    """Fields of the new manifest; empty fields are omitted from it."""

    name: str
    model: str
    replicas: int = 1
    gpus: int = 1
    memory: str = "24Gi"
    host_budget: str = AUTO_BUDGET
    device_budget: str = AUTO_BUDGET
    window: str = "24h"
    mode: str = "Observe"


QUESTIONS = {
    "name": "Name of the service",
    "model": "Location of the model (pvc://, file://, hf:// or s3://)",
    "replicas": "Replicas",
    "gpus": "GPUs per replica (0 for the CPU)",
    "memory": "Host memory limit of the engine",
    "host_budget": "Growth budget for host memory (a size, or Auto)",
    "device_budget": "Growth budget for device memory (a size, or Auto)",
    "window": "Period that the growth budgets apply to",
    "mode": "Mode (Observe only records, Recover also acts)",
}


def ask_missing_fields(options: dict[str, Any], ask: AskQuestion) -> ManifestFields:
    """Ask for each field that ``options`` does not set, and return all fields.

    Raises UsageError for an invalid number.
    """
    values = dict(options)
    for field in QUESTIONS:
        if values.get(field) is None:
            default = ManifestFields.__dataclass_fields__[field].default
            shown = "" if not isinstance(default, str | int) else str(default)
            values[field] = ask(field, shown)
    for field in ("replicas", "gpus"):
        try:
            values[field] = int(values[field])
        except ValueError:
            raise UsageError(
                f"{field}: {values[field]!r} is not an integer: write a number such as 2"
            ) from None
    return ManifestFields(**values)


def format_manifest(fields: ManifestFields) -> str:
    """Return the manifest as YAML. Raises UsageError, which names the invalid field."""
    for option, size in (
        ("--memory", fields.memory),
        ("--host-budget", fields.host_budget),
        ("--device-budget", fields.device_budget),
    ):
        check_unit(option, size)
    limits: dict[str, str | int] = {"memory": fields.memory}
    args = ["--device=cpu", "--dtype=float32"] if fields.gpus == 0 else []
    if fields.gpus:
        limits["nvidia.com/gpu"] = fields.gpus
    memory: dict[str, Any] = {"host": {"growthBudget": fields.host_budget, "window": fields.window}}
    if fields.gpus and fields.device_budget:
        memory["device"] = {"growthBudget": fields.device_budget, "window": fields.window}
    document = {
        "apiVersion": API_VERSION,
        "kind": SERVICE_KIND,
        "metadata": {"name": fields.name},
        "spec": {
            "replicas": fields.replicas,
            "model": {"uri": fields.model},
            "engine": {**({"args": args} if args else {}), "resources": {"limits": limits}},
            "memory": memory,
            "supervision": {"mode": fields.mode},
        },
    }
    try:
        InferenceService.model_validate(document)
    except ValidationError as error:
        raise UsageError("\n".join(map(format_problem, error.errors()))) from None
    return yaml_text.dump(document)
