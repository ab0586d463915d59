"""Hooks of the worker's loop for fault injection."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_engine import injection
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.messages.worker_ipc import ToWorker


class WorkerHooks:
    """Callbacks of the worker's loop, which do nothing by default."""

    names: Sequence[str] = ()  # of the injected faults

    def after_step(self, num_finished: int) -> None:
        """Run after a step in which ``num_finished`` requests ended."""

    def tick(self) -> None:
        """Run before each report, even if the worker is idle."""

    def should_drop(self, message: ToWorker) -> bool:
        """Report whether to drop ``message`` instead of handling it."""
        return False


def create_worker_hooks(text: str, epoch: int, engine: EngineCore) -> WorkerHooks:
    """Return the hooks for the faults in ``text`` that apply to the worker of ``epoch``.

    ``text`` is the value of ``PLIMSOLL_INJECT``. Raises SettingsError for an unsupported fault.
    """
    hooks: WorkerHooks = (
        injection.load_entry_point("worker")(text, epoch, engine) if text else WorkerHooks()
    )
    return hooks
