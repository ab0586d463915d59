"""Run the main loop: sample, assess, decide, write the journal, act, and publish.

Each command is written to the journal before it is sent. If a supervisor is killed, the next one
sends the last command again with the same operation ID.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from plimsoll_api.admin import Capability, Load, Role, Status
from plimsoll_api.assessment import Assessment
from plimsoll_api.incidents import GROWTH_INCIDENT_KINDS
from plimsoll_api.names import POLICY_KIND, RESTART_BUDGET_RESET_FILE
from plimsoll_api.supervision import Mode
from plimsoll_api.supervisor_config import ServiceRef, SupervisorConfig
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.act.actuator import Actuator
from plimsoll_sidecar.act.start_gate import DeviceUse, EngineStartGate, make_device_use
from plimsoll_sidecar.act.sweep import SharedMemorySweep
from plimsoll_sidecar.clock import SteadyClock
from plimsoll_sidecar.config import ConfigFile
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.govern.auto_budget import BudgetsInForce
from plimsoll_sidecar.govern.command import (
    EngineProcess,
    EngineView,
    Outcome,
    Result,
    Turn,
)
from plimsoll_sidecar.govern.governor import Governor
from plimsoll_sidecar.govern.group import (
    LEADER_PLACEHOLDER,
    add_device_health,
    combine_group,
)
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.restart_budget import NO_RESTARTS
from plimsoll_sidecar.govern.state import GovernorState
from plimsoll_sidecar.manual import NoteInbox
from plimsoll_sidecar.record.journal_manager import JournalManager
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.record.publisher import Publisher
from plimsoll_sidecar.record.storage import LastKnownEngine
from plimsoll_sidecar.signals.other_pods import (
    GroupMembers,
    LearnedFile,
    PodDevicesFile,
)
from plimsoll_sidecar.signals.process_table import ProcessId, identify
from plimsoll_sidecar.signals.sampler import Sampler, SignalLog
from plimsoll_sidecar.view import Display, Observation, log_event

log = logging.getLogger(__name__)

CONFIG_CHECK_INTERVAL_S = 2.0


class Supervisor:
    """Supervises one engine.

    Args:
        config: The configuration file.
        source: The source of samples.
        create_detector: Creates a detector, at the start and after a change of its settings.
        create_actuator: Creates the actuator. Its argument returns the last known main process.
        publisher: The publisher of incidents; None in local mode.
        metrics: The metrics of the supervisor.
        state_dir: The directory of the journal and of other state.
        replica: The name of this replica, with which the names of its incidents begin.
        group: The other pods of the multi-node group if this pod is its leader; None otherwise.
        learned_file: The file with the growth that other replicas have learned; None without an
            operator.
        device_health_file: The file with the unhealthy devices of this pod; None without an
            operator.
        run_dir: The directory that the engine shares with the supervisor; ``state_dir`` by default.

    """

    def __init__(
        self,
        config: ConfigFile,
        source: Sampler,
        create_detector: Callable[[SupervisorConfig], Detector],
        create_actuator: Callable[[Callable[[], ProcessId | None]], Actuator],
        publisher: Publisher | None,
        metrics: Metrics,
        state_dir: Path,
        replica: str,
        group: GroupMembers | None = None,
        learned_file: LearnedFile | None = None,
        device_health_file: PodDevicesFile | None = None,
        run_dir: Path | None = None,
    ) -> None:
        self._others_learned, self._learned_shown = learned_file, False
        self._group, self._replica = group, replica
        self._device_health = device_health_file
        self._config, self._source, self._metrics = config, source, metrics
        self._create_detector, self._publisher = create_detector, publisher
        self._state_dir = state_dir
        self._unsent: list[Result] = []
        self._config_at = 0.0
        self._journal = JournalManager(state_dir, publisher, metrics, self._is_published_by_leader)
        state = self._journal.open()
        self._clock = SteadyClock(self._journal.clock)
        self._inherited: LastKnownEngine | None = self._journal.engine
        self._governor = Governor(config.current.supervision, config.current.memory, state, replica)
        self._governor.apply_budgets(self._journal.learned.resolve_budgets(config.current.memory))
        self._detector = create_detector(self._resolve_config())
        self._actuator = create_actuator(self._get_main_process)
        self._actuator.continue_epoch(state.epoch)
        self._sweep = SharedMemorySweep.create_for_this_pod()
        self._start_gate = EngineStartGate(run_dir or state_dir, self._read_device_use)
        self._inbox, self._has_merged_restarts = NoteInbox(state_dir), False
        self._actuator.may_end_leftovers = config.current.supervision.mode is Mode.RECOVER
        self._signal_log = SignalLog()
        self.display = Display(metrics)
        metrics.export_budgets(self._governor.memory)
        metrics.export_role(self.service)
        metrics.skip_counted_steps(state.incidents)

    @property
    def service(self) -> ServiceRef:
        """InferenceService or SupervisionPolicy in the current configuration."""
        return self._config.current.service

    def explain_missing_signals(self) -> dict[str, str]:
        """Return the reason for each signal that the newest sample lacks, by signal."""
        signals = self._source.signals
        return {
            n: f"{signal.reason}: {signal.message}"
            for n, signal in signals.items()
            if not signal.ok
        }

    def run(self, wait_for_stop: Callable[[float], bool]) -> None:
        """Sample and decide in a loop until ``wait_for_stop`` returns True.

        ``wait_for_stop`` waits the given seconds for the next sample. The loop also ends if a new
        configuration requires a restart of the supervisor.
        """
        _set_log_level(self._config.current)
        self._set_slot_request()
        self._actuator.start()
        if self._publisher is not None:
            self._publisher.start()
        if self._group is not None:
            self._group.start()
        self._journal.publish()
        pending = self._governor.state.pending
        if pending is not None and self._journal.hold is None and not self._config.is_missing:
            # Even in mode Observe, a command that has started must be completed. Otherwise, the
            # engine would stay drained.
            log.info(
                "sending the command %s again, because the previous supervisor ended while "
                "it was running",
                pending.verb,
            )
            self._actuator.queue_command(pending)
        due = time.monotonic()
        while not wait_for_stop(max(0.0, due - time.monotonic())):
            due = max(due + self._config.current.sample_interval_s, time.monotonic())
            if not self._reload_config():
                break
            self.tick(self._read_clock())
        self._actuator.stop()
        if self._group is not None:
            self._group.stop()
        if self._publisher is not None:
            self._publisher.stop(timeout_s=2.0)
        self._journal.write(self._governor.state, self._clock.read(), is_last=True)
        self._journal.close()

    def _read_clock(self) -> float:
        step = 0.0 if self._governor.state.incidents else self._clock.apply_step()
        if step:
            log.warning("the wall clock changed by %+.0f s", step)
            self._governor.shift_times(step)
            self._journal.learned.shift_times(step)
            self._start_gate.shift_times(step)
        return self._clock.now()

    def tick(self, now: float) -> None:
        """Sample, decide and act once. ``now`` is in Unix seconds."""
        seen = self._observe(now)
        self._merge_stored_restarts()
        self._reset_restart_budget_if_requested()
        results, self._unsent = [*self._unsent, *self._actuator.take_results()], []
        changed = self._store_checkpoint(seen.status)
        turn = self._governor.advance(
            self._assess_group(seen.assessment), seen.engine, now, results, self._journal.hold,
            self._inbox.read(), pod_assessment=seen.assessment,
        )  # fmt: skip
        for event in turn.events:
            self._journal.add_changed(event.incident)
            log_event(event)
        self._set_slot_request()
        self._learn_budgets(seen)
        changed = changed or turn.changed or self._journal.is_learned_due
        if changed or self._journal.unwritten or self._journal.hold is not None:
            self._write_and_send(turn)
        if seen.engine.epoch is not None:  # otherwise, the lease expires
            is_standby_wanted = (
                self._journal.hold is None and self._governor.should_prepare_standby(seen.engine)
            )
            self._actuator.standby.set_wanted(seen.engine.epoch, is_standby_wanted)
            if self._governor.state.pending is None or self._config.is_missing:
                self._actuator.resume_after_drains(seen.engine.epoch)
        self._journal.mark_published()
        self.display.update(seen, turn.events, self._config, self._governor, self._journal)

    def _learn_budgets(self, observation: Observation) -> None:
        memory, learned = self._config.current.memory, self._journal.learned
        if observation.engine.epoch is None or observation.status is None:
            return
        revision = f"{observation.status.model} {observation.status.version}"
        growing = self._governor.list_growing_kinds()
        learned.observe(
            observation.now, observation.engine.epoch, revision, observation.assessment, growing
        )
        if self._journal.is_learned_due or not self._learned_shown:
            self._learned_shown = True
            self._metrics.export_learned_budgets(
                learned.make_reports(memory.auto),
                learned.list_memory_needs(observation.status.ledger),
            )
        if self._governor.state.incidents:
            return
        budgets = learned.update_and_resolve_budgets(
            observation.now, memory, self._governor.budgets
        )
        if budgets is not None:
            self._apply_budgets(budgets)

    def _apply_budgets(self, budgets: BudgetsInForce) -> None:
        # The new detector continues from the baselines of the previous detector.
        before = self._governor.memory
        self._governor.apply_budgets(budgets)
        self._metrics.export_budgets(budgets.memory)
        if budgets.memory == before:
            return
        for name, budget in (("host", budgets.memory.host), ("device", budgets.memory.device)):
            if budget is not None:
                size = format_bytes(budget.growth_bytes)
                log.info("changed the leak budget of %s memory to %s", name, size)
        self._detector = self._create_detector(self._resolve_config())
        self._inherited = self._journal.engine

    def _resolve_config(self) -> SupervisorConfig:
        # The leak budgets in force replace Auto.
        return msgspec.structs.replace(self._config.current, memory=self._governor.memory)

    def _observe(self, now: float) -> Observation:
        begin = time.monotonic()
        sample = self._source.sample()
        status = self._source.status
        self._store_engine_state(status)
        if self._sweep is not None:
            policy = self._config.current.supervision
            requested = policy.sweep_shared_memory and policy.mode is Mode.RECOVER
            swept_bytes = self._sweep.remove_leftovers_after_end(
                self._get_main_process(), requested
            )
            self._metrics.count_swept_bytes(swept_bytes)
        assessment = self._detector.update(sample)
        if self._device_health is not None and assessment.suspicions:
            assessment = add_device_health(assessment, self._device_health.read())
        self._update_start_gate(assessment, status is not None, now)
        log.debug("%s", assessment)
        if self._inherited is not None and status is not None:
            if status.epoch == self._inherited.epoch:
                self._detector.resume(self._inherited.checkpoint)
            self._inherited = None
        signals = self._source.signals
        self._signal_log.update(signals)
        known_signals = {name: signal.ok for name, signal in signals.items()}
        self._metrics.observe(assessment, known_signals, time.monotonic() - begin)
        self._metrics.export_missing_signals(signals)
        self._metrics.export_open_files(sample.host.open_files)
        out_of_service = readiness.read_active_reasons(str(self._state_dir))
        self._metrics.export_unready_reasons(out_of_service)
        engine = EngineView(
            epoch=status.epoch if status else None,
            state=status.state if status else None,
            capabilities=frozenset(Capability(c) for c in self._journal.engine.capabilities),
            replaceable=self._publisher is not None,
            abrupt=self.service.kind == POLICY_KIND,
            manually_drained=readiness.MANUAL in out_of_service,
            meets_partner=self._actuator.can_test_partners,
            restart_blocker=self._actuator.restart_blocker,
            group=self.service.group.key if self.service.group is not None else "",
            recreated=self.service.group is not None and not self.service.is_in_ray_cluster,
            idle=None if status is None else _is_idle(status.load),
            processes=_list_processes(status),
        )
        return Observation(now, assessment, engine, status, out_of_service, signals)

    def _update_start_gate(
        self, assessment: Assessment, is_engine_answering: bool, now: float
    ) -> None:
        # A start that is held for too long adds a suspicion to the assessment.
        policy = self._config.current.supervision.start_gate
        suspicion = self._start_gate.handle_start_request(policy, is_engine_answering, now)
        self._metrics.count_starts(self._start_gate.permitted_starts)
        self._start_gate.permitted_starts.clear()
        if suspicion is not None:
            kinds = [suspicion.kind for suspicion in assessment.suspicions]
            assessment.suspicions += [] if suspicion.kind in kinds else [suspicion]

    def _read_device_use(self) -> list[DeviceUse] | None:
        # Unknown if other pods use the devices as well.
        if self._governor.memory.shared_device:
            return None
        device_uses = self._source.read_device_use()
        return None if device_uses is None else [make_device_use(*use) for use in device_uses]

    def _write_and_send(self, turn: Turn) -> None:
        # If the write fails, the command is not sent.
        written = self._write_journal()
        if written:
            self._inbox.delete_read_notes()
        if self._has_merged_restarts:
            self._actuator.store_restarts(self._governor.copy_restarts())
        if turn.command is None:
            return
        if written:
            self._actuator.queue_command(turn.command)
        else:
            why = self._journal.hold or "the journal cannot be written"
            self._unsent.append(turn.command.make_result(Outcome.REFUSED, why))

    def _set_slot_request(self) -> None:
        # The state in memory decides, because the journal may not be writable.
        if self._journal.is_open:
            self._actuator.set_slot_request(self._governor.state.slot_request)

    def _assess_group(self, pod_assessment: Assessment) -> Assessment:
        if self._group is None:
            return pod_assessment
        opened = self._governor.state.incidents
        origins = {
            incident.kind: incident.attribution.pod or LEADER_PLACEHOLDER for incident in opened
        }
        gone = [pod for pod in origins.values() if pod and self._group.is_gone(pod)]
        return combine_group(pod_assessment, self._group.read_assessments(), origins, gone)

    def _is_published_by_leader(self, incident: Incident) -> bool:
        return self.service.is_worker and incident.kind in GROWTH_INCIDENT_KINDS

    def _write_journal(self) -> bool:
        if not self._journal.is_due:
            return False
        if not self._journal.is_open:
            self._merge_journal(self._journal.open())
        return self._journal.write(self._governor.state, self._clock.read())

    def _merge_journal(self, state: GovernorState) -> None:
        # The journal could not be opened at the start. Incidents and restarts since then are added.
        if not self._journal.is_open:
            return
        self._metrics.skip_counted_steps(state.incidents)
        self._journal.add_unwritten(state, self._governor.state.incidents)
        self._actuator.continue_epoch(state.epoch)
        counted, self._governor.state = self._governor.copy_restarts(), state
        self._governor.merge_restarts(counted)
        self._set_slot_request()
        if state.pending is not None:
            self._actuator.queue_command(state.pending)

    # ---- the engine and the configuration

    def _store_engine_state(self, status: Status | None) -> None:
        # They are needed to restart the engine if it hangs.
        if status is None:
            return
        frontend = next((p for p in status.processes if p.role is Role.FRONTEND), None)
        main_process = identify(frontend.pid) if frontend else None
        self._journal.engine = msgspec.structs.replace(
            self._journal.engine,
            capabilities=frozenset(c.value for c in status.capabilities),
            frontend_pid=main_process.pid if main_process else None,
            frontend_started=main_process.started if main_process else None,
        )

    def _store_checkpoint(self, status: Status | None) -> bool:
        if status is None or self._inherited is not None:
            return False
        before = self._journal.engine
        self._journal.engine = msgspec.structs.replace(
            before, epoch=status.epoch, checkpoint=self._detector.make_checkpoint()
        )
        return self._journal.engine.checkpoint != before.checkpoint

    def _get_main_process(self) -> ProcessId | None:
        engine = self._journal.engine
        if engine.frontend_pid is None or engine.frontend_started is None:
            return None
        return ProcessId(engine.frontend_pid, engine.frontend_started)

    def _reload_config(self) -> bool:
        # Returns False if the supervisor must restart to apply the configuration.
        if time.monotonic() < self._config_at:
            return True
        self._config_at = time.monotonic() + CONFIG_CHECK_INTERVAL_S
        if self._others_learned is not None and self._journal.learned.is_missing_budget(
            self._config.current.memory
        ):
            self._journal.learned.inherit(self._others_learned.read(self.service.workload))
        old = self._config.current
        changed = self._config.reload()
        self._metrics.export_config_state(self._config.error is None)
        if not changed:
            return True
        new = self._config.current
        if (old.service, old.engine, old.slots) != (new.service, new.engine, new.slots):
            log.info(
                "restarting, because the new configuration has another engine, service or slot"
            )
            return False
        log.info("applied a new configuration with mode %s", new.supervision.mode)
        _set_log_level(new)
        self._governor.policy = new.supervision
        self._governor.apply_budgets(self._journal.learned.resolve_budgets(new.memory))
        self._actuator.restart_budget = new.supervision.restart_budget
        self._actuator.may_end_leftovers = new.supervision.mode is Mode.RECOVER
        self._metrics.export_budgets(self._governor.memory)
        if _collect_detection_settings(old) != _collect_detection_settings(new):
            self._detector = self._create_detector(self._resolve_config())
            self._inherited = self._journal.engine
        return True

    def _merge_stored_restarts(self) -> None:
        # Otherwise, the loss of the journal would reset the restart budget.
        stored = None if self._has_merged_restarts else self._actuator.take_stored_restarts()
        if stored is None:
            return
        self._has_merged_restarts = True
        num_known = len(self._governor.state.restarts)
        lacking = self._governor.merge_restarts(stored)
        if stored != NO_RESTARTS:
            level = logging.WARNING if lacking else logging.INFO
            text = (
                "this replica had %d restarts in the journal and %d on the slot Lease, which "
                "makes %d different restarts"
            )
            log.log(level, text, num_known, len(stored.at), num_known + lacking)
            self._write_journal()
        self._actuator.store_restarts(self._governor.copy_restarts())

    def _reset_restart_budget_if_requested(self) -> None:
        requested = self._state_dir / RESTART_BUDGET_RESET_FILE
        if os.path.exists(requested):  # Path.exists() would raise if the volume fails
            self._governor.reset_restart_budget()
            self._has_merged_restarts = True  # the reset includes the counts on the slot Leases
            self._actuator.store_restarts(self._governor.copy_restarts())
            if self._write_journal():
                requested.unlink(missing_ok=True)
                log.info("reset the restart budget")


def _list_processes(status: Status | None) -> tuple[EngineProcess, ...]:
    if status is None:
        return ()
    first = sorted(status.processes, key=lambda process: process.role is not Role.FRONTEND)
    return tuple(EngineProcess(process.label, process.pid) for process in first)


def _is_idle(load: Load) -> bool | None:
    if load.running is None or load.waiting is None:
        return None
    return not (load.running or load.waiting or load.inflight)


def _collect_detection_settings(config: SupervisorConfig) -> tuple[object, ...]:
    return config.memory, config.supervision.stall.timeout_s, config.sample_interval_s


def _set_log_level(config: SupervisorConfig) -> None:
    # The level also applies to libraries.
    logging.getLogger().setLevel(config.supervision.log_level.upper())
