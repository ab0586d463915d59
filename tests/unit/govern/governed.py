"""A small model of an engine that a governor looks after."""

from __future__ import annotations

from plimsoll_api.admin import Capability, EngineState
from plimsoll_api.assessment import Assessment, BudgetState, Segment, Suspicion
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_sidecar.govern.command import (
    Command,
    EngineView,
    Event,
    EventType,
    Outcome,
    Result,
    Verb,
)
from plimsoll_sidecar.govern.governor import Governor
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.state import GovernorState

BASELINE = 1_000_000_000
EVERYTHING = frozenset(Capability)
ROUND = 5
"""Ticks of a second in a round."""


class World:
    """An engine whose memory leaks, and whose answers the test chooses."""

    def __init__(
        self,
        policy: Supervision | None = None,
        state: GovernorState | None = None,
        memory: MemoryPolicy | None = None,
    ) -> None:
        policy = policy or Supervision(mode=Mode.RECOVER)
        memory = memory or MemoryPolicy(warmup_s=2.0)
        self.governor = Governor(policy, memory, state, "pod-0")
        self.now = 1_000.0
        self.boot, self.number = "boot", 1
        self.growth = 0
        self.suspect = True
        self.kind = IncidentKind.HOST_GROWTH
        self.besides: list[Suspicion] = []
        self.over_budget = True
        self.growing = True
        self.confidence = 0.9
        self.process: str | None = "worker"
        self.segment = Segment.PYTHON_OBJECTS
        self.answers = True
        self.engine_state = EngineState.SERVING
        self.warm = True
        self.capabilities = EVERYTHING
        self.replaceable = True
        self.abrupt = False
        self.manually_drained = False
        self.meets_partner = False
        self.restart_blocker: str | None = None
        self.group = ""
        self.recreated = False
        self.idle: bool | None = None
        self.rate: float | None = None
        self.exhaustion_s: float | None = None
        self.limit = memory.host.limit_bytes if memory.host else None
        self.commands: list[Command] = []
        self.events: list[Event] = []
        self.hold: str | None = None
        self.is_in_long_step = False
        self.unconfirmed: str | None = None
        self.unhealthy_device: str | None = None

    def tick(self, *results: Result) -> Command | None:
        self.now += 1.0
        suspicions = list(self.besides)
        if self.suspect and (self.warm or self.kind is IncidentKind.STALL):
            suspicions.append(
                Suspicion(
                    kind=self.kind,
                    segment=None if self.kind is IncidentKind.STALL else self.segment,
                    confidence=self.confidence,
                    consumed_ratio=1.2,
                    bytes=self.growth,
                    over_budget=self.over_budget,
                    growing=self.growing,
                    process=self.process,
                    unconfirmed=self.unconfirmed,
                    unhealthy_device=self.unhealthy_device,
                )
            )
        host = BudgetState(
            current=BASELINE + self.growth,
            baseline=BASELINE,
            explained=0,
            unexplained=self.growth,
            bytes_per_s=self.rate,
            exhaustion_s=self.exhaustion_s,
            limit=self.limit,
        )
        assessment = Assessment(
            t=self.now,
            epoch=self.number,
            warm=self.warm,
            suspicions=suspicions,
            host=host,
            in_long_step=self.is_in_long_step,
        )
        engine = EngineView(
            epoch=f"{self.boot}:{self.number}" if self.answers else None,
            state=self.engine_state if self.answers else None,
            capabilities=self.capabilities,
            replaceable=self.replaceable,
            abrupt=self.abrupt,
            manually_drained=self.manually_drained,
            meets_partner=self.meets_partner,
            restart_blocker=self.restart_blocker,
            group=self.group,
            recreated=self.recreated,
            idle=self.idle,
        )
        turn = self.governor.advance(assessment, engine, self.now, results, self.hold)
        self.events += turn.events
        if turn.command:
            assert turn.changed
            self.commands.append(turn.command)
        return turn.command

    def until_command(self, *results: Result, limit: int = 100) -> Command:
        command = self.tick(*results)
        for _ in range(limit):
            if command is not None:
                return command
            command = self.tick()
        raise AssertionError(f"no command within {limit} assessments")

    def answer(
        self, command: Command, outcome: Outcome = Outcome.SUCCEEDED, limit: int = 100
    ) -> Command:
        return self.until_command(
            Result(operation_id=command.operation_id, outcome=outcome), limit=limit
        )

    def to(self, verb: Verb) -> Command:
        """Answers everything with success until ``verb`` is asked for."""
        command = self.until_command()
        while command.verb is not verb:
            command = self.answer(command)
        return command

    def to_confirmed(self) -> Incident:
        """Answers the trim with success and goes on until the first incident is confirmed."""
        results = [done(self.to(Verb.TRIM))]
        for _ in range(100):
            self.tick(*results)
            results = []
            if self.open[0].phase is IncidentPhase.CONFIRMED:
                return self.open[0]
        raise AssertionError("not confirmed within 100 assessments")

    def renew(self, growth: int = 0) -> None:
        self.number += 1
        self.growth, self.suspect = growth, False

    def run(self, ticks: int, *results: Result) -> None:
        self.tick(*results)
        for _ in range(ticks - 1):
            self.tick()

    @property
    def open(self) -> list[Incident]:
        return self.governor.state.incidents

    @property
    def ended(self) -> list[Incident]:
        return [
            event.incident
            for event in self.events
            if event.type in (EventType.ENDED, EventType.CLEARED)
        ]

    @property
    def verbs(self) -> list[Verb]:
        return [command.verb for command in self.commands]


def done(command: Command, outcome: Outcome = Outcome.SUCCEEDED, message: str = "") -> Result:
    return Result(operation_id=command.operation_id, outcome=outcome, message=message)
