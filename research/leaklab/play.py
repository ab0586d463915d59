"""Plays one real case: replica, clients, and what its supervisor found and did."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leaklab import replicas
from leaklab.clients import ClientCounts, Clients
from leaklab.real_cases import RealCase
from plimsoll_api.incident_record import IncidentRecord, Reason, StepOutcome
from plimsoll_cli.local import runner
from plimsoll_cli.local.plan import Plan

POLL_S = 0.5
SETTLE_S = 5.0
"""Clients go on for so long after the end of the incident: a broken stream would show."""
DISRUPTIVE = ("Drain", "WorkerRestart", "EngineRestart")


@dataclass
class Played:
    """``incident`` is the one of the right kind, else the first that was confirmed, if any. Times
    are seconds since the clients began."""

    case: RealCase
    incident: IncidentRecord | None
    began: float
    counts: ClientCounts
    others: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def found(self) -> bool:
        one = self.incident
        return one is not None and one.kind is self.case.kind and stood_by(one)

    @property
    def named(self) -> bool:
        """Whether segment and process are the right ones, too."""
        if not self.found or self.incident is None:
            return False
        counts = self.incident.attribution
        return self.case.segment is None or (
            counts.segment == self.case.segment.value and counts.process == self.case.process
        )

    @property
    def cured(self) -> bool:
        return self.found and self.incident is not None and self.incident.reason is self.case.cure

    def row(self) -> dict[str, Any]:
        case, one = self.case, self.incident
        return {
            "case": case.name,
            "fault": case.fault,
            "expected": {
                "kind": case.kind.value,
                "segment": case.segment.value if case.segment else None,
                "process": case.process,
                "cure": case.cure.value,
            },
            "found": one and {
                "kind": one.kind.value,
                "segment": one.attribution.segment,
                "process": one.attribution.process,
                "cure": one.reason.value if one.reason else None,
                "phase": one.phase.value,
                "open_s": round(one.opened_at - self.began, 1),
                "confirm_s": self._since(one.confirmed_at),
                "end_s": self._since(one.ended_at),
                "bytes_per_s": round(one.attribution.bytes_per_s or 0.0) or None,
                "confidence": one.attribution.confidence,
                "consumed_ratio": round(one.consumed_ratio, 3),
                "returned_bytes": one.returned_bytes,
                "steps": [f"{s.step} {s.outcome.value}" for s in one.timeline],
            },
            "right": {"kind": self.found, "named": self.named, "cured": self.cured},
            "others": self.others,
            "clients": {k: v for k, v in vars(self.counts).items() if v},
            "troubles": self.troubles[:5],
        }  # fmt: skip

    def _since(self, at: float | None) -> float | None:
        return round(at - self.began, 1) if at is not None else None


def stood_by(incident: IncidentRecord) -> bool:
    """Whether it was confirmed, or cured by a trim before that."""
    return incident.confirmed_at is not None or incident.reason is Reason.TRIM


def disruptions(incident: IncidentRecord) -> list[str]:
    """The disruptive steps of an incident that were sent to the engine."""
    shown = (StepOutcome.SKIPPED, StepOutcome.WOULD)
    return [s.step for s in incident.timeline if s.step in DISRUPTIVE and s.outcome not in shown]


def plan_of(case: RealCase, root: Path, models: dict[str, Path], plain: bool) -> Plan:
    name = case.name.replace("_", "-")
    if plain:
        once = f"--once={root / 'leaked'}"
        root.mkdir(parents=True, exist_ok=True)
        return replicas.plain(name, root, case.policy, os.environ, case.fault, once)
    model = models[case.model]
    return replicas.engine(name, root, model, case.policy, os.environ, case.fault, case.flags)


async def play(case: RealCase, its_plan: Plan, plain: bool) -> Played:
    """Until an incident of the case's kind has ended, or the case's time is over.

    A fault of our frontend is there again after its restart, and its leak goes on with the load:
    the clients go home when the restart begins, so that the verdict is on the restart alone.
    """
    troubles: list[str] = []
    async with runner.run_replica(its_plan, troubles.append):
        began = time.time()
        clients = Clients(
            its_plan.serving_url, case.shape, case.per_s, case.long_streams, case.busy_s,
            case.rest_s,
        )  # fmt: skip
        load = None if plain else asyncio.create_task(clients.run())
        try:
            while time.time() - began < case.limit_s:
                await asyncio.sleep(POLL_S)
                its = [one for one in replicas.journal(its_plan) if one.kind is case.kind]
                if any(one.ended for one in its):
                    await asyncio.sleep(0 if plain else SETTLE_S)
                    break
                if load and case.process == "frontend" and any(map(disruptions, its)):
                    load.cancel()
        finally:
            if load:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
    found = replicas.journal(its_plan)
    right = [one for one in found if one.kind is case.kind and stood_by(one)]
    confirmed = [one for one in found if stood_by(one)]
    chosen = next(iter(right or confirmed or found), None)
    others = [f"{one.kind} {one.phase} {one.reason}" for one in found if one is not chosen]
    return Played(case, chosen, began, clients.counts, others, troubles)
