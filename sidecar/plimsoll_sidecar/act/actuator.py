"""Execute the governor's commands, one at a time, in a separate thread.

Each command returns a result within a bounded time. A restarted supervisor may safely send the same
command again.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from plimsoll_api.incidents import WaitReason
from plimsoll_api.supervision import RestartBudget
from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter
from plimsoll_sidecar.act.lease_counts import UnreadableCountError
from plimsoll_sidecar.act.partner import Partners, PartnerTestResult
from plimsoll_sidecar.act.pod_services import (
    MAX_DEPARTURE_S,
    ServiceExit,
    find_reason_to_stay,
    wait_until_left,
)
from plimsoll_sidecar.act.slots import RENEW_INTERVAL_S, SlotLostError, Slots
from plimsoll_sidecar.act.standby import StandbyLease
from plimsoll_sidecar.background import BackgroundThread, run_in_thread
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.clients.kube import KubeError
from plimsoll_sidecar.govern.command import Command, Outcome, Refusal, Result, SlotRequest, Verb
from plimsoll_sidecar.govern.restart_budget import ReplicaRestarts
from plimsoll_sidecar.govern.state import PARTNER_TEST_DURATION_S
from plimsoll_sidecar.signals.process_table import ProcessId, is_running

log = logging.getLogger(__name__)

SLOT_LEASE_ERRORS = (KubeError, UnreadableCountError, SlotLostError)
"""Errors of the slot Leases after which the access is retried."""
# A pod that is not evicted within this time returns to its Services.
EVICTION_WAIT_S = 120.0

RESUME_RETRY_INTERVAL_S = 5.0
NO_SLOT_REQUEST = SlotRequest(None)
SaveDiagnostics = Callable[[Command], tuple[str, ...]]
"""Saves diagnostics for a command, and returns the names of the files."""


class _ResumeRequest(NamedTuple):
    epoch: str


class Actuator:
    """Executes commands, and holds the restart slot.

    Args:
        engine: The adapter of the engine.
        slots: The restart slots of the replica's service.
        service_exit: The removal of the pod from its Services; None for a pod without Services.
        save_diagnostics: Saves diagnostics, and returns the names of the files.
        state_dir: The directory for the reasons why the pod is not ready.
        restart_budget: The initial restart budget, which the owner may replace.
        get_main_process: Returns the engine's last known main process, which the actuator ends if
            the engine does not answer.
        partners: The engines with which this engine exchanges KV blocks; None without any.

    """

    def __init__(
        self,
        engine: EngineAdapter,
        slots: Slots,
        service_exit: ServiceExit | None,
        save_diagnostics: SaveDiagnostics,
        state_dir: Path,
        restart_budget: RestartBudget,
        get_main_process: Callable[[], ProcessId | None],
        partners: Partners | None = None,
    ) -> None:
        self._engine, self._slots, self._service_exit = engine, slots, service_exit
        self._save_diagnostics, self._state_dir = save_diagnostics, str(state_dir)
        self._get_main_process, self._partners = get_main_process, partners
        self.standby = StandbyLease(engine)
        self.restart_budget = restart_budget
        self.may_end_leftovers = False
        self._commands: queue.Queue[Command | _ResumeRequest | None] = queue.Queue()
        self._resuming, self._resume_at = False, 0.0
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._command_loop = BackgroundThread("actuator", self._run_next_command)
        # After a longer pause, the slot would be lost. The API server can ask for a longer one.
        self._slot_loop = BackgroundThread(
            "slot", self._maintain_slot, SLOT_LEASE_ERRORS, RENEW_INTERVAL_S / 2, RENEW_INTERVAL_S
        )
        self._stored_restarts: queue.SimpleQueue[ReplicaRestarts] = queue.SimpleQueue()
        self._has_loaded_restarts = self._has_merged_restarts = False

    @property
    def can_test_partners(self) -> bool:
        """Whether a restarted engine can be tested with its partners."""
        return self._partners is not None and self._engine.can_test_partners

    @property
    def restart_blocker(self) -> str | None:
        """Reason why this engine must not restart without its partners; None if it may restart."""
        return self._engine.restart_blocker

    def continue_epoch(self, epoch: str | None) -> None:
        """Let the engine's epochs continue from ``epoch`` in the journal; None without one."""
        if epoch is not None:
            self._engine.continue_epoch(epoch)

    def start(self) -> None:
        """Start the threads that execute commands and hold the slot."""
        self._command_loop.start()
        self._slot_loop.start()

    def stop(self) -> None:
        """Stop the threads after the current command."""
        self._command_loop.stop()
        self._commands.put(None)
        self._slot_loop.stop()
        self.standby.stop()

    def queue_command(self, command: Command) -> None:
        """Queue a command whose result :meth:`take_results` returns later."""
        self._commands.put(command)

    def take_results(self) -> list[Result]:
        """Return the results that have arrived since the last call."""
        found = []
        while not self._results.empty():
            found.append(self._results.get_nowait())
        return found

    def set_slot_request(self, request: SlotRequest) -> None:
        """Set the slot request of the journal. An empty request also ends the drain.

        Call this before queueing the command that takes the slot.
        """
        if request == self._slots.slot_request:
            return
        self._slots.slot_request = request
        if request == NO_SLOT_REQUEST:
            # If the file cannot be written, the drain ends at its deadline.
            with contextlib.suppress(OSError):
                readiness.end_drain(self._state_dir, readiness.DRAIN)
        self._slot_loop.wake()

    def resume_after_drains(self, epoch: str) -> None:
        """Queue a request to resume the engine in ``epoch`` if a drain has ended.

        Call this only while no command is running, because the drain may be part of a command.
        """
        if self._resuming or time.monotonic() < self._resume_at:
            return
        if readiness.list_ended_drains(self._state_dir) and readiness.is_ready(self._state_dir):
            self._resuming = True
            self._commands.put(_ResumeRequest(epoch))

    def take_stored_restarts(self) -> ReplicaRestarts | None:
        """Return this replica's restarts from the Lease once; None before, and in later calls."""
        return None if self._stored_restarts.empty() else self._stored_restarts.get_nowait()

    def store_restarts(self, restarts: ReplicaRestarts) -> None:
        """Request that the slot loop stores ``restarts`` on the Lease.

        Call this after the journal has stored the result of :meth:`take_stored_restarts`.
        """
        self._has_merged_restarts = True
        if restarts != self._slots.known_restarts:
            self._slots.known_restarts = restarts
            self._slot_loop.wake()

    def _run_next_command(self) -> float:
        command = self._commands.get()
        if command is None:
            return 0.0
        if isinstance(command, _ResumeRequest):
            self._resume(command.epoch)
        elif command.verb is Verb.TRIM:
            # If the engine hangs, the governor gives up on the trim and sends a restart.
            try:
                run_in_thread("trim", lambda: self._execute_and_report(command))
            except RuntimeError as error:  # the thread could not be started
                self._results.put(command.make_result(Outcome.FAILED, str(error)))
        else:
            self._execute_and_report(command)
        return 0.0

    def _execute_and_report(self, command: Command) -> None:
        self._results.put(self.execute(command))

    def _resume(self, epoch: str) -> None:
        try:
            if readiness.is_ready(self._state_dir):
                self._engine.resume(epoch)
                readiness.clear_reasons(
                    self._state_dir, *readiness.list_ended_drains(self._state_dir)
                )
                log.info("resumed the engine after a drain")
        except (EngineError, OSError) as error:
            log.warning("cannot resume the engine after a drain: %s", error)
        finally:
            self._resume_at, self._resuming = time.monotonic() + RESUME_RETRY_INTERVAL_S, False

    def _maintain_slot(self) -> float:
        # A failed step does not prevent the next steps; the first error is raised at the end.
        failed: Exception | None = None
        for step in (
            self._renew_slot,
            self._load_stored_restarts,
            self._store_restarts,
            self._end_leftover_processes,
        ):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - it is raised below
                failed = failed or error
        if failed is not None:
            raise failed
        return RENEW_INTERVAL_S / 2

    def _load_stored_restarts(self) -> None:
        if not self._has_loaded_restarts:
            self._stored_restarts.put(self._slots.read_stored_restarts())
            self._has_loaded_restarts = True

    def _store_restarts(self) -> None:
        if self._has_merged_restarts:
            self._slots.store_restarts(self.restart_budget)

    def _renew_slot(self) -> None:
        self._slots.reconcile(self.restart_budget)

    def _end_leftover_processes(self) -> None:
        if self.may_end_leftovers and (summary := self._engine.end_leftover_processes()):
            log.warning("ended the processes that an earlier engine left behind: %s", summary)

    def execute(self, command: Command) -> Result:
        """Execute one command. An error becomes the outcome ``Failed``."""
        log.info(
            "started command %s as operation %s in epoch %s",
            command.verb,
            command.operation_id,
            command.epoch,
        )
        try:
            result = self._dispatch(command)
        except (EngineError, KubeError, UnreadableCountError, OSError) as error:
            result = command.make_result(Outcome.FAILED, str(error))
        except Exception as error:  # a bug here must not leave the governor waiting
            log.exception("command %s failed unexpectedly", command.verb)
            result = command.make_result(Outcome.FAILED, f"{type(error).__name__}: {error}")
        log.info(
            "command %s ended with outcome %s: %s", command.verb, result.outcome, result.message
        )
        return result

    def _dispatch(self, command: Command) -> Result:
        match command.verb:
            case Verb.DIAGNOSE:
                return Result(
                    operation_id=command.operation_id,
                    outcome=Outcome.SUCCEEDED,
                    diagnostics=self._save_diagnostics(command),
                )
            case Verb.TRIM:
                return self._engine.trim(command)
            case Verb.TAKE_SLOT:
                refusal = self._acquire_slot(command)
                if refusal is None:
                    return command.make_result(Outcome.SUCCEEDED)
                return Result(
                    operation_id=command.operation_id,
                    outcome=Outcome.REFUSED,
                    message=refusal.message,
                    waits=refusal.reason,
                )
            case Verb.LEAVE:
                return self._run_with_slot(command, self._leave_services)
            case Verb.DRAIN:
                return self._run_with_slot(command, self._drain)
            case Verb.RESTART_WORKER:
                return self._run_with_slot(command, self._engine.restart_worker)
            case Verb.RESTART_ENGINE:
                return self._run_with_slot(command, self._restart_engine)
            case Verb.MEET_PARTNER:
                return self._test_partners(command)

    def _acquire_slot(self, command: Command) -> Refusal | None:
        def acquire() -> Refusal | None:
            service_exit = self._service_exit
            if command.leaves and service_exit and service_exit.is_last_ready(command.planned):
                return Refusal(
                    WaitReason.LAST_READY_REPLICA, "no other replica of the service is ready"
                )
            return self._slots.acquire(command.incident, self.restart_budget, command.at)

        return _catch_slot_errors(command, acquire)

    def _run_with_slot(self, command: Command, action: Callable[[Command], Result]) -> Result:
        try:
            refusal = _catch_slot_errors(
                command, lambda: self._slots.ensure_held(command.incident, self.restart_budget)
            )
            message = f"the restart slot was lost: {refusal.message}" if refusal else ""
        except KubeError as error:  # a drain that failed would be followed by the restart
            message = f"the restart slot cannot be renewed: {error}"
        if message:
            return command.make_result(Outcome.REFUSED, message)
        return action(command)

    def _leave_services(self, command: Command) -> Result:
        return self._run_out_of_service(
            command, EVICTION_WAIT_S, lambda one, _: self._engine.finish_requests(one)
        )

    def _drain(self, command: Command) -> Result:
        return self._run_out_of_service(
            command, readiness.RESTART_UNREADY_TIMEOUT_S, self._engine.drain
        )

    def _run_out_of_service(
        self,
        command: Command,
        wait_s: float,
        action: Callable[[Command, Callable[[], bool]], Result],
    ) -> Result:
        longest_s = command.deadline_s + MAX_DEPARTURE_S + wait_s
        readiness.set_unready(self._state_dir, readiness.DRAIN, longest_s)
        self._wait_until_left(command)
        main = self._get_main_process()

        def is_wanted() -> bool:
            # The next engine, which may start before the deadline, must serve.
            return main is None or is_running(main)

        result = action(command, is_wanted)
        if not is_wanted():
            result = command.make_result(Outcome.REFUSED, f"the engine ended; {result.message}")
        if result.outcome is Outcome.REFUSED:
            readiness.clear_reasons(self._state_dir, readiness.DRAIN)
        return result

    def _wait_until_left(self, command: Command) -> None:
        """Wait until no request arrives, unless the engine is stalled and answers none anyway."""
        if self._service_exit is not None:
            read_arrivals = None if command.stalled else self._engine.read_arrivals
            wait_until_left(self._service_exit, read_arrivals)

    def _restart_engine(self, command: Command) -> Result:
        unready_after_s = readiness.MAX_KUBELET_LAG_S
        if command.meets_partner:
            unready_after_s = readiness.RESTART_UNREADY_TIMEOUT_S + PARTNER_TEST_DURATION_S
        return readiness.end_engine_while_unready(
            self._state_dir, lambda: self._terminate_engine(command), unready_after_s
        )

    def _test_partners(self, command: Command) -> Result:
        # With command.gives_up, the pod returns to its Services in any case.
        found = PartnerTestResult(
            Outcome.UNKNOWN,
            "the configuration no longer lists partners for this engine, so the engine was "
            "not tested",
        )
        try:
            if self._partners is not None:
                found = self._partners.send_test_requests()
        finally:
            if found.outcome is Outcome.SUCCEEDED or command.gives_up:
                readiness.clear_reasons(self._state_dir, readiness.RESTART)
            else:  # a supervisor that died during the restart left the pod ready
                readiness.set_unready(self._state_dir, readiness.RESTART, PARTNER_TEST_DURATION_S)
        return command.make_result(*found)

    def _terminate_engine(self, command: Command) -> Result:
        if command.leaves and self._service_exit is not None:
            reason = find_reason_to_stay(self._service_exit, command.planned)
            if reason is not None:
                refused = command.make_result(Outcome.REFUSED, reason)
                return self._resume_if_refused(command, refused)
        try:
            self._engine.status()
        except EngineError as silence:
            main = self._get_main_process()
            if main is None and not self._engine.list_processes():
                return command.make_result(
                    Outcome.FAILED,
                    "cannot end the engine with signals, because the PID of its main process "
                    f"is unknown; the engine does not answer: {silence}",
                )
            ending = self._engine.end_processes(main)
            if ending.error is not None:
                return command.make_result(Outcome.FAILED, ending.error)
            message = (
                "the engine did not answer, so the supervisor ended it with signals: "
                f"{ending.summary}"
            )
            result = command.make_result(Outcome.SUCCEEDED, f"{message} ({silence})")
        else:
            result = self._engine.restart_engine(command)
        return self._resume_if_refused(command, result)

    def _resume_if_refused(self, command: Command, result: Result) -> Result:
        drained = readiness.MANUAL in readiness.read_active_reasons(self._state_dir)
        if result.outcome is Outcome.REFUSED and not command.stalled and not drained:
            with contextlib.suppress(EngineError):  # retried later: the drain has ended
                self._engine.resume(command.epoch)
        return result


def _catch_slot_errors(command: Command, acquire: Callable[[], Refusal | None]) -> Refusal | None:
    try:
        return acquire()
    except UnreadableCountError as error:
        return Refusal(WaitReason.COUNT_UNREADABLE, str(error))
    except KubeError as error:
        if not error.is_transient:
            raise
        # The error's text differs each time, for example in its port.
        log.warning("%s: %s", command.verb, error)
        return Refusal(WaitReason.API_SERVER_UNREACHABLE, "the API server does not answer")
