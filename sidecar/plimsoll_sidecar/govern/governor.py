"""Decide from suspicions which actions to take, without a clock or I/O.

:meth:`Governor.advance` takes an assessment, the engine's state and the result of the pending
command. It returns the events of the incidents and at most one new command. The caller writes
:attr:`Governor.state` to the journal before it sends the command. After a restart of the
supervisor, the governor continues from the state in the journal.

:mod:`plimsoll_sidecar.govern.phases` handles each phase of an incident, and
:mod:`plimsoll_sidecar.govern.incident` defines their order.
"""

from __future__ import annotations

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
from plimsoll_sidecar.govern.context import TurnContext, is_conclusive
from plimsoll_sidecar.govern.incident import (
    Incident,
    compute_counted_s,
    find_budget,
    make_incident_name,
)
from plimsoll_sidecar.govern.ladder import wants_standby
from plimsoll_sidecar.govern.moves import apply_result, follow_new_epoch, release_slot
from plimsoll_sidecar.govern.notices import (
    LastHealthyState,
    ManualAction,
    make_crash_record,
    make_manual_action_record,
)
from plimsoll_sidecar.govern.phases import advance
from plimsoll_sidecar.govern.recycle import find_due_recycle
from plimsoll_sidecar.govern.restart_budget import ReplicaRestarts, Restart
from plimsoll_sidecar.govern.state import MAX_MANUAL_EPOCHS, GovernorState

LEASE_EPOCH_PLACEHOLDER = "lease"
"""Placeholder for the epoch of a restart that is recorded only in the slot's Lease."""
UNKNOWN_EPOCH_PLACEHOLDER = "unseen"
"""Placeholder for the epoch of an engine that ended before its first answer."""


class Governor:
    """Decide on the incidents of one replica within its ladder and restart budget.

    ``replica`` is part of the incidents' names: the pod, or the service in local mode. ``policy``
    and ``memory`` may be replaced at any time when the configuration changes. Incidents of the
    ``learning`` kinds are reported, but not acted on, because their budget has not been learned
    yet.
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
        self._seen: LastHealthyState | None = None
        self._judged_at: float | None = None
        self._idle_since: float | None = None

    def advance(
        self,
        assessment: Assessment,
        engine: EngineView,
        now: float,
        results: Sequence[Result] = (),
        hold: str | None = None,
        by_hand: Sequence[ManualAction] = (),
        own: Assessment | None = None,
    ) -> Turn:
        """Advance all incidents by one turn, and return the command and the events.

        ``now`` is in Unix seconds (the sample's ``t`` in a replay). ``by_hand`` are the manual
        actions, in progress or ended. Do not pass an ended action again once this turn is in the
        journal. ``own`` is the assessment of this pod alone if ``assessment`` covers its multi-node
        group; crashes and starts are judged by ``own``.

        ``hold`` is the reason why no command may be sent, for example because the journal cannot be
        written. Incidents are still followed and recorded.
        """
        turn, own = Turn(), own or assessment
        self.state.limit_waits(now)
        context = TurnContext(
            self.state, self.policy, self.memory, assessment, engine, now, hold, turn, self.learning
        )
        self._record_manual_actions(context, by_hand)
        self._apply_epoch(context)
        self._track_health(context, own)
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

    def wants_standby(self, engine: EngineView) -> bool:
        """Report whether the worker may be restarted soon, so that a standby is useful."""
        acted_on = [one for one in self.state.incidents if one.kind not in self.learning]
        return wants_standby(acted_on, self.policy, engine, self.state.exhausted)

    def count_restarts_left(self, now: float) -> int:
        """Return the restarts left in this replica's budget; 0 after the hard stop."""
        if self.state.exhausted:
            return 0
        return restart_budget.count_remaining(self.state.restarts, self.policy.restart_budget, now)

    @property
    def budgets(self) -> BudgetsInForce:
        """Budgets in force."""
        return BudgetsInForce(self.memory, self.learning)

    def apply_budgets(self, budgets: BudgetsInForce) -> None:
        """Apply ``budgets`` from the next turn on.

        A leak that was only reported may open again once its budget has been learned.
        """
        for kind in self.learning - budgets.learning:
            self.state.quiet.pop(kind, None)
        self.memory, self.learning = budgets

    def list_growing_kinds(self) -> frozenset[IncidentKind]:
        """Return the kinds of confirmed incidents that are open or in their cooldown."""
        confirmed = {one.kind for one in self.state.incidents if one.confirmed_at is not None}
        return frozenset(confirmed | self.state.quiet.keys())

    def copy_restarts(self) -> ReplicaRestarts:
        """Return the restarts of this replica, for storage outside the journal."""
        at = tuple(sorted(restart.at for restart in self.state.restarts))
        return ReplicaRestarts(at, self.state.exhausted)

    def merge_restarts(self, kept: ReplicaRestarts) -> int:
        """Merge restarts that were stored outside the journal.

        Return the number of restarts that the journal lacked.
        """
        known = {restart.at for restart in self.state.restarts}
        lacking = [at for at in kept.at if at not in known]
        joined = [Restart(at=at, epoch=f"{LEASE_EPOCH_PLACEHOLDER}:{at!r}") for at in lacking]
        joined = sorted([*self.state.restarts, *joined], key=lambda restart: restart.at)
        self.state.restarts = joined[-restart_budget.MAX_RESTARTS :]
        self.state.exhausted = self.state.exhausted or kept.exhausted
        return len(lacking)

    def reset_restart_budget(self) -> None:
        """Restore the full restart budget and end all cooldowns at a person's request."""
        self.state.exhausted = False
        self.state.restarts = []
        self.state.quiet = {}
        self.state.failures = {}

    def _apply_epoch(self, context: TurnContext) -> None:
        """Apply a new epoch to all incidents.

        Crashes and failed starts do not count against the restart budget, which limits remediation.
        """
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
        if last in self.state.by_hand:
            by_hand = Restart(at=context.now, epoch=last)
            restart_budget.record_restart(self.state.restarts, by_hand, self.policy.restart_budget)
        self._record_crash(context, last)
        pending = self.state.pending
        for incident in self.state.incidents:
            if pending is None or pending.incident != incident.name or not _is_restart(pending):
                follow_new_epoch(context, incident, last)

    def _track_health(self, context: TurnContext, own: Assessment) -> None:
        """Record the last healthy state of the engine, which the report of a crash needs."""
        epoch = context.engine.epoch
        if epoch is not None and (self._seen is None or self._seen.epoch != epoch):
            self._seen = LastHealthyState(epoch, context.now)
        if self._seen is not None:
            self._seen = self._seen.update(context.engine, own, context.now)

    def _learn_start_noise(self, context: TurnContext, own: Assessment) -> None:
        """Learn how much memory a start needs, unless a restart is being verified."""
        if any(incident.phase is IncidentPhase.VERIFYING for incident in self.state.incidents):
            return
        if context.engine.answers and self.state.starts.add_assessment(own):
            context.turn.changed = True

    def _record_manual_actions(self, context: TurnContext, by_hand: Sequence[ManualAction]) -> None:
        """Record ended manual actions, and the epochs that manual restarts may end."""
        for action in by_hand:
            epochs = self.state.by_hand
            if action.ends_epoch and action.epoch not in epochs:
                self.state.by_hand = [*epochs, action.epoch][-MAX_MANUAL_EPOCHS:]
                context.turn.changed = True
            elif not action.ends_epoch and action.action == "restart" and action.epoch in epochs:
                epochs.remove(action.epoch)
            if action.outcome is not None:
                self._record_closed_incident(
                    context, make_manual_action_record(action, self.replica, context.now)
                )

    def _record_crash(self, context: TurnContext, last: str) -> None:
        """Record that an epoch ended although neither the supervisor nor a person requested it."""
        seen, pending = self._seen, self.state.pending
        if seen is None or seen.epoch != last or seen.oom_killed or last in self.state.by_hand:
            return
        if pending is not None and _is_restart(pending) and pending.epoch == last:
            return
        if any(one.fenced_epoch == last and one.is_disrupting for one in self.state.incidents):
            return
        limit = self.memory.host.limit_bytes if self.memory.host else None
        self._record_closed_incident(
            context, make_crash_record(seen, context.engine, self.replica, limit, context.now)
        )

    def _record_closed_incident(self, context: TurnContext, record: Incident) -> None:
        """Record an incident that opens and ends in one turn."""
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
        """Assign suspicions to incidents, and open new incidents.

        A kind has at most one incident.
        """
        at, before = context.assessment.t, self._judged_at
        counted, self._judged_at = compute_counted_s(0.0 if before is None else at - before), at
        worst: dict[IncidentKind, Suspicion] = {}
        recycle = find_due_recycle(context, self._idle_s(context))
        planned = [] if recycle is None else [recycle]
        for suspicion in [*context.assessment.suspicions, *planned]:
            known = worst.get(suspicion.kind)
            if known is None or _rank_suspicion(suspicion) > _rank_suspicion(known):
                worst[suspicion.kind] = suspicion
        context.suspicions = worst
        for incident in self.state.incidents:
            if incident.kind in worst:
                measure = incident.budget(context.assessment)
                incident.observe(worst[incident.kind], counted)
                budget = incident.budget(context.assessment)
                if budget is not None and budget is not measure:
                    # The growth is in another segment now, which has another baseline.
                    incident.baseline_bytes = budget.baseline
            elif is_conclusive(context, incident.kind):
                incident.seen_s, incident.missed_s = 0.0, incident.missed_s + counted
        for kind in list(self.state.quiet):
            if self.state.quiet[kind].has_ended(
                kind in worst, context.engine.epoch, context.now, counted
            ):
                del self.state.quiet[kind]
                context.turn.changed = True
        opened = {incident.kind for incident in self.state.incidents}
        if IncidentKind.STALL in worst and self.state.epoch is None:
            # The main process ended before its first answer, and its other processes are still
            # running.
            self.state.epoch, context.turn.changed = UNKNOWN_EPOCH_PLACEHOLDER, True
        for kind, suspicion in worst.items():
            if kind not in opened and kind not in self.state.quiet and self.state.epoch:
                self._open_incident(context, suspicion, self.state.epoch, counted)

    def _idle_s(self, context: TurnContext) -> float:
        """Return for how many seconds the engine has been known to have no request."""
        if not context.engine.idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = context.now
        return 0.0 if self._idle_since is None else context.now - self._idle_since

    def _open_incident(
        self, context: TurnContext, suspicion: Suspicion, epoch: str, counted: float
    ) -> None:
        budget = find_budget(suspicion.kind, suspicion.segment, context.assessment)
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
        incident.observe(suspicion, counted)
        self.state.incidents.append(incident)
        context.emit_event(EventType.OPENED, incident)

    def _release_slot(self, context: TurnContext) -> None:
        """Release a slot that no incident needs, for example after a crash of the supervisor.

        An incident whose restart was refused requests a slot again, after others.
        """
        holder = self.state.slot_holder
        if holder is not None and not any(
            one.name == holder and one.needs_slot for one in self.state.incidents
        ):
            release_slot(context)


def _rank_suspicion(suspicion: Suspicion) -> tuple[bool, float, int]:
    return suspicion.over_budget, suspicion.consumed_ratio, suspicion.bytes


def _is_restart(command: Command) -> bool:
    return command.verb in (Verb.RESTART_WORKER, Verb.RESTART_ENGINE)
