"""Where a package of faults may change the worker. Without one nothing changes."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_engine import injection
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages.worker_ipc import ToWorker


class WorkerHooks:
    """Called by the worker's loop. ``names`` are those of the faults."""

    names: Sequence[str] = ()

    def after_step(self, finished: int) -> None:
        """``finished`` requests ended in the step."""

    def tick(self) -> None:
        """Do what is due before each report, also while idle."""

    def lose(self, message: ToWorker) -> bool:
        """Return whether the engine never hears of ``message``."""
        return False


def worker_hooks(text: str, epoch: int, engine: EngineCore, ledger: Ledger) -> WorkerHooks:
    """Return the hooks of the faults in ``text`` that the worker of ``epoch`` has.

    ``text`` is the value of ``PLIMSOLL_INJECT``. Raises SettingsError for one that this engine
    cannot have.
    """
    hooks: WorkerHooks = (
        injection.load("worker")(text, epoch, engine, ledger) if text else WorkerHooks()
    )
    return hooks
