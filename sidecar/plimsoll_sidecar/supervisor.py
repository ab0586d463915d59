"""The loop: sample, assess, govern, write down, act, show.

One thread samples and decides; the actuator, the publisher and the web server have their own.
Whatever is sent to the engine was written to the journal before, so that a supervisor that is
killed at any instruction goes on where it stood: the command under way is sent again with the same
operation id, and the engine's epoch says whether it had happened.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from plimsoll_api.admin import Capability, Role, Status
from plimsoll_api.assessment import Assessment
from plimsoll_api.names import POLICY_KIND, RESET_FILE
from plimsoll_api.supervision import Mode
from plimsoll_api.supervisor_config import ServiceRef, SupervisorConfig
from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.act.actuator import Actuator
from plimsoll_sidecar.act.sweep import SharedMemorySweep
from plimsoll_sidecar.clock import SteadyClock
from plimsoll_sidecar.config import ConfigFile
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.detect.fleet import LEAKS, MINE, joined, weighed
from plimsoll_sidecar.govern.command import (
    EngineProcess,
    EngineView,
    Outcome,
    Result,
    Turn,
)
from plimsoll_sidecar.govern.governor import Governor
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.restart_budget import NONE
from plimsoll_sidecar.govern.state import GovernorState, shift
from plimsoll_sidecar.manual import Inbox
from plimsoll_sidecar.record.keeper import Keeper
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.record.publisher import Publisher
from plimsoll_sidecar.record.storage import LastKnownEngine
from plimsoll_sidecar.signals.other_pods import GroupMembers, PeersFile
from plimsoll_sidecar.signals.process_table import ProcessId, identify
from plimsoll_sidecar.signals.sampler import Sampler, SignalLog
from plimsoll_sidecar.view import Seen, Shown, log_event

log = logging.getLogger(__name__)

CONFIG_CHECK_S = 2.0


class Supervisor:
    """One supervisor of one engine.

    ``new_detector`` makes a detector for a configuration, at the start and after a change.
    ``group`` is there for the leader of a multi-node group, ``peers`` where an operator publishes
    the other replicas' growth.
    """

    def __init__(
        self,
        config: ConfigFile,
        source: Sampler,
        new_detector: Callable[[SupervisorConfig], Detector],
        new_actuator: Callable[[Callable[[], ProcessId | None]], Actuator],
        publisher: Publisher | None,
        metrics: Metrics,
        state_dir: Path,
        replica: str,
        group: GroupMembers | None = None,
        peers: PeersFile | None = None,
    ) -> None:
        self._group, self._peers, self._replica = group, peers, replica
        self._config, self._source, self._metrics = config, source, metrics
        self._new_detector, self._publisher, self._state_dir = new_detector, publisher, state_dir
        self._detector = new_detector(config.current)
        self._unsent: list[Result] = []
        self._config_at = 0.0
        self._keeper = Keeper(state_dir, publisher, metrics, self._leader_publishes)
        state = self._keeper.open()
        self._clock = SteadyClock(self._keeper.clock)
        self._inherited: LastKnownEngine | None = self._keeper.engine
        self._governor = Governor(config.current.supervision, config.current.memory, state, replica)
        self._actuator = new_actuator(self._frontend)
        self._sweep = SharedMemorySweep.for_this_pod()
        self._by_hand, self._adopted = Inbox(state_dir), False
        self._actuator.may_sweep = config.current.supervision.mode is Mode.RECOVER
        self._signal_log = SignalLog()
        self.shown = Shown(metrics)
        metrics.budgets(config.current.memory)

    @property
    def service(self) -> ServiceRef:
        """The service of the configuration that is in use now."""
        return self._config.current.service

    def unseen(self) -> dict[str, str]:
        """Return why each signal is missing that the newest sample did not have."""
        signals = self._source.signals
        return {n: f"{one.reason}: {one.message}" for n, one in signals.items() if not one.ok}

    def run(self, stopped: Callable[[float], bool]) -> None:
        """Until ``stopped``, which waits the seconds it is given, says that it is time to end."""
        _set_log_level(self._config.current)
        self._follow_slot()
        self._actuator.start()
        if self._publisher is not None:
            self._publisher.start()
        if self._group is not None:
            self._group.start()
        self._keeper.publish()
        pending = self._governor.state.pending
        if pending is not None and self._keeper.hold is None and not self._config.missing:
            # Also if the mode is Observe by now: what has begun is finished, or the engine
            # would stay drained.
            log.info("the supervisor ended during %s: sending it again", pending.verb)
            self._actuator.send(pending)
        due = time.monotonic()
        while not stopped(max(0.0, due - time.monotonic())):
            due = max(due + self._config.current.sample_interval_s, time.monotonic())
            if not self._follow_config():
                break
            self.tick(self._now())
        self._actuator.stop()
        if self._group is not None:
            self._group.stop()
        if self._publisher is not None:
            self._publisher.stop(timeout_s=2.0)
        self._keeper.close()

    def _now(self) -> float:
        """Follow a wall clock that was set, while no incident waits; return the time.

        All times that are kept move along.
        """
        step = 0.0 if self._governor.state.incidents else self._clock.follow()
        if step:
            log.warning("the wall clock changed by %+.0f s", step)
            shift(self._governor.state, step)
        return self._clock.now()

    def tick(self, now: float) -> None:
        """One sample and everything that follows from it."""
        seen = self._sense(now)
        self._adopt_count()
        self._reset_if_asked()
        results, self._unsent = [*self._unsent, *self._actuator.results()], []
        learned = self._checkpoint(seen.status)
        turn = self._governor.advance(
            self._of_group(seen.assessment), seen.engine, now, results, self._keeper.hold,
            self._by_hand.read(), own=seen.assessment,
        )  # fmt: skip
        for event in turn.events:
            self._keeper.unwritten[event.incident.name] = event.incident
            log_event(event)
        self._follow_slot()
        if turn.changed or learned or self._keeper.unwritten or self._keeper.hold is not None:
            self._write_and_send(turn)
        if seen.engine.epoch is not None:  # of one that does not answer, the lease ends by itself
            wanted = self._keeper.hold is None and self._governor.wants_standby(seen.engine)
            self._actuator.standby.set_wanted(seen.engine.epoch, wanted)
            if self._governor.state.pending is None or self._config.missing:
                self._actuator.end_drains(seen.engine.epoch)
        self._keeper.acknowledge()
        self.shown.show(seen, turn.events, self._config, self._governor, self._keeper)

    def _sense(self, now: float) -> Seen:
        """Take a sample and judge it."""
        begin = time.monotonic()
        sample = self._source.sample()
        status = self._source.status
        self._remember_frontend(status)
        if self._sweep is not None:
            policy = self._config.current.supervision
            requested = policy.sweep_shared_memory and policy.mode is Mode.RECOVER
            self._metrics.swept(self._sweep.update(self._frontend(), requested))
        assessment = self._detector.update(sample)
        if self._peers is not None:
            assessment = weighed(assessment, self._replica, self._peers.peers())
        log.debug("%s", assessment)
        if self._inherited is not None and status is not None:
            if status.epoch == self._inherited.epoch:
                self._detector.resume(self._inherited.checkpoint)
            self._inherited = None
        signals = self._source.signals
        self._signal_log.update(signals)
        known = {name: one.ok for name, one in signals.items()}
        self._metrics.observe(assessment, known, time.monotonic() - begin)
        self._metrics.missing(signals)
        self._metrics.open_files(sample.host.open_files)
        out_of_service = readiness.active_reasons(str(self._state_dir))
        self._metrics.out_of_service(out_of_service)
        engine = EngineView(
            epoch=status.epoch if status else None,
            state=status.state if status else None,
            capabilities=frozenset(Capability(c) for c in self._keeper.engine.capabilities),
            replaceable=self._publisher is not None,
            abrupt=self.service.kind == POLICY_KIND,
            manually_drained=readiness.MANUAL in out_of_service,
            processes=_processes(status),
        )
        return Seen(now, assessment, engine, status, out_of_service, signals)

    def _write_and_send(self, turn: Turn) -> None:
        """Write what has changed, and only then send the command."""
        written = self._write()
        if written:
            self._by_hand.forget()
        if self._adopted:
            self._actuator.store_restarts(self._governor.counted())
        if turn.command is None:
            return
        if written:
            self._actuator.send(turn.command)
        else:
            why = self._keeper.hold or "the journal is not writable"
            self._unsent.append(turn.command.result(Outcome.REFUSED, why))

    def _follow_slot(self) -> None:
        """Tell the slots which incident one is for, as last read: the journal may be read-only.

        Unknown until the journal was read.
        """
        if self._keeper.is_open:
            self._actuator.set_slot_wish(self._governor.state.slot_wish)

    def _of_group(self, own: Assessment) -> Assessment:
        """Return what the governor judges: at a group's leader, what is known of all its pods."""
        if self._group is None:
            return own
        opened = self._governor.state.incidents
        origins = {one.kind: one.attribution.pod or MINE for one in opened}
        return joined(own, self._group.assessments(), origins)

    def _leader_publishes(self, incident: Incident) -> bool:
        """Whether the leader of this worker's group publishes the incident, for the group."""
        return self.service.is_worker and incident.kind in LEAKS

    def _write(self) -> bool:
        """Write state and changed incidents; try a broken journal again every few seconds."""
        if not self._keeper.retries:
            return False
        if not self._keeper.is_open:
            self._adopt(self._keeper.open())
        return self._keeper.write(self._governor.state, self._clock.reading())

    def _adopt(self, state: GovernorState) -> None:
        """Go on with what a journal that opened late holds; incidents seen meanwhile join it."""
        if not self._keeper.is_open:
            return
        self._keeper.join(state, self._governor.state.incidents)
        counted, self._governor.state = self._governor.counted(), state
        self._governor.adopt(counted)
        self._follow_slot()
        if state.pending is not None:
            self._actuator.send(state.pending)

    # ---- the engine and the configuration

    def _remember_frontend(self, status: Status | None) -> None:
        """Keep what must be known of an engine that does not answer any more."""
        if status is None:
            return
        frontend = next((p for p in status.processes if p.role is Role.FRONTEND), None)
        known = identify(frontend.pid) if frontend else None
        self._keeper.engine = msgspec.structs.replace(
            self._keeper.engine,
            capabilities=frozenset(c.value for c in status.capabilities),
            frontend_pid=known.pid if known else None,
            frontend_started=known.started if known else None,
        )

    def _checkpoint(self, status: Status | None) -> bool:
        """Keep what the detector measures from; True when that is new."""
        if status is None or self._inherited is not None:
            return False
        before = self._keeper.engine
        self._keeper.engine = msgspec.structs.replace(
            before, epoch=status.epoch, checkpoint=self._detector.checkpoint()
        )
        return self._keeper.engine.checkpoint != before.checkpoint

    def _frontend(self) -> ProcessId | None:
        engine = self._keeper.engine
        if engine.frontend_pid is None or engine.frontend_started is None:
            return None
        return ProcessId(engine.frontend_pid, engine.frontend_started)

    def _follow_config(self) -> bool:
        """Take over a new configuration; False when it needs a new start of the supervisor."""
        if time.monotonic() < self._config_at:
            return True
        self._config_at = time.monotonic() + CONFIG_CHECK_S
        old = self._config.current
        changed = self._config.reread()
        self._metrics.config(self._config.error is None)
        if not changed:
            return True
        new = self._config.current
        if (old.service, old.engine, old.slots) != (new.service, new.engine, new.slots):
            log.info("the configuration names another engine or service: restarting")
            return False
        log.info("the configuration changed: mode %s", new.supervision.mode)
        _set_log_level(new)
        self._governor.policy, self._governor.memory = new.supervision, new.memory
        self._actuator.policy = new.supervision.restart_budget
        self._actuator.may_sweep = new.supervision.mode is Mode.RECOVER
        self._metrics.budgets(new.memory)
        if _detection(old) != _detection(new):
            self._detector = self._new_detector(new)
            self._inherited = self._keeper.engine
        return True

    def _adopt_count(self) -> None:
        """Take over the count of the slot's Lease: a lost journal gives back no restart."""
        kept = None if self._adopted else self._actuator.take_stored()
        if kept is None:
            return
        self._adopted = True
        known = len(self._governor.state.restarts)
        lacking = self._governor.adopt(kept)
        if kept != NONE:
            level = logging.WARNING if lacking else logging.INFO
            text = "restarts of this replica: %d in the journal, %d on the slot Lease; using %d"
            log.log(level, text, known, len(kept.at), known + lacking)
            self._write()
        self._actuator.store_restarts(self._governor.counted())

    def _reset_if_asked(self) -> None:
        requested = self._state_dir / RESET_FILE
        if os.path.exists(requested):  # Path.exists() raises where the volume fails
            self._governor.reset()
            self._adopted = True  # what the slot's Lease counts is reset as well
            self._actuator.store_restarts(self._governor.counted())
            if self._write():
                requested.unlink(missing_ok=True)
                log.info("the restart budget was reset")


def _processes(status: Status | None) -> tuple[EngineProcess, ...]:
    if status is None:
        return ()
    first = sorted(status.processes, key=lambda one: one.role is not Role.FRONTEND)
    return tuple(EngineProcess(one.label, one.pid) for one in first)


def _detection(config: SupervisorConfig) -> tuple[object, ...]:
    return config.memory, config.supervision.stall.timeout_s, config.sample_interval_s


def _set_log_level(config: SupervisorConfig) -> None:
    """Set the log level of everything in this process, libraries included."""
    logging.getLogger().setLevel(config.supervision.log_level.upper())
