"""Define the operations on an engine, and select the adapter for an engine type.

An engine's status lists its capabilities. The ladder skips actions that the engine does not
support.
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
    """Operations on one engine, each within a bounded time.

    Operations with a :class:`Command` return a :class:`Result` and never raise. The outcome
    ``Refused`` means that nothing was started. A command with the same ``operation_id`` may be sent
    again.
    """

    @property
    def has_status_port(self) -> bool:
        """Whether the status comes from a port other than the serving port."""

    @property
    def can_meet_partner(self) -> bool:
        """Whether a request can be sent through the engine and its partner.

        A partner is an engine with which this one exchanges KV blocks.
        """

    @property
    def restart_blocker(self) -> str | None:
        """Reason not to restart this engine without its partners; None if there is none."""

    def status(self) -> Status:
        """Return the engine's status. Raises :class:`EngineError` if it cannot be read."""

    def metrics_page_signal(self) -> Signal | None:
        """Return whether the metrics page is usable; None if the engine has no such page."""

    def is_serving(self) -> bool:
        """Report whether the serving port answers, even with an error.

        Any answer shows that the frontend is running, even if its status cannot be read.
        """

    def trim(self, command: Command) -> Result:
        """Make the engine free cached memory, without affecting its requests."""

    def drain(self, command: Command, is_wanted: Callable[[], bool] = lambda: True) -> Result:
        """Refuse new requests, and wait at most ``command.deadline_s`` for running ones.

        If ``is_wanted`` returns False meanwhile, the engine accepts requests again.
        """

    def finish(self, command: Command) -> Result:
        """Wait at most ``command.deadline_s`` for running requests, while accepting new ones."""

    def resume(self, epoch: str) -> None:
        """End a drain without a restart. Raises :class:`EngineError`."""

    def standby(self, epoch: str, lease_s: float) -> StandbyStatus | None:
        """Request a standby worker for the next ``lease_s`` seconds; 0 ends the lease.

        Only for an engine with :attr:`Capability.STANDBY`. Raises :class:`EngineError`, for example
        if the epoch has ended.
        """

    def restart_worker(self, command: Command) -> Result:
        """Replace the worker. The new worker continues the requests of the old one."""

    def restart_engine(self, command: Command) -> Result:
        """End the whole engine. The kubelet then restarts its container."""

    def processes(self) -> list[ProcessMemory]:
        """Return the engine's running processes, as ``/proc`` shows them.

        Empty if no process runs or can be found. The main process has the role ``Frontend``.
        """

    def has_ended(self) -> bool:
        """Report whether the main process has ended while other processes of the engine still run.

        Also true if it ended before the supervisor first saw it.
        """

    def sweep(self) -> str:
        """End processes of an earlier engine that still run beside the current one.

        Return a text that names the ended processes; empty if there were none.
        """

    def end(self, frontend: ProcessId | None) -> TerminationResult:
        """End all processes of an unresponsive engine with signals.

        ``frontend`` is the last known main process of the engine.
        """

    def diagnostics(self, kind: Diagnostic, command: Command) -> bytes:
        """Return the text of one diagnostic. Raises :class:`EngineError` if it is not available."""

    def stacks(self, command: Command) -> bytes | None:
        """Return the stacks of an unresponsive engine; None if they cannot be read."""


def create_adapter(
    endpoint: EngineEndpoint, token_file: Path, group_serves: Callable[[], bool] | None = None
) -> EngineAdapter:
    """Return the adapter for ``endpoint.type``.

    ``token_file`` holds the token of Plimsoll's own protocol; other adapters ignore it.
    ``group_serves`` is set for a worker of a multi-node group.
    """
    # Imported here, because each imports modules that the other never needs.
    if endpoint.type is EngineType.PLIMSOLL:
        from plimsoll_sidecar.act.adapters.plimsoll_engine import PlimsollEngine

        return PlimsollEngine(endpoint, token_file)
    from plimsoll_sidecar.act.adapters.external_engine import ExternalEngine

    return ExternalEngine(endpoint, group_serves=group_serves)
