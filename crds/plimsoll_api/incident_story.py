"""Facts about an incident in display order: what grew, which budget, what was done, the outcome.

A supervisor's record and a LeakIncident are both converted to a :class:`Story`, which the program's
views only format.
"""

from __future__ import annotations

from typing import NamedTuple

from plimsoll_api.incident_object import make_spec, make_status
from plimsoll_api.incident_record import IncidentRecord, StepOutcome
from plimsoll_api.incidents import ENDED_PHASES, IncidentKind, IncidentPhase
from plimsoll_api.leakincident import (
    IncidentAttribution,
    IncidentStep,
    LeakIncidentSpec,
    LeakIncidentStatus,
)
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.times import parse_rfc3339
from plimsoll_api.units import format_bytes

BUDGETED_KINDS = frozenset(
    {IncidentKind.HOST_GROWTH, IncidentKind.DEVICE_GROWTH, IncidentKind.ORPHAN_DEVICE_MEMORY}
)
"""Kinds that consume a leak budget."""


class StoryStep(NamedTuple):
    """Step of an incident; ``at`` is in Unix seconds, and unknown bytes are None."""

    at: float
    name: str
    outcome: str
    before_bytes: int | None
    after_bytes: int | None
    message: str

    @property
    def memory_change(self) -> str:
        """Memory before and after the step, such as ``1.2 GiB -> 310 MiB (890 MiB back)``."""
        before, after = self.before_bytes, self.after_bytes
        if before is None and after is None:
            return ""
        sizes = " -> ".join("?" if size is None else format_bytes(size) for size in (before, after))
        returned = 0 if before is None or after is None else before - after
        return f"{sizes} ({format_bytes(returned)} back)" if returned > 0 else sizes

    @property
    def text(self) -> str:
        """Memory change and message of the step in one line."""
        message = self.message.replace("\n", " ")
        return "  ".join(part for part in (self.memory_change, message) if part)


class Story(NamedTuple):
    """Facts about an incident in display order; times are in Unix seconds.

    ``spent_percent`` is None for a kind without a leak budget. ``outcome`` and ``ended_at`` are
    None while the incident is open.
    """

    name: str
    kind: str
    phase: str
    outcome: str | None
    opened_at: float
    attribution: IncidentAttribution
    spent_percent: int | None
    steps: tuple[StoryStep, ...]
    returned_bytes: int | None
    message: str
    waiting_reason: str | None
    diagnostics: tuple[str, ...]
    ended_at: float | None

    @property
    def has_ended(self) -> bool:
        """Whether the incident is in a final phase."""
        return self.phase in ENDED_PHASES

    @property
    def state(self) -> str:
        """Phase and outcome, for example ``Resolved (WorkerRestart)``."""
        return f"{self.phase} ({self.outcome})" if self.outcome else self.phase

    @property
    def location(self) -> str:
        """Known location of the memory, such as `` in malloc_in_use of the worker in pod a``."""
        attribution = self.attribution
        text = f" in {attribution.segment}" if attribution.segment else ""
        text += f" of the {attribution.process}" if attribution.process else ""
        return text + (f" in pod {attribution.pod}" if attribution.pod else "")

    @property
    def rates(self) -> list[str]:
        """Growth rates, for example ``2.0 MiB an hour`` and ``90 B a request``."""
        pace = (
            (self.attribution.bytes_per_hour, "an hour"),
            (self.attribution.bytes_per_request, "a request"),
        )
        return [f"{format_bytes(size)} {each}" for size, each in pace if size and size > 0]

    @property
    def headline(self) -> str:
        """Kind, location, growth and rates of the incident as one line."""
        grown = self.attribution.bytes
        size = [format_bytes(grown)] if grown and grown > 0 else []
        return ", ".join([f"{self.kind}{self.location}", *size, *self.rates])

    @property
    def sentence(self) -> str:
        """Headline, budget, freed memory, outcome and message in one line, for Events and logs."""
        text = self.headline
        if self.spent_percent is not None:
            text += f", {self.spent_percent} % of the budget"
        if self.returned_bytes is not None:
            text += f", {format_bytes(self.returned_bytes)} were freed"
        if self.outcome is not None:
            text += f" ({self.outcome})"
        return f"{text}. {self.message}".strip()

    @property
    def memory(self) -> list[tuple[float, int]]:
        """Pairs of seconds since the start of the incident and the replica's memory in bytes."""
        points = [
            (step.at - self.opened_at, size)
            for step in self.steps
            if step.outcome != StepOutcome.BEGUN
            for size in (step.before_bytes, step.after_bytes)
            if size is not None
        ]
        if points and self.ended_at is not None and self.ended_at - self.opened_at > points[-1][0]:
            points.append(
                (self.ended_at - self.opened_at, points[-1][1])
            )  # measured at the end of the incident
        return points


def make_object_story(name: str, spec: LeakIncidentSpec, status: LeakIncidentStatus) -> Story:
    """Return the story of a LeakIncident; without a status, the incident is open."""
    opened = parse_rfc3339_or_none(spec.opened_at) or 0.0
    return Story(
        name=name,
        kind=str(spec.kind),
        phase=status.phase or IncidentPhase.OPEN,
        outcome=status.outcome,
        opened_at=opened,
        attribution=status.attribution or IncidentAttribution(),
        spent_percent=(status.consumed_percent or 0) if spec.kind in BUDGETED_KINDS else None,
        steps=tuple(_make_step(step, opened) for step in status.timeline),
        returned_bytes=status.returned_bytes,
        message=status.message or "",
        waiting_reason=status.waiting_reason,
        diagnostics=tuple(status.diagnostics),
        ended_at=parse_rfc3339_or_none(status.ended_at),
    )


def make_record_story(incident: IncidentRecord) -> Story:
    """Return the story of a supervisor's incident record."""
    spec = make_spec(incident, ServiceRef(""), "", "")
    return make_object_story(incident.name, spec, make_status(incident))


def parse_rfc3339_or_none(text: str | None) -> float | None:
    """Parse an RFC 3339 time to Unix seconds; return None if it is missing or malformed."""
    try:
        return None if text is None else parse_rfc3339(text)
    except (ValueError, OverflowError):
        return None


def _make_step(step: IncidentStep, opened: float) -> StoryStep:
    at = parse_rfc3339_or_none(step.time)
    return StoryStep(
        at=opened if at is None else at,
        name=step.step,
        outcome=step.outcome,
        before_bytes=step.before_bytes,
        after_bytes=step.after_bytes,
        message=step.message or "",
    )
