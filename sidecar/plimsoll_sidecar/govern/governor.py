"""The governor: from what is suspected to what is done about it. Pure: no clock, no I/O.

Each assessment goes through :meth:`Governor.advance` together with the engine's state and the
result of the command that was under way. Out come the events of the incidents and at most one new
command. The caller writes :attr:`Governor.state` to the journal before it sends the command; after
a restart of the supervisor the state from the journal goes on where it stood.

The life of an incident is in :mod:`plimsoll_sidecar.govern.life`.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_api.supervision import MemoryPolicy, Supervision
from plimsoll_sidecar.detect.assessment import Assessment, Kind, Suspicion
from plimsoll_sidecar.govern import restart_budget
from plimsoll_sidecar.govern.command import (
    Command,
    EngineView,
    Happening,
    Result,
    Turn,
    Verb,
)
from plimsoll_sidecar.govern.incident import Incident, Phase, budget_of, incident_name
from plimsoll_sidecar.govern.life import Life
from plimsoll_sidecar.govern.restart_budget import Restart
from plimsoll_sidecar.govern.state import GovernorState


class Governor:
    """One replica's incidents, ladder and restart budget.

    ``replica`` names the incidents: the pod, or the service in local mode. ``policy`` and
    ``memory`` may be replaced at any time when the configuration changes.
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

    def advance(
        self,
        assessment: Assessment,
        engine: EngineView,
        now: float,
        results: Sequence[Result] = (),
        hold: str | None = None,
    ) -> Turn:
        """One step. ``now`` is Unix seconds (the sample's ``t`` in a replay).

        ``hold`` says why nothing may be sent to the engine for now (the journal cannot be
        written): incidents are followed and recorded, nothing begins.
        """
        turn = Turn()
        self.state.bound(now)
        life = Life(self.state, self.policy, self.memory, assessment, engine, now, hold, turn)
        self._follow_epoch(life)
        for result in results:
            self._take(life, result)
        self._match(life)
        if self.state.pending is None:
            self._release_slot(life)
        for incident in sorted(self.state.incidents, key=lambda i: i.kind is not Kind.STALL):
            life.advance(incident)
        ended = [incident.kind for incident in self.state.incidents if incident.ended]
        if ended:
            self.state.incidents = [i for i in self.state.incidents if not i.ended]
        return turn

    def restarts_left(self, now: float) -> int:
        """What remains of this replica's restart budget; zero after the hard stop."""
        if self.state.exhausted:
            return 0
        return restart_budget.remaining(self.state.restarts, self.policy.restart_budget, now)

    def reset(self) -> None:
        """A person's reset: the restart budget is whole again and every kind may open."""
        self.state.exhausted = False
        self.state.restarts = []
        self.state.quiet = {}
        self.state.failures = {}

    def _follow_epoch(self, life: Life) -> None:
        """A new epoch counts as a restart whoever began it, and renews every incident's memory."""
        epoch, last = life.engine.epoch, self.state.epoch
        if epoch is None or epoch == last:
            return
        self.state.epoch, life.turn.changed = epoch, True
        if last is None:
            return
        restart_budget.record(
            self.state.restarts, Restart(at=life.now, epoch=last), self.policy.restart_budget
        )
        pending = self.state.pending
        for incident in self.state.incidents:
            if pending is None or pending.incident != incident.name or not _restarts(pending):
                life.renewed(incident, last)

    def _take(self, life: Life, result: Result) -> None:
        pending = self.state.pending
        if pending is None or pending.operation_id != result.operation_id:
            return
        self.state.pending, life.turn.changed = None, True
        if pending.verb is Verb.RELEASE_SLOT:
            self.state.slot_holder = None
            return
        for incident in self.state.incidents:
            if incident.name == pending.incident:
                life.finished(incident, pending, result)

    def _match(self, life: Life) -> None:
        """Suspicions meet their incidents; one incident of a kind at a time."""
        worst: dict[Kind, Suspicion] = {}
        for suspicion in life.assessment.suspicions:
            known = worst.get(suspicion.kind)
            if known is None or _rank(suspicion) > _rank(known):
                worst[suspicion.kind] = suspicion
        life.suspicions = worst
        for incident in self.state.incidents:
            if incident.kind in worst:
                incident.observe(worst[incident.kind])
            elif life.certain(incident.kind):
                incident.seen, incident.missed = 0, incident.missed + 1
        for kind in list(self.state.quiet):
            if self.state.quiet[kind].lifted(kind in worst, life.engine.epoch, life.now):
                del self.state.quiet[kind]
                life.turn.changed = True
        opened = {incident.kind for incident in self.state.incidents}
        for kind, suspicion in worst.items():
            if kind not in opened and kind not in self.state.quiet and self.state.epoch:
                self._open(life, suspicion, self.state.epoch)

    def _open(self, life: Life, suspicion: Suspicion, epoch: str) -> None:
        budget = budget_of(suspicion.kind, life.assessment)
        incident = Incident(
            name=incident_name(self.replica, suspicion.kind, epoch, life.now),
            kind=suspicion.kind,
            epoch=epoch,
            opened_at=life.now,
            phase_since=life.now,
            phase=Phase.OPEN,
            baseline_bytes=budget.baseline if budget else None,
            before_bytes=budget.current if budget else None,
        )
        incident.observe(suspicion)
        self.state.incidents.append(incident)
        life.tell(Happening.OPENED, incident)

    def _release_slot(self, life: Life) -> None:
        """A slot is given back once no incident needs it, also after a crash in between.

        One whose restart was refused begins anew, and others may come first.
        """
        holder = self.state.slot_holder
        if holder is None or any(i.name == holder and i.needs_slot for i in self.state.incidents):
            return
        life.release_slot()


def _rank(suspicion: Suspicion) -> tuple[bool, float, int]:
    return suspicion.over_budget, suspicion.consumed_ratio, suspicion.bytes


def _restarts(command: Command) -> bool:
    return command.verb in (Verb.RESTART_WORKER, Verb.RESTART_ENGINE)
