"""Decide which actions to take on suspicions, without a clock or I/O.

The caller writes :attr:`Governor.state` to the journal before it sends a command. A restarted
supervisor continues from the state in the journal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from plimsoll_api.assessment import Assessment, Suspicion
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.supervision import Supervision
from plimsoll_sidecar.govern import restart_budget
from plimsoll_sidecar.govern.auto_budget import BudgetsInForce
from plimsoll_sidecar.govern.command import (
    Command,
    EngineView,
    EventType,
    Result,
    Turn,
    Verb,
)
from plimsoll_sidecar.govern.context import TurnContext, is_absence_conclusive
from plimsoll_sidecar.govern.event_incidents import (
    LastHealthyState,
    ManualAction,
    make_crash_record,
    make_manual_action_record,
)
from plimsoll_sidecar.govern.incident import (
    Incident,
    compute_covered_s,
    find_budget_state,
    make_incident_name,
)
from plimsoll_sidecar.govern.ladder import should_prepare_standby
from plimsoll_sidecar.govern.phase_steps import apply_result, follow_new_epoch, release_slot
from plimsoll_sidecar.govern.phases import advance
from plimsoll_sidecar.govern.recycle import find_recycle_suspicion
from plimsoll_sidecar.govern.restart_budget import ReplicaRestarts, Restart
from plimsoll_sidecar.govern.state import MAX_MANUAL_EPOCHS, GovernorState, shift_times

# LeaderWorkerSet replaces all pods of a group after a container was started again. It notices that
# late after an outage of its own or of the API server: client-go retries a watch after up to 60 s.
GROUP_RECREATION_WAIT_S = 60.0

# The slot's Lease stores restarts without their epoch.
LEASE_EPOCH_PLACEHOLDER = "lease"
# An engine that never answered has no known epoch.
UNKNOWN_EPOCH_PLACEHOLDER = "unseen"


class Governor:
    """Decides on the incidents of one replica, within its ladder and its restart budget.

    ``replica`` is the first part of the names of incidents. Incidents of the kinds in ``learning``
    are only reported.
    """

    def __init__(
        self,
        policy: Supervision,
        memory: MemoryPolicy,
        state: GovernorState | None = None,
        replica: str = "replica",
    ) -> None:
        self.policy = policy
        self.memory = memory
        self.state = state if state is not None else GovernorState()
        self.replica = replica
        self.learning: frozenset[IncidentKind] = frozenset()
        self._last_healthy_state: LastHealthyState | None = None
        self._judged_at: float | None = None
        self._idle_since: float | None = None

    def advance(
        self,
        assessment: Assessment,
        engine: EngineView,
        now: float,
        results: Sequence[Result] = (),
        hold: str | None = None,
        manual_actions: Sequence[ManualAction] = (),
        pod_assessment: Assessment | None = None,
    ) -> Turn:
        """Advance all incidents by one turn.

        Args:
            assessment: The newest assessment of this replica.
            engine: The state of the engine.
            now: The time in Unix seconds; in a replay, the time ``t`` of the sample.
            results: The results of commands since the last turn.
            hold: The reason why no command may be sent, for example because the journal cannot be
                written; None if commands may be sent. Incidents are recorded in any case.
            manual_actions: The manual actions that are in progress or finished. Pass a finished
                action again until the journal has stored a turn with it.
            pod_assessment: The assessment of this pod alone, if ``assessment`` covers its
                multi-node group. It is used for crashes and starts.

        Returns:
            The events of this turn, and at most one new command.

        """
        turn, own = Turn(), pod_assessment or assessment
        self.state.limit_waits(now)
        context = TurnContext(
            self.state, self.policy, self.memory, assessment, engine, now, hold, turn, self.learning
        )
        self._record_manual_actions(context, manual_actions)
        self._apply_epoch(context)
        self._update_last_healthy_state(context, own)
        for result in results:
            self._apply_result(context, result)
        self._assign_suspicions(context)
        if self.state.pending is None:
            self._release_slot(context)
        for incident in sorted(
            self.state.incidents, key=lambda i: i.kind is not IncidentKind.STALL
        ):
            advance(context, incident)
        self._learn_start_noise(context, own)
        ended = [incident.kind for incident in self.state.incidents if incident.ended]
        if ended:
            self.state.incidents = [i for i in self.state.incidents if not i.ended]
        return turn

    def should_prepare_standby(self, engine: EngineView) -> bool:
        """Report whether the worker may be restarted soon, so that a standby worker is needed."""
        acted_on = [
            incident for incident in self.state.incidents if incident.kind not in self.learning
        ]
        return should_prepare_standby(acted_on, self.policy, engine, self.state.exhausted)

    def count_restarts_left(self, now: float) -> int:
        """Return how many restarts the replica's restart budget still allows at ``now``."""
        if self.state.exhausted:
            return 0
        budget = self.policy.restart_budget
        return restart_budget.count_remaining_restarts(self.state.restarts, budget, now)

    @property
    def budgets(self) -> BudgetsInForce:
        """Leak budgets in force."""
        return BudgetsInForce(self.memory, self.learning)

    def apply_budgets(self, budgets: BudgetsInForce) -> None:
        """Apply ``budgets`` from the next turn on.

        A kind whose budget has now been learned leaves its cooldown.
        """
        for kind in self.learning - budgets.learning:
            self.state.cooldowns.pop(kind, None)
        self.memory, self.learning = budgets

    def list_growing_kinds(self) -> frozenset[IncidentKind]:
        """Return the kinds with a confirmed open incident, or in a cooldown."""
        confirmed = {
            incident.kind for incident in self.state.incidents if incident.confirmed_at is not None
        }
        return frozenset(confirmed | self.state.cooldowns.keys())

    def shift_times(self, step_s: float) -> None:
        """Shift all times by ``step_s`` seconds after the clock was set. No incident is open."""
        shift_times(self.state, step_s)
        if self._idle_since is not None:
            self._idle_since += step_s

    def copy_restarts(self) -> ReplicaRestarts:
        """Return the restarts of this replica, for storage outside the journal."""
        at = tuple(sorted(restart.at for restart in self.state.restarts))
        return ReplicaRestarts(at, self.state.exhausted)

    def merge_restarts(self, stored: ReplicaRestarts) -> int:
        """Add restarts from outside the journal, and return the number of new ones."""
        known_times = {restart.at for restart in self.state.restarts}
        lacking = [at for at in stored.at if at not in known_times]
        joined = [Restart(at=at, epoch=f"{LEASE_EPOCH_PLACEHOLDER}:{at!r}") for at in lacking]
        joined = sorted([*self.state.restarts, *joined], key=lambda restart: restart.at)
        self.state.restarts = joined[-restart_budget.MAX_STORED_RESTARTS :]
        self.state.exhausted = self.state.exhausted or stored.exhausted
        return len(lacking)

    def reset_restart_budget(self) -> None:
        """Restore the full restart budget and end all cooldowns."""
        self.state.exhausted = False
        self.state.restarts = []
        self.state.cooldowns = {}
        self.state.failures = {}

    def _apply_epoch(self, context: TurnContext) -> None:
        # Crashes and failed starts do not count against the restart budget, which limits requested
        # restarts.
        epoch, last = context.engine.epoch, self.state.epoch
        if epoch is None or (epoch == last and self.state.epoch_at is not None):
            return
        self.state.epoch_at, context.turn.changed = context.now, True
        if epoch == last:  # an earlier version wrote this journal
            return
        self.state.epoch = epoch
        self.state.starts.begin_start(epoch)
        if last is None:
            return
        if last in self.state.manual_epochs:
            restart = Restart(at=context.now, epoch=last)
            restart_budget.record_restart(self.state.restarts, restart, self.policy.restart_budget)
        self._record_crash(context, last)
        pending = self.state.pending
        for incident in self.state.incidents:
            if pending is None or pending.incident != incident.name or not _is_restart(pending):
                follow_new_epoch(context, incident, last)

    def _update_last_healthy_state(self, context: TurnContext, pod_assessment: Assessment) -> None:
        epoch = context.engine.epoch
        if epoch is not None and (
            self._last_healthy_state is None or self._last_healthy_state.epoch != epoch
        ):
            self._last_healthy_state = LastHealthyState(epoch, context.now)
        if self._last_healthy_state is not None:
            self._last_healthy_state = self._last_healthy_state.update(
                context.engine, pod_assessment, context.now
            )

    def _learn_start_noise(self, context: TurnContext, pod_assessment: Assessment) -> None:
        # A start whose restart is being verified does not count.
        if any(incident.phase is IncidentPhase.VERIFYING for incident in self.state.incidents):
            return
        if context.engine.answers and self.state.starts.add_assessment(pod_assessment):
            context.turn.changed = True

    def _record_manual_actions(
        self, context: TurnContext, manual_actions: Sequence[ManualAction]
    ) -> None:
        for action in manual_actions:
            epochs = self.state.manual_epochs
            if action.ends_epoch and action.epoch not in epochs:
                self.state.manual_epochs = [*epochs, action.epoch][-MAX_MANUAL_EPOCHS:]
                context.turn.changed = True
            elif not action.ends_epoch and action.action == "restart" and action.epoch in epochs:
                epochs.remove(action.epoch)
            if action.outcome is not None:
                self._emit_closed_incident(
                    context, make_manual_action_record(action, self.replica, context.now)
                )

    def _record_crash(self, context: TurnContext, ended_epoch: str) -> None:
        last_state, pending = self._last_healthy_state, self.state.pending
        if (
            last_state is None
            or last_state.epoch != ended_epoch
            or last_state.oom_killed
            or ended_epoch in self.state.manual_epochs
        ):
            return
        if pending is not None and _is_restart(pending) and pending.epoch == ended_epoch:
            return
        if any(
            incident.fenced_epoch == ended_epoch and incident.is_disrupting
            for incident in self.state.incidents
        ):
            return
        limit = self.memory.host.limit_bytes if self.memory.host else None
        self._emit_closed_incident(
            context, make_crash_record(last_state, context.engine, self.replica, limit, context.now)
        )

    def _emit_closed_incident(self, context: TurnContext, record: Incident) -> None:
        context.emit_event(EventType.OPENED, record)
        context.emit_event(EventType.ENDED, record)

    def _apply_result(self, context: TurnContext, result: Result) -> None:
        pending = self.state.pending
        if pending is None or pending.operation_id != result.operation_id:
            return
        self.state.pending, context.turn.changed = None, True
        for incident in self.state.incidents:
            if incident.name == pending.incident:
                apply_result(context, incident, pending, result)

    def _assign_suspicions(self, context: TurnContext) -> None:
        # Each kind has at most one open incident.
        at, before = context.assessment.t, self._judged_at
        counted, self._judged_at = compute_covered_s(0.0 if before is None else at - before), at
        worst: dict[IncidentKind, Suspicion] = {}
        recycle = find_recycle_suspicion(context, self._measure_idle_s(context))
        planned = [] if recycle is None else [recycle]
        for suspicion in [*context.assessment.suspicions, *planned]:
            previous = worst.get(suspicion.kind)
            if previous is None or _make_severity_key(suspicion) > _make_severity_key(previous):
                worst[suspicion.kind] = suspicion
        context.suspicions = worst
        for incident in self.state.incidents:
            if incident.kind in worst:
                measure = incident.get_budget_state(context.assessment)
                incident.observe(worst[incident.kind], counted)
                budget = incident.get_budget_state(context.assessment)
                if budget is not None and budget is not measure:
                    # The growth is in another segment now, which has another baseline.
                    incident.baseline_bytes = budget.baseline
            elif is_absence_conclusive(context, incident.kind):
                incident.seen_s, incident.missed_s = 0.0, incident.missed_s + counted
        for kind in list(self.state.cooldowns):
            if self.state.cooldowns[kind].has_ended(
                kind in worst, context.engine.epoch, context.now, counted
            ):
                del self.state.cooldowns[kind]
                context.turn.changed = True
        opened = {incident.kind for incident in self.state.incidents}
        if IncidentKind.STALL in worst and self.state.epoch is None:
            # The main process ended before its first answer, and its other processes are still
            # running.
            self.state.epoch, context.turn.changed = UNKNOWN_EPOCH_PLACEHOLDER, True
        for kind, suspicion in worst.items():
            if kind not in opened and kind not in self.state.cooldowns and self.state.epoch:
                self._open_incident(context, suspicion, self.state.epoch, counted)

    def _measure_idle_s(self, context: TurnContext) -> float:
        if not context.engine.idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = context.now
        return 0.0 if self._idle_since is None else context.now - self._idle_since

    def _open_incident(
        self, context: TurnContext, suspicion: Suspicion, epoch: str, covered_s: float
    ) -> None:
        budget = find_budget_state(suspicion.kind, suspicion.segment, context.assessment)
        incident = Incident(
            name=make_incident_name(self.replica, suspicion.kind, epoch, context.now),
            kind=suspicion.kind,
            epoch=epoch,
            opened_at=context.now,
            phase_since=context.now,
            phase=IncidentPhase.OPEN,
            baseline_bytes=budget.baseline if budget else None,
            before_bytes=budget.current if budget else None,
        )
        incident.observe(suspicion, covered_s)
        self.state.incidents.append(incident)
        context.emit_event(EventType.OPENED, incident)

    def _release_slot(self, context: TurnContext) -> None:
        holder = self.state.slot_holder
        if holder is None or any(
            incident.name == holder and incident.needs_slot for incident in self.state.incidents
        ):
            return
        epoch_at = self.state.epoch_at
        age_s = math.inf if epoch_at is None else context.now - epoch_at
        if not context.engine.recreated or age_s >= GROUP_RECREATION_WAIT_S:
            release_slot(context)


def _make_severity_key(suspicion: Suspicion) -> tuple[bool, float, int]:
    return suspicion.over_budget, suspicion.consumed_ratio, suspicion.bytes


def _is_restart(command: Command) -> bool:
    return command.verb in (Verb.RESTART_WORKER, Verb.RESTART_ENGINE)
