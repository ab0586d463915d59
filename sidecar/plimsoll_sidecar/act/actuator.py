"""Carries out the governor's commands, one at a time, in a thread of its own.

Sampling goes on meanwhile. A trim alone has a thread to itself: it may hang with the engine. Every
command comes back with a result within a bound; a command that is sent a second time after a
restart of the supervisor does no harm (see the adapter).
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
from plimsoll_sidecar.act.lease_counts import UnreadableError
from plimsoll_sidecar.act.service_exit import LEAVE_S, ServiceExit, wait_until_left
from plimsoll_sidecar.act.slots import RENEW_S, SlotLostError, Slots
from plimsoll_sidecar.act.standby import StandbyLease
from plimsoll_sidecar.background import Part, once
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.clients.kube import KubeError
from plimsoll_sidecar.govern.command import Command, Outcome, Refusal, Result, SlotWish, Verb
from plimsoll_sidecar.govern.restart_budget import ReplicaRestarts
from plimsoll_sidecar.signals.process_table import ProcessId

log = logging.getLogger(__name__)

LEASES = (KubeError, UnreadableError, SlotLostError)
"""Errors with which a slot Lease cannot be used."""
EVICTED_S = 120.0
"""Time in which an operator that is there evicts a pod which was left by its requests."""

RESUME_AGAIN_S = 5.0
"""Pause between two tries to resume an engine after a drain."""
NOBODY = SlotWish(None)
Diagnose = Callable[[Command], tuple[str, ...]]


class _Resume(NamedTuple):
    """Not a command of the governor: a drain has ended without a restart."""

    epoch: str


class Actuator:
    """``frontend`` tells the last known frontend process, for when it cannot be asked.

    ``recovers`` says that processes may be ended which an engine left to the next: the owner of
    the configuration sets it.
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
    ) -> None:
        self._engine, self._slots, self._endpoints = engine, slots, endpoints
        self._diagnose, self._folder, self._frontend = diagnose, str(state_dir), frontend
        self.standby = StandbyLease(engine)
        self.policy = policy
        self.recovers = False
        self._commands: queue.Queue[Command | _Resume | None] = queue.Queue()
        self._resuming, self._resume_at = False, 0.0
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._commander = Part("actuator", self._next_command)
        # A longer pause than this would lose the slot, even if the API server asks for one.
        self._keeper = Part("slot", self._keep_slot, LEASES, RENEW_S / 2, RENEW_S)
        self._stored: queue.SimpleQueue[ReplicaRestarts] = queue.SimpleQueue()
        self._loaded = self._adopted = False

    def start(self) -> None:
        """Begin to take commands, and to keep the slot."""
        self._commander.start()
        self._keeper.start()

    def stop(self) -> None:
        """Take no more commands; the one under way is found again in the journal."""
        self._commander.stop()
        self._commands.put(None)
        self._keeper.stop()
        self.standby.stop()

    def send(self, command: Command) -> None:
        """Queue a command that the journal already has; its result comes later, from the thread."""
        self._commands.put(command)

    def results(self) -> list[Result]:
        """Return what has come back since the last call."""
        found = []
        while not self._results.empty():
            found.append(self._results.get_nowait())
        return found

    def follow_slot(self, wish: SlotWish) -> None:
        """Take over which incident the slot is for, by the journal. Before a command is sent."""
        if wish == self._slots.wanted:
            return
        self._slots.wanted = wish
        if wish == NOBODY:
            # One that cannot be written ends by itself.
            with contextlib.suppress(OSError):
                readiness.lapse(self._folder, readiness.DRAIN)
        self._keeper.wake()

    def end_drains(self, epoch: str) -> None:
        """Resume the engine, which answers in ``epoch``, where a drain has ended. Never waits.

        For when no command is under way: a drain may be a part of it.
        """
        if self._resuming or time.monotonic() < self._resume_at:
            return
        if readiness.lapsed(self._folder) and readiness.is_ready(self._folder):
            self._resuming = True
            self._commands.put(_Resume(epoch))

    def stored(self) -> ReplicaRestarts | None:
        """Once, as soon as it is known: what is kept of this replica outside of its journal."""
        return None if self._stored.empty() else self._stored.get_nowait()

    def keep(self, known: ReplicaRestarts) -> None:
        """Keep the journal's count outside of it, too, as soon as that can be written."""
        self._adopted = True
        if known != self._slots.known:
            self._slots.known = known
            self._keeper.wake()

    def _next_command(self) -> float:
        command = self._commands.get()
        if command is None:
            return 0.0
        if isinstance(command, _Resume):
            self._resume(command.epoch)
        elif command.verb is Verb.TRIM:
            # The governor gives it up when the engine hangs, and sends what ends the engine.
            try:
                once("trim", lambda: self._answer(command))
            except RuntimeError as error:  # no thread is left for it
                self._results.put(command.result(Outcome.FAILED, str(error)))
        else:
            self._answer(command)
        return 0.0

    def _answer(self, command: Command) -> None:
        self._results.put(self.execute(command))

    def _resume(self, epoch: str) -> None:
        """Bring the engine back from a drain that has ended, unless it is drained again."""
        try:
            if readiness.is_ready(self._folder):
                self._engine.resume(epoch)
                readiness.clear(self._folder, *readiness.lapsed(self._folder))
                log.info("the engine is back in service after a drain")
        except (EngineError, OSError) as error:
            log.warning("the engine is still drained: %s", error)
        finally:
            self._resume_at, self._resuming = time.monotonic() + RESUME_AGAIN_S, False

    def _keep_slot(self) -> float:
        """Keep the slot while a restart takes its time, and the count of restarts beside it.

        A step that fails does not hold up the others; the first error is raised after all of them.
        """
        failed: Exception | None = None
        for step in (self._renew_slot, self._load_stored, self._keep, self._sweep):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - it is raised below
                failed = failed or error
        if failed is not None:
            raise failed
        return RENEW_S / 2

    def _load_stored(self) -> None:
        if not self._loaded:
            self._stored.put(self._slots.stored())
            self._loaded = True

    def _keep(self) -> None:
        """Not before the journal has joined what was kept: it may be a new one."""
        if self._adopted:
            self._slots.keep(self.policy)

    def _renew_slot(self) -> None:
        self._slots.follow(self.policy)

    def _sweep(self) -> None:
        """End processes that an engine left beside the one that followed it."""
        if self.recovers and (summary := self._engine.sweep()):
            log.warning("processes of an engine that ended: %s", summary)

    def execute(self, command: Command) -> Result:
        """Carries out one command; never raises."""
        log.info("%s begins (%s, epoch %s)", command.verb, command.operation_id, command.epoch)
        try:
            result = self._dispatch(command)
        except (EngineError, KubeError, UnreadableError, OSError) as error:
            result = command.result(Outcome.FAILED, str(error))
        except Exception as error:  # a bug here must not leave the governor waiting
            log.exception("%s failed", command.verb)
            result = command.result(Outcome.FAILED, f"{type(error).__name__}: {error}")
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
                refusal = self._take_slot(command)
                if refusal is None:
                    return command.result(Outcome.SUCCEEDED)
                return Result(
                    operation_id=command.operation_id,
                    outcome=Outcome.REFUSED,
                    message=refusal.message,
                    waits=refusal.reason,
                )
            case Verb.LEAVE:
                return self._with_slot(command, self._leave)
            case Verb.DRAIN:
                return self._with_slot(command, self._drain)
            case Verb.RESTART_WORKER:
                return self._with_slot(command, self._engine.restart_worker)
            case Verb.RESTART_ENGINE:
                return self._with_slot(command, self._restart_engine)

    def _take_slot(self, command: Command) -> Refusal | None:
        """Why no slot was taken; None when one is held."""

        def take() -> Refusal | None:
            if command.leaves and self._endpoints is not None and self._endpoints.is_last_ready():
                return Refusal(
                    WaitReason.LAST_READY_REPLICA, "this is the last ready replica of the service"
                )
            return self._slots.take(command.incident, self.policy, command.at)

        return _refusal(command, take)

    def _with_slot(self, command: Command, act: Callable[[Command], Result]) -> Result:
        refusal = _refusal(command, lambda: self._slots.held(command.incident, self.policy))
        if refusal is not None:
            message = f"the restart slot was lost: {refusal.message}"
            return command.result(Outcome.REFUSED, message)
        return act(command)

    def _leave(self, command: Command) -> Result:
        """Take the pod out of the endpoints before it is evicted, and let running requests end.

        If no one evicts it, it is ready again after a while.
        """
        readiness.hold(self._folder, readiness.DRAIN, command.deadline_s + LEAVE_S + EVICTED_S)
        if self._endpoints is not None:
            wait_until_left(self._endpoints)
        return self._engine.finish(command)

    def _drain(self, command: Command) -> Result:
        """Out of the endpoints first, then the running requests to their end."""
        longest_s = command.deadline_s + LEAVE_S + readiness.RETURN_S
        readiness.hold(self._folder, readiness.DRAIN, longest_s)
        if self._endpoints is not None:
            wait_until_left(self._endpoints)
        result = self._engine.drain(command)
        if result.outcome is Outcome.REFUSED:
            readiness.clear(self._folder, readiness.DRAIN)
        return result

    def _restart_engine(self, command: Command) -> Result:
        return readiness.while_ending(self._folder, lambda: self._end_engine(command))

    def _end_engine(self, command: Command) -> Result:
        try:
            self._engine.status()
        except EngineError as silence:
            frontend = self._frontend()
            if frontend is None and not self._engine.processes():
                return command.result(Outcome.FAILED, f"no frontend process is known: {silence}")
            ending = self._engine.end(frontend)
            if ending.trouble is not None:
                return command.result(Outcome.FAILED, ending.trouble)
            message = f"the engine did not answer and was stopped with signals: {ending.summary}"
            result = command.result(Outcome.SUCCEEDED, f"{message} ({silence})")
        else:
            result = self._engine.restart_engine(command)
        drained = readiness.MANUAL in readiness.holding(self._folder)
        if result.outcome is Outcome.REFUSED and not command.stalled and not drained:
            with contextlib.suppress(EngineError):  # it is tried again: the drain has lapsed
                self._engine.resume(command.epoch)
        return result


def _refusal(command: Command, ask: Callable[[], Refusal | None]) -> Refusal | None:
    """Return what ``ask`` says of the slot, also where the Leases cannot be used now."""
    try:
        return ask()
    except UnreadableError as error:
        return Refusal(WaitReason.COUNT_UNREADABLE, str(error))
    except KubeError as error:
        if not error.transient:
            raise
        # What such an error says differs from try to try: ports, addresses of objects.
        log.warning("%s: %s", command.verb, error)
        return Refusal(WaitReason.API_SERVER_UNREACHABLE, "the API server does not answer")
