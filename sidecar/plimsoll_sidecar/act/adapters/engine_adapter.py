"""Define the operations on an engine, and create the adapter for an engine type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from plimsoll_api.admin import Diagnostic, ProcessMemory, StandbyStatus, Status
from plimsoll_api.engines import EngineType
from plimsoll_api.state import Signal
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.processes import TerminationResult
from plimsoll_sidecar.govern.command import Command, Result
from plimsoll_sidecar.signals.process_table import ProcessId


class Arrivals(NamedTuple):
    """The requests that have arrived at an engine since it started.

    Attributes:
        total: Their number, with those that are still running.
        uptime_s: The age of the engine's main process in seconds.

    """

    total: int
    uptime_s: float


class EngineAdapter(Protocol):
    """Operations on one engine, each within a bounded time.

    Operations that take a :class:`Command` return a :class:`Result` and never raise. ``Refused``
    means that nothing was started. The same command may be sent again.
    """

    @property
    def has_status_port(self) -> bool:
        """Whether the engine reports its status on a port other than the serving port."""

    @property
    def can_test_partners(self) -> bool:
        """Whether the supervisor can send a test request through this engine and its partners."""

    @property
    def restart_blocker(self) -> str | None:
        """Reason why this engine must not restart without its partners; None if it may restart."""

    def status(self) -> Status:
        """Return the engine's status. Raises :class:`EngineError` if it cannot be read."""

    def continue_epoch(self, epoch: str) -> None:
        """Use the numbers of the epochs of a previous supervisor, whose last one was ``epoch``."""

    def read_metrics_signal(self) -> Signal | None:
        """Return the signal of the metrics page; None without such a page."""

    def is_serving(self) -> bool:
        """Report whether the serving port answers, even with an error."""

    def read_arrivals(self) -> Arrivals | None:
        """Return the requests that have arrived at the engine so far; None if unknown.

        Raises :class:`EngineError` if the engine does not answer.
        """

    def trim(self, command: Command) -> Result:
        """Make the engine free cached memory, without affecting its requests."""

    def drain(self, command: Command, is_wanted: Callable[[], bool] = lambda: True) -> Result:
        """Refuse new requests, and wait at most ``command.deadline_s`` for running requests.

        If ``is_wanted`` returns False during the wait, the engine accepts requests again.
        """

    def finish_requests(self, command: Command) -> Result:
        """Wait at most ``command.deadline_s`` for running requests; new ones are accepted."""

    def resume(self, epoch: str) -> None:
        """End a drain in ``epoch`` without a restart. Raises :class:`EngineError`."""

    def lease_standby(self, epoch: str, lease_s: float) -> StandbyStatus | None:
        """Lease a standby worker for ``lease_s`` seconds, and return its status; 0 ends the lease.

        The engine must have :attr:`Capability.STANDBY`. Return None if it does not report the
        status. Raises :class:`EngineError`.
        """

    def restart_worker(self, command: Command) -> Result:
        """Replace the worker, and let the new worker continue the running requests."""

    def restart_engine(self, command: Command) -> Result:
        """End all processes of the engine, so that the kubelet restarts its container."""

    def list_processes(self) -> list[ProcessMemory]:
        """Return the engine's running processes. The main process has the role ``Frontend``."""

    def has_ended(self) -> bool:
        """Report whether the main process has ended while its helpers still run."""

    def end_leftover_processes(self) -> str:
        """End the processes of an earlier engine, and return their names as text."""

    def end_processes(self, main: ProcessId | None) -> TerminationResult:
        """End all processes of an engine that does not answer, with signals.

        ``main`` is the last known main process of the engine; None if unknown.
        """

    def read_diagnostic(self, kind: Diagnostic, command: Command) -> bytes:
        """Return a diagnostic as text. Raises :class:`EngineError` if it is not available."""

    def read_stacks(self, command: Command) -> bytes | None:
        """Return the stacks of an engine that does not answer; None if they cannot be read."""


def create_adapter(
    endpoint: EngineEndpoint, token_file: Path, is_group_serving: Callable[[], bool] | None = None
) -> EngineAdapter:
    """Return the adapter for the engine type ``endpoint.type``.

    ``is_group_serving`` reports whether the multi-node group of this worker serves; None for any
    other pod.
    """
    # The imports are here, because each adapter imports modules that the other does not need.
    if endpoint.type is EngineType.PLIMSOLL:
        from plimsoll_sidecar.act.adapters.plimsoll_engine import PlimsollEngine

        return PlimsollEngine(endpoint, token_file)
    from plimsoll_sidecar.act.adapters.external_engine import ExternalEngine

    return ExternalEngine(endpoint, is_group_serving=is_group_serving)
