"""Whatever the engine, the detector and the answers do, the governor keeps its promises.

Tests ``govern/governor.py``.
"""

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plimsoll_api.admin import Capability, EngineState
from plimsoll_api.assessment import Assessment, BudgetState, Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.maintenance_window import MaintenanceWindow
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.supervision import Action, Mode, Recycle, RestartBudget, Supervision
from plimsoll_sidecar.govern.command import (
    Command,
    EngineView,
    EventType,
    Outcome,
    Result,
    Verb,
)
from plimsoll_sidecar.govern.governor import Governor
from plimsoll_sidecar.govern.incident import DISRUPTING_PHASES
from plimsoll_sidecar.govern.state import GovernorState

RESTARTS = (Verb.RESTART_WORKER, Verb.RESTART_ENGINE)
INTERRUPTING = (Verb.DRAIN, *RESTARTS)
RECORDED = frozenset(
    {
        IncidentKind.ENGINE_CRASH,
        IncidentKind.CRASH_LOOP,
        IncidentKind.MANUAL_ACTION,
        IncidentKind.RECYCLE,
    }
)
"""Kinds that no detector suspects: the governor decides on them itself."""
SUSPECTED = sorted(set(IncidentKind) - RECORDED)


class GovernorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 10_000.0
        self.number = 1
        self.answers = True
        self.warm = True
        self.suspected: set[IncidentKind] = set()
        self.growth = 0
        self.in_flight: Command | None = None
        self.begun: list[tuple[float, str]] = []
        self.opened: set[str] = set()
        self.ended: set[str] = set()

    @initialize(
        mode=st.sampled_from(Mode),
        count=st.integers(0, 3),
        capabilities=st.frozensets(st.sampled_from(Capability)),
        rungs=st.sets(st.sampled_from(Action)),
        replaceable=st.booleans(),
        window=st.sampled_from([None, MaintenanceWindow(start_s=12_000.0, duration_s=300.0)]),
        recycle=st.sampled_from([None, Recycle(600.0), Recycle(900.0, when_idle_for_s=20.0)]),
        meets_partner=st.booleans(),
        restart_blocker=st.sampled_from([None, None, "restart both"]),
    )
    def start(
        self,
        mode: Mode,
        count: int,
        capabilities: frozenset[Capability],
        rungs: set[Action],
        replaceable: bool,
        window: MaintenanceWindow | None,
        recycle: Recycle | None,
        meets_partner: bool,
        restart_blocker: str | None,
    ) -> None:
        self.meets_partner, self.restart_blocker = meets_partner, restart_blocker
        restarts = count and rungs - {Action.TRIM}
        self.policy = Supervision(
            mode=mode,
            restart_budget=RestartBudget(count=count, window_s=500.0),
            ladder=tuple(action for action in Action if action in rungs),
            maintenance_window=window,
            recycle=recycle if restarts else None,
        )
        self.idle: bool | None = None
        self.epoch, self.epoch_at, self.idle_since = 0, self.now, 0.0
        self.replaceable = replaceable
        self.governor = Governor(self.policy, MemoryPolicy(warmup_s=5.0), None, "pod-0")
        self.capabilities = capabilities

    @rule(kinds=st.sets(st.sampled_from(SUSPECTED), max_size=3), growth=st.integers(0, 10**9))
    def suspect(self, kinds: set[IncidentKind], growth: int) -> None:
        self.suspected, self.growth = kinds, growth

    @rule(answers=st.booleans(), warm=st.booleans())
    def engine(self, answers: bool, warm: bool) -> None:
        self.answers, self.warm = answers, warm

    @rule(idle=st.sampled_from([None, False, True]))
    def load(self, idle: bool | None) -> None:
        self.idle = idle

    @rule()
    def crash(self) -> None:
        self.number += 1

    @rule(ticks=st.integers(1, 30) | st.just(900))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.tick()

    @precondition(lambda self: self.in_flight is not None)
    @rule(outcome=st.sampled_from(Outcome), happened=st.booleans())
    def answer(self, outcome: Outcome, happened: bool) -> None:
        command = self.in_flight
        assert command is not None
        restarts = command.verb in RESTARTS and command.epoch == f"boot:{self.number}"
        if restarts and happened:
            self.number += 1
        self.in_flight = None
        self.tick(Result(operation_id=command.operation_id, outcome=outcome))

    @rule()
    def supervisor_restarts(self) -> None:
        """The journal holds the state; the command under way is sent again."""
        data = msgspec.json.encode(self.governor.state)
        state = msgspec.json.decode(data, type=GovernorState)
        self.governor = Governor(self.policy, MemoryPolicy(warmup_s=5.0), state, "pod-0")
        assert state.pending == self.in_flight

    def tick(self, *results: Result) -> None:
        self.now += 1.0
        known = self.warm and self.answers
        suspicions = [
            Suspicion(
                kind=kind,
                segment=None if kind is IncidentKind.STALL else Segment.PYTHON_OBJECTS,
                confidence=0.5,
                consumed_ratio=1.0,
                bytes=self.growth,
                over_budget=True,
            )
            for kind in sorted(self.suspected)
            if known or kind is IncidentKind.STALL
        ]
        budget = BudgetState(current=10**9 + self.growth, baseline=10**9) if known else None
        assessment = Assessment(
            t=self.now, epoch=self.number, warm=known, suspicions=suspicions, host=budget
        )
        view = EngineView(
            epoch=f"boot:{self.number}" if self.answers else None,
            state=EngineState.SERVING if self.answers else None,
            capabilities=self.capabilities,
            replaceable=self.replaceable,
            idle=self.idle,
            meets_partner=self.meets_partner,
            restart_blocker=self.restart_blocker,
        )
        if self.answers and self.number != self.epoch:
            self.epoch, self.epoch_at = self.number, self.now
        if not self.idle:
            self.idle_since = self.now
        spent = self.governor.count_restarts_left(self.now) == 0
        turn = self.governor.advance(assessment, view, self.now, results)
        for event in turn.events:
            if event.type is EventType.OPENED:
                assert event.incident.name not in self.opened
                self.opened.add(event.incident.name)
                if event.incident.kind is IncidentKind.RECYCLE:
                    self.check_recycle()
            if event.incident.ended:
                self.ended.add(event.incident.name)
        if turn.command is not None:
            assert turn.changed
            given_up = self.in_flight is not None and self.in_flight.verb is Verb.TRIM
            stalls = IncidentKind.STALL in self.suspected
            assert self.in_flight is None or (given_up and stalls), "two commands at once"
            self.in_flight = turn.command
            if turn.command.verb is Verb.MEET_PARTNER:
                assert self.answers
                assert turn.command.epoch == view.epoch, "a new engine, and the one that serves"
            if self.restart_blocker is not None and turn.command.verb in INTERRUPTING:
                assert turn.command.stalled, "nothing but a stall restarts it alone"
            if turn.command.verb in INTERRUPTING:
                assert self.policy.mode is Mode.RECOVER
                first = turn.command.epoch not in {epoch for _, epoch in self.begun}
                if first:
                    assert not spent, "a restart without budget"
                    self.begun.append((self.now, turn.command.epoch))

    def check_recycle(self) -> None:
        """A recycle begins only with an old engine that serves, after its time without requests."""
        wanted = self.policy.recycle
        assert wanted is not None
        assert self.answers
        assert self.now - self.epoch_at >= wanted.max_age_s
        if wanted.when_idle_for_s is not None:
            assert self.now - self.idle_since >= wanted.when_idle_for_s
        if self.policy.maintenance_window is not None:
            assert not self.policy.maintenance_window.compute_seconds_until_open(self.now)

    @invariant()
    def observe_sends_nothing(self) -> None:
        if getattr(self, "policy", None) and self.policy.mode is Mode.OBSERVE:
            assert self.in_flight is None

    @invariant()
    def one_disruption_at_a_time(self) -> None:
        if hasattr(self, "governor"):
            ours = [
                i
                for i in self.governor.state.incidents
                if i.phase in DISRUPTING_PHASES and i.rung not in (None, Action.POD_REPLACE)
            ]
            assert len(ours) <= 1

    @invariant()
    def one_incident_of_a_kind(self) -> None:
        if hasattr(self, "governor"):
            kinds = [i.kind for i in self.governor.state.incidents]
            assert len(kinds) == len(set(kinds))

    def teardown(self) -> None:
        """With a healthy engine and answers to everything, every incident comes to its end."""
        if not hasattr(self, "governor"):
            return
        self.suspected, self.growth, self.answers, self.warm = set(), 0, True, True
        self.governor.policy = msgspec.structs.replace(self.policy, recycle=None)
        for _ in range(400):
            if self.in_flight is not None:
                self.answer(Outcome.SUCCEEDED, True)
            self.tick()
        self.now += 2_000.0
        for _ in range(200):
            if self.in_flight is not None:
                self.answer(Outcome.SUCCEEDED, True)
            self.tick()
        assert self.governor.state.incidents == []
        assert self.opened == self.ended
        assert self.governor.state.pending is None
        assert self.governor.state.slot_holder is None


GovernorMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestGovernor = GovernorMachine.TestCase
