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
from plimsoll_cli.manifest import format_field_path

Ask = Callable[[str, str], str]
"""Function that asks a person for the value of a field and returns the answer. It takes the name of
the field, as in :data:`QUESTIONS`, and its default value."""


@dataclass(frozen=True)
class Answers:
    """Fields of the new manifest. Empty fields are omitted from it."""

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


def ask_missing(options: dict[str, Any], ask: Ask) -> Answers:
    """Ask for each field that ``options`` does not set, and return all fields.

    Raises UsageError for an invalid number.
    """
    values = dict(options)
    for field in QUESTIONS:
        if values.get(field) is None:
            default = Answers.__dataclass_fields__[field].default
            shown = "" if not isinstance(default, str | int) else str(default)
            values[field] = ask(field, shown)
    for field in ("replicas", "gpus"):
        try:
            values[field] = int(values[field])
        except ValueError:
            raise UsageError(
                f"{field}: {values[field]!r} is not an integer: write a number such as 2"
            ) from None
    return Answers(**values)


def format_manifest(answers: Answers) -> str:
    """Return the manifest as YAML. Raises UsageError, which names the invalid field."""
    limits: dict[str, str | int] = {"memory": answers.memory}
    args = ["--device=cpu", "--dtype=float32"] if answers.gpus == 0 else []
    if answers.gpus:
        limits["nvidia.com/gpu"] = answers.gpus
    memory: dict[str, Any] = {
        "host": {"growthBudget": answers.host_budget, "window": answers.window}
    }
    if answers.gpus and answers.device_budget:
        memory["device"] = {"growthBudget": answers.device_budget, "window": answers.window}
    document = {
        "apiVersion": API_VERSION,
        "kind": SERVICE_KIND,
        "metadata": {"name": answers.name},
        "spec": {
            "replicas": answers.replicas,
            "model": {"uri": answers.model},
            "engine": {**({"args": args} if args else {}), "resources": {"limits": limits}},
            "memory": memory,
            "supervision": {"mode": answers.mode},
        },
    }
    try:
        InferenceService.model_validate(document)
    except ValidationError as error:
        lines = [f"{format_field_path(one['loc'])}: {one['msg']}" for one in error.errors()]
        raise UsageError("\n".join(lines)) from None
    return yaml_text.dump(document)
