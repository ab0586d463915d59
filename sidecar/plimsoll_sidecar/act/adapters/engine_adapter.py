"""The verbs for every kind of engine, and the adapter that carries them out.

The capabilities in an engine's status lack what it cannot do, and the ladder skips that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from plimsoll_api.admin import Diagnostic, ProcessMemory, StandbyStatus, Status
from plimsoll_api.engines import EngineType
from plimsoll_api.state import Signal
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.processes import TerminationResult
from plimsoll_sidecar.govern.command import Command, Result
from plimsoll_sidecar.signals.process_table import ProcessId


class EngineAdapter(Protocol):
    """Every call is bounded in time. The verbs return a :class:`Result` and never raise.

    ``Refused`` means that nothing was begun. The same ``operation_id`` may be sent again.
    """

    def status(self) -> Status:
        """Return the engine's account of itself; :class:`EngineError` where there is none."""

    def page_signal(self) -> Signal | None:
        """Return whether the engine's metrics page could be used; None where none is read."""

    def serves(self) -> bool:
        """Return whether the serving port answers at all, whatever it says.

        It is the second witness of a frontend that gives no status.
        """

    def trim(self, command: Command) -> Result:
        """Have the engine give cached memory back. Requests go on."""

    def drain(self, command: Command, stands: Callable[[], bool] = lambda: True) -> Result:
        """Refuse new requests and wait for those that run, at most ``command.deadline_s``.

        ``stands`` says whether the drain is still wanted: nothing is left drained if not.
        """

    def finish(self, command: Command) -> Result:
        """Wait for the requests that run, at most ``command.deadline_s``, and refuse none."""

    def resume(self, epoch: str) -> None:
        """End a drain that led to nothing; :class:`EngineError` where it cannot."""

    def standby(self, epoch: str, lease_s: float) -> StandbyStatus | None:
        """Have a worker prepared for the next restart for so long, with 0 none any more.

        Only for an engine with :attr:`Capability.STANDBY`. Raises :class:`EngineError`, also when
        the epoch is over.
        """

    def restart_worker(self, command: Command) -> Result:
        """Replace the worker alone; its requests are carried over."""

    def restart_engine(self, command: Command) -> Result:
        """End the whole engine, so that its container restarts."""

    def processes(self) -> list[ProcessMemory]:
        """Return the engine's living processes, found without its answer.

        Empty where there is none, or none can be found. The process that the others end with is
        called the frontend.
        """

    def has_ended(self) -> bool:
        """Return whether the main process has ended and left the others.

        Also where it did so before anybody saw it.
        """

    def sweep(self) -> str:
        """End processes of an engine that has ended, beside the one that followed it.

        Says what was ended, empty where nothing was.
        """

    def end(self, frontend: ProcessId | None) -> TerminationResult:
        """End all of the engine's processes by signals, for an engine that does not answer.

        ``frontend`` is the main process that was known last.
        """

    def diagnostics(self, kind: Diagnostic, command: Command) -> bytes:
        """Return the text of one diagnostic; :class:`EngineError` where there is none."""

    def stacks(self, command: Command) -> bytes | None:
        """Stacks of an engine that gives no status; None where nobody can have them from here."""


def adapter_for(
    endpoint: EngineEndpoint, token_file: Path, group_serves: Callable[[], bool] | None = None
) -> EngineAdapter:
    """Return the adapter of ``endpoint.type``; only our own protocol needs the token.

    ``group_serves`` is there for the worker of a multi-node group.
    """
    # Imported here: each imports modules that the other kind of replica never needs.
    if endpoint.type is EngineType.PLIMSOLL:
        from plimsoll_sidecar.act.adapters.plimsoll_engine import PlimsollEngine

        return PlimsollEngine(endpoint, token_file)
    from plimsoll_sidecar.act.adapters.external_engine import ExternalEngine

    return ExternalEngine(endpoint, group_serves=group_serves)
