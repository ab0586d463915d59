"""Execute the governor's commands, one at a time, in a thread of its own.

The supervisor continues to take samples meanwhile. A trim runs in a further thread, because it can
hang together with the engine. Each command returns a result within a bounded time. After a restart
of the supervisor, a command may safely be sent again (see the adapter).
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
from plimsoll_sidecar.act.pod_services import LEAVE_TIMEOUT_S, ServiceExit, wait_until_left
from plimsoll_sidecar.act.slots import RENEW_S, SlotLostError, Slots
from plimsoll_sidecar.act.standby import StandbyLease
from plimsoll_sidecar.background import BackgroundThread, run_in_thread
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.clients.kube import KubeError
from plimsoll_sidecar.govern.command import Command, Outcome, Refusal, Result, SlotRequest, Verb
from plimsoll_sidecar.govern.restart_budget import ReplicaRestarts
from plimsoll_sidecar.govern.state import PARTNER_TEST_S
from plimsoll_sidecar.signals.process_table import ProcessId

log = logging.getLogger(__name__)

SLOT_LEASE_ERRORS = (KubeError, UnreadableCountError, SlotLostError)
"""Errors that make a slot Lease unusable."""
EVICTION_S = 120.0
"""Seconds within which the operator evicts a pod that has left its Services."""

RESUME_RETRY_S = 5.0
"""Seconds between two attempts to resume an engine after a drain."""
NO_SLOT_REQUEST = SlotRequest(None)
Diagnose = Callable[[Command], tuple[str, ...]]


class _ResumeRequest(NamedTuple):
    """Queued request to resume the engine after a drain that ended without a restart."""

    epoch: str


class Actuator:
    """Execute commands, and hold the restart slot.

    ``frontend`` returns the last known main process, which is ended if the engine does not answer.
    ``may_end_leftovers`` allows the actuator to end processes that an earlier engine left behind;
    the owner of the configuration sets it. ``partner`` represents the engines with which this
    engine exchanges KV blocks.
    """

    def __init__(
        self,
        engine: EngineAdapter,
        slots: Slots,
        endpoints: ServiceExit | None,
        diagnose: Diagnose,
        state_dir: Path,
        policy: RestartBudget,
        frontend: Callable[[], ProcessId | None],
        partner: Partners | None = None,
    ) -> None:
        self._partner = partner
        self._engine, self._slots, self._endpoints = engine, slots, endpoints
        self._diagnose, self._folder, self._frontend = diagnose, str(state_dir), frontend
        self.standby = StandbyLease(engine)
        self.policy = policy
        self.may_end_leftovers = False
        self._commands: queue.Queue[Command | _ResumeRequest | None] = queue.Queue()
        self._resuming, self._resume_at = False, 0.0
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._command_loop = BackgroundThread("actuator", self._run_next_command)
        # A longer pause would lose the slot, even if the API server asks for one.
        self._slot_loop = BackgroundThread(
            "slot", self._maintain_slot, SLOT_LEASE_ERRORS, RENEW_S / 2, RENEW_S
        )
        self._stored: queue.SimpleQueue[ReplicaRestarts] = queue.SimpleQueue()
        self._has_loaded = self._is_merged = False

    @property
    def meets_partner(self) -> bool:
        """Whether a restarted engine can be tested together with its partners."""
        return self._partner is not None and self._engine.can_meet_partner

    @property
    def restart_blocker(self) -> str | None:
        """Reason not to restart this engine without its partners; None if there is none."""
        return self._engine.restart_blocker

    def start(self) -> None:
        """Start the threads that execute commands and hold the slot."""
        self._command_loop.start()
        self._slot_loop.start()

    def stop(self) -> None:
        """Stop after the current command. The journal keeps a command that is not finished."""
        self._command_loop.stop()
        self._commands.put(None)
        self._slot_loop.stop()
        self.standby.stop()

    def queue_command(self, command: Command) -> None:
        """Queue a command that the journal has recorded.

        :meth:`take_results` returns its result later.
        """
        self._commands.put(command)

    def take_results(self) -> list[Result]:
        """Return the results that have arrived since the last call."""
        found = []
        while not self._results.empty():
            found.append(self._results.get_nowait())
        return found

    def set_slot_request(self, request: SlotRequest) -> None:
        """Set which incident needs a slot, according to the journal.

        Call this before sending the command that takes the slot.
        """
        if request == self._slots.slot_request:
            return
        self._slots.slot_request = request
        if request == NO_SLOT_REQUEST:
            # If the file cannot be written, the drain ends at its deadline.
            with contextlib.suppress(OSError):
                readiness.end_drain(self._folder, readiness.DRAIN)
        self._slot_loop.wake()

    def end_drains(self, epoch: str) -> None:
        """Resume the engine in ``epoch`` if a drain has ended, without blocking.

        Call this only while no command is running, because a drain can be part of a command.
        """
        if self._resuming or time.monotonic() < self._resume_at:
            return
        if readiness.list_ended_drains(self._folder) and readiness.is_ready(self._folder):
            self._resuming = True
            self._commands.put(_ResumeRequest(epoch))

    def take_stored_restarts(self) -> ReplicaRestarts | None:
        """Return the restarts of this replica that are stored outside its journal.

        The restarts are returned once, after they were read; None before and afterwards.
        """
        return None if self._stored.empty() else self._stored.get_nowait()

    def store_restarts(self, restarts: ReplicaRestarts) -> None:
        """Start to store the journal's restart counts outside the journal as well.

        Does not block.
        """
        self._is_merged = True
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
            except RuntimeError as error:  # no thread could be started
                self._results.put(command.make_result(Outcome.FAILED, str(error)))
        else:
            self._execute_and_report(command)
        return 0.0

    def _execute_and_report(self, command: Command) -> None:
        self._results.put(self.execute(command))

    def _resume(self, epoch: str) -> None:
        """Resume the engine after a drain, unless another reason keeps the pod unready."""
        try:
            if readiness.is_ready(self._folder):
                self._engine.resume(epoch)
                readiness.clear_reasons(self._folder, *readiness.list_ended_drains(self._folder))
                log.info("resumed the engine after a drain")
        except (EngineError, OSError) as error:
            log.warning("cannot resume the engine after a drain: %s", error)
        finally:
            self._resume_at, self._resuming = time.monotonic() + RESUME_RETRY_S, False

    def _maintain_slot(self) -> float:
        """Renew the slot, and store the restart count.

        If a step fails, the others still run; the first error is raised afterwards.
        """
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
        return RENEW_S / 2

    def _load_stored_restarts(self) -> None:
        if not self._has_loaded:
            self._stored.put(self._slots.read_stored_restarts())
            self._has_loaded = True

    def _store_restarts(self) -> None:
        """Store the restart count after the journal has been merged with the stored count."""
        if self._is_merged:
            self._slots.store_restarts(self.policy)

    def _renew_slot(self) -> None:
        self._slots.reconcile(self.policy)

    def _end_leftover_processes(self) -> None:
        """End processes of an earlier engine that are still running next to the current one."""
        if self.may_end_leftovers and (summary := self._engine.sweep()):
            log.warning("ended processes of an earlier engine: %s", summary)

    def execute(self, command: Command) -> Result:
        """Execute one command; never raises."""
        log.info("%s started (%s, epoch %s)", command.verb, command.operation_id, command.epoch)
        try:
            result = self._dispatch(command)
        except (EngineError, KubeError, UnreadableCountError, OSError) as error:
            result = command.make_result(Outcome.FAILED, str(error))
        except Exception as error:  # a bug here must not leave the governor waiting
            log.exception("%s failed", command.verb)
            result = command.make_result(Outcome.FAILED, f"{type(error).__name__}: {error}")
        log.info("%s: %s %s", command.verb, result.outcome, result.message)
        return result

    def _dispatch(self, command: Command) -> Result:
        match command.verb:
            case Verb.DIAGNOSE:
                return Result(
                    operation_id=command.operation_id,
                    outcome=Outcome.SUCCEEDED,
                    diagnostics=self._diagnose(command),
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
                return self._meet_partner(command)

    def _acquire_slot(self, command: Command) -> Refusal | None:
        """Acquire a restart slot. Return None, or the reason why no slot was acquired."""

        def acquire() -> Refusal | None:
            endpoints = self._endpoints
            if command.leaves and endpoints and endpoints.is_last_ready(command.planned):
                return Refusal(
                    WaitReason.LAST_READY_REPLICA, "this is the last ready replica of the service"
                )
            return self._slots.acquire(command.incident, self.policy, command.at)

        return _catch_slot_errors(command, acquire)

    def _run_with_slot(self, command: Command, action: Callable[[Command], Result]) -> Result:
        refusal = _catch_slot_errors(
            command, lambda: self._slots.ensure_held(command.incident, self.policy)
        )
        if refusal is not None:
            message = f"the restart slot was lost: {refusal.message}"
            return command.make_result(Outcome.REFUSED, message)
        return action(command)

    def _leave_services(self, command: Command) -> Result:
        """Remove the pod from the endpoints before its eviction, and finish the running requests.

        A pod that is not evicted becomes ready again after :data:`EVICTION_S`.
        """
        readiness.set_unready(
            self._folder, readiness.DRAIN, command.deadline_s + LEAVE_TIMEOUT_S + EVICTION_S
        )
        if self._endpoints is not None:
            wait_until_left(self._endpoints)
        return self._engine.finish(command)

    def _drain(self, command: Command) -> Result:
        """Remove the pod from the endpoints, then drain the engine."""
        longest_s = command.deadline_s + LEAVE_TIMEOUT_S + readiness.MAX_RESTART_S
        readiness.set_unready(self._folder, readiness.DRAIN, longest_s)
        if self._endpoints is not None:
            wait_until_left(self._endpoints)
        result = self._engine.drain(command)
        if result.outcome is Outcome.REFUSED:
            readiness.clear_reasons(self._folder, readiness.DRAIN)
        return result

    def _restart_engine(self, command: Command) -> Result:
        kept_s = readiness.KUBELET_LAG_S
        if command.meets_partner:
            kept_s = readiness.MAX_RESTART_S + PARTNER_TEST_S
        return readiness.end_engine_while_unready(
            self._folder, lambda: self._terminate_engine(command), kept_s
        )

    def _meet_partner(self, command: Command) -> Result:
        """Return the pod to its Services once a request passed the engine and its partners."""
        found = PartnerTestResult(
            Outcome.UNKNOWN, "the configuration names no partner for this engine any more"
        )
        try:
            if self._partner is not None:
                found = self._partner.meet()
        finally:
            if found.outcome is Outcome.SUCCEEDED or command.gives_up:
                readiness.clear_reasons(self._folder, readiness.RESTART)
            else:  # a supervisor that died during the restart did not keep the pod out
                readiness.set_unready(self._folder, readiness.RESTART, PARTNER_TEST_S)
        return command.make_result(*found)

    def _terminate_engine(self, command: Command) -> Result:
        try:
            self._engine.status()
        except EngineError as silence:
            frontend = self._frontend()
            if frontend is None and not self._engine.processes():
                return command.make_result(
                    Outcome.FAILED,
                    "the engine does not answer, and the PID of its main process is unknown: "
                    f"{silence}",
                )
            ending = self._engine.end(frontend)
            if ending.error is not None:
                return command.make_result(Outcome.FAILED, ending.error)
            message = f"the engine did not answer, so it was stopped with signals: {ending.summary}"
            result = command.make_result(Outcome.SUCCEEDED, f"{message} ({silence})")
        else:
            result = self._engine.restart_engine(command)
        drained = readiness.MANUAL in readiness.read_active_reasons(self._folder)
        if result.outcome is Outcome.REFUSED and not command.stalled and not drained:
            with contextlib.suppress(EngineError):  # retried later: the drain has ended
                self._engine.resume(command.epoch)
        return result


def _catch_slot_errors(command: Command, acquire: Callable[[], Refusal | None]) -> Refusal | None:
    """Return the result of ``acquire``, or a refusal if the Leases cannot be used now."""
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
