"""The demo's two services: the leaky one of the manifest, and the same without its fault. Pure."""

from __future__ import annotations

from pathlib import Path

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.supervision import Action, Mode
from plimsoll_cli.errors import UsageError

INJECT = "PLIMSOLL_INJECT"


def check(file: Path, service: InferenceService) -> None:
    """Raise UsageError if the manifest cannot make a demo."""
    spec = service.spec
    if not any(variable.name == INJECT for variable in spec.engine.env):
        raise UsageError(
            f"{file}: spec.engine.env: {INJECT} is missing, so nothing would leak: add it"
        )
    if spec.memory.host is None and spec.memory.device is None:
        raise UsageError(f"{file}: spec.memory: set a growthBudget for host or device")
    if spec.supervision.mode is not Mode.RECOVER:
        raise UsageError(
            f"{file}: spec.supervision.mode: set Recover, because the demo shows a restart"
        )
    if Action.WORKER_RESTART not in spec.supervision.ladder:
        raise UsageError(f"{file}: spec.supervision.ladder: add WorkerRestart")


def on_device(service: InferenceService, device: str) -> InferenceService:
    """Put the service on ``cpu`` or ``cuda``, in float32 so that texts can be compared."""
    args = [*service.spec.engine.args, f"--device={device}", "--dtype=float32"]
    return _with_engine(service, {"args": args})


def with_model(service: InferenceService, folder: Path) -> InferenceService:
    """Give the service the checkpoint in ``folder``."""
    model = service.spec.model.model_copy(update={"uri": f"file://{folder}"})
    return service.model_copy(update={"spec": service.spec.model_copy(update={"model": model})})


def without_fault(service: InferenceService) -> InferenceService:
    """Return the same service, healthy."""
    env = [variable for variable in service.spec.engine.env if variable.name != INJECT]
    return _with_engine(service, {"env": env})


def _with_engine(service: InferenceService, update: dict[str, object]) -> InferenceService:
    engine = service.spec.engine.model_copy(update=update)
    return service.model_copy(update={"spec": service.spec.model_copy(update={"engine": engine})})
