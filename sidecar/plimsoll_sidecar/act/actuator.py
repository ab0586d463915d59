"""Carries out the governor's commands, one at a time, in a thread of its own.

Sampling goes on meanwhile. Every command comes back with a result within a bound; a command that
is sent a second time after a restart of the supervisor does no harm (see the adapter).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from plimsoll_api.supervision import RestartBudget
from plimsoll_sidecar.act import process, readiness
from plimsoll_sidecar.act.adapter import EngineAdapter, EngineError
from plimsoll_sidecar.act.endpoints import Leaving
from plimsoll_sidecar.act.slots import RENEW_S, Slots
from plimsoll_sidecar.govern.command import Command, Outcome, Result, Verb
from plimsoll_sidecar.record.kube import KubeError

log = logging.getLogger(__name__)

LEAVE_S = 30.0
"""Longest wait for endpoints to follow an unready probe: probe period and kube-proxy's sync."""
RETURN_S = 900.0
"""Longest time a pod stays unready for an engine restart when the supervisor dies meanwhile."""

Diagnose = Callable[[Command], tuple[str, ...]]


class Actuator:
    """``frontend`` tells the last known frontend process, for when it cannot be asked."""

    def __init__(
        self,
        engine: EngineAdapter,
        slots: Slots,
        endpoints: Leaving | None,
        diagnose: Diagnose,
        state_dir: Path,
        policy: RestartBudget,
        frontend: Callable[[], process.ProcessId | None],
    ) -> None:
        self._engine, self._slots, self._endpoints = engine, slots, endpoints
        self._diagnose, self._state_dir, self._frontend = diagnose, state_dir, frontend
        self.policy = policy
        self._commands: queue.Queue[Command | None] = queue.Queue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="actuator", daemon=True)
        self._renewer = threading.Thread(target=self._renew, name="slot-renewer", daemon=True)
        self._ending = threading.Event()
        self._slot_for: str | None = None

    def start(self, slot_for: str | None = None) -> None:
        """``slot_for`` is the incident that held a slot before a restart of the supervisor."""
        self._slot_for = slot_for
        self._thread.start()
        self._renewer.start()

    def stop(self) -> None:
        """Takes no more commands; the one under way is found again in the journal."""
        self._ending.set()
        self._commands.put(None)

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def results(self) -> list[Result]:
        """What has come back since the last call."""
        found = []
        while not self._results.empty():
            found.append(self._results.get_nowait())
        return found

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            self._results.put(self.execute(command))

    def _renew(self) -> None:
        """Keeps the slot while a restart takes its time: a slot that expires is taken by others."""
        while not self._ending.wait(RENEW_S / 2):
            incident = self._slot_for
            try:
                if incident is not None and not self._slots.held():
                    reason = self._slots.take(incident, self.policy)
                    if reason is not None:
                        log.warning("the restart slot was lost: %s", reason)
            except KubeError as error:
                log.warning("the restart slot could not be renewed: %s", error)

    def execute(self, command: Command) -> Result:
        """Carries out one command; never raises."""
        log.info("%s begins (%s, epoch %s)", command.verb, command.operation_id, command.epoch)
        try:
            result = self._dispatch(command)
        except (EngineError, KubeError, OSError) as error:
            result = _result(command, Outcome.FAILED, str(error))
        except Exception as error:  # a bug here must not leave the governor waiting
            log.exception("%s failed", command.verb)
            result = _result(command, Outcome.FAILED, f"{type(error).__name__}: {error}")
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
                reason = self._may_leave(command)
                reason = reason or self._slots.take(command.incident, self.policy)
                self._slot_for = command.incident if reason is None else None
                outcome = Outcome.SUCCEEDED if reason is None else Outcome.REFUSED
                return _result(command, outcome, reason or "")
            case Verb.RELEASE_SLOT:
                readiness.remove(str(self._state_dir))
                self._slot_for = None
                self._slots.release()
                return _result(command, Outcome.SUCCEEDED, "")
            case Verb.DRAIN:
                return self._with_slot(command, self._drain)
            case Verb.RESTART_WORKER:
                return self._with_slot(command, self._engine.restart_worker)
            case Verb.RESTART_ENGINE:
                return self._with_slot(command, self._restart_engine)

    def _may_leave(self, command: Command) -> str | None:
        if command.leaves and self._endpoints is not None and self._endpoints.is_last_ready():
            return "this is the last ready replica of the service"
        return None

    def _with_slot(self, command: Command, act: Callable[[Command], Result]) -> Result:
        if not self._slots.held() and self._slots.take(command.incident, self.policy) is not None:
            return _result(command, Outcome.REFUSED, "the restart slot was lost")
        self._slot_for = command.incident
        return act(command)

    def _drain(self, command: Command) -> Result:
        """Out of the endpoints first, then the running requests to their end."""
        if self._endpoints is not None:
            readiness.write(str(self._state_dir), command.deadline_s + LEAVE_S + RETURN_S)
            self._endpoints.wait_until_left(LEAVE_S)
        result = self._engine.drain(command)
        if result.outcome is Outcome.REFUSED:
            readiness.remove(str(self._state_dir))
        return result

    def _restart_engine(self, command: Command) -> Result:
        try:
            self._engine.status()
        except EngineError as silence:
            frontend = self._frontend()
            if frontend is None:
                return _result(command, Outcome.FAILED, f"no frontend process known: {silence}")
            reason = process.end(frontend)
            if reason is not None:
                return _result(command, Outcome.FAILED, reason)
            message = f"the frontend did not answer and was ended by a signal ({silence})"
            result = _result(command, Outcome.SUCCEEDED, message)
        else:
            result = self._engine.restart_engine(command)
        if result.outcome is Outcome.REFUSED and not command.stalled:
            self._engine.resume(command.epoch)
        readiness.remove(str(self._state_dir))  # from here the engine's own probe decides
        return result


def _result(command: Command, outcome: Outcome, message: str) -> Result:
    return Result(operation_id=command.operation_id, outcome=outcome, message=message)
