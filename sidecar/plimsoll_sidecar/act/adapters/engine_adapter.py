"""The operations on an engine, and the adapter that executes them for each engine type.

The status of an engine lists its capabilities; the ladder skips actions that it does not support.
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
    """Operations on one engine. Each call takes a bounded time.

    Operations with a :class:`Command` return a :class:`Result` and never raise. ``Refused`` means
    that nothing was started. The same ``operation_id`` may be sent again.
    """

    @property
    def has_status_port(self) -> bool:
        """Whether the status comes from another port than the serving port."""

    def status(self) -> Status:
        """Return the engine's status; :class:`EngineError` if there is none."""

    def page_signal(self) -> Signal | None:
        """Report whether the engine's metrics page is usable; None if none is read."""

    def is_serving(self) -> bool:
        """Report whether the serving port gives any answer.

        This is a second sign of life for a frontend that does not return its status.
        """

    def trim(self, command: Command) -> Result:
        """Let the engine free cached memory. Requests continue."""

    def drain(self, command: Command, is_wanted: Callable[[], bool] = lambda: True) -> Result:
        """Refuse new requests and wait for running ones, at most ``command.deadline_s``.

        ``is_wanted`` returns whether the drain is still wanted; if not, the engine is not left
        drained.
        """

    def finish(self, command: Command) -> Result:
        """Wait for running requests, at most ``command.deadline_s``, without refusing any."""

    def resume(self, epoch: str) -> None:
        """End a drain without a restart. Raises :class:`EngineError`."""

    def standby(self, epoch: str, lease_s: float) -> StandbyStatus | None:
        """Request a standby worker for the next ``lease_s`` seconds; 0 ends the lease.

        Only for an engine with :attr:`Capability.STANDBY`. Raises :class:`EngineError`, also if the
        epoch has ended.
        """

    def restart_worker(self, command: Command) -> Result:
        """Replace only the worker; its requests are carried over."""

    def restart_engine(self, command: Command) -> Result:
        """End the whole engine, so that its container restarts."""

    def processes(self) -> list[ProcessMemory]:
        """Return the running processes of the engine, found without asking it.

        Empty if there are none or they cannot be found. The main process has the role ``Frontend``.
        """

    def has_ended(self) -> bool:
        """Report whether the main process has ended and left other processes behind.

        Also true if it ended before the supervisor first saw it.
        """

    def sweep(self) -> str:
        """End processes of an earlier engine that still run beside the current one.

        Returns a text that names the ended processes; empty if there were none.
        """

    def end(self, frontend: ProcessId | None) -> TerminationResult:
        """End all processes of an engine that does not answer, with signals.

        ``frontend`` is its last known main process.
        """

    def diagnostics(self, kind: Diagnostic, command: Command) -> bytes:
        """Return the text of one diagnostic; :class:`EngineError` if there is none."""

    def stacks(self, command: Command) -> bytes | None:
        """Return the stacks of an engine that does not answer; None if they are not readable."""


def adapter_for(
    endpoint: EngineEndpoint, token_file: Path, group_serves: Callable[[], bool] | None = None
) -> EngineAdapter:
    """Return the adapter for ``endpoint.type``; only Plimsoll's own protocol needs the token.

    ``group_serves`` is set for a worker of a multi-node group.
    """
    # Imported here, because each imports modules that the other never needs.
    if endpoint.type is EngineType.PLIMSOLL:
        from plimsoll_sidecar.act.adapters.plimsoll_engine import PlimsollEngine

        return PlimsollEngine(endpoint, token_file)
    from plimsoll_sidecar.act.adapters.external_engine import ExternalEngine

    return ExternalEngine(endpoint, group_serves=group_serves)
