"""An incident as lines of text: used by the live view, the list of incidents and the story."""

from __future__ import annotations

from rich.text import Text

from plimsoll_api.incident_record import IncidentRecord, StepOutcome, StepRecord
from plimsoll_api.incidents import IncidentPhase
from plimsoll_api.times import clock_time
from plimsoll_api.units import format_bytes

SHOWN_STEPS = 8
PHASE_STYLE = {
    IncidentPhase.RESOLVED: "bold green",
    IncidentPhase.UNRESOLVED: "bold red",
    IncidentPhase.SUPPRESSED: "bold magenta",
}
OUTCOME_STYLE = {
    StepOutcome.SUCCEEDED: "green",
    StepOutcome.FAILED: "red",
    StepOutcome.REFUSED: "red",
    StepOutcome.BEGUN: "yellow",
}


def bytes_change(step: StepRecord) -> str:
    """``1.2 GiB -> 310 MiB``, or what is known of it; empty where nothing is."""
    before, after = step.before_bytes, step.after_bytes
    if before is None and after is None:
        return ""
    known = [("?" if value is None else format_bytes(value)) for value in (before, after)]
    return " -> ".join(known)


def headline(incident: IncidentRecord) -> str:
    """Say what grew, how much and how fast, in one line."""
    seen = incident.attribution
    parts = [incident.kind.value]
    if seen.segment:
        where = f"in {seen.segment}" + (f" of the {seen.process}" if seen.process else "")
        parts.append(where)
    if seen.bytes:
        parts.append(format_bytes(seen.bytes))
    if seen.bytes_per_s:
        parts.append(f"{format_bytes(seen.bytes_per_s)}/s")
    if seen.bytes_per_request:
        parts.append(f"{format_bytes(seen.bytes_per_request)} a request")
    return ", ".join(parts)


def incident_lines(incident: IncidentRecord, width: int, plain: bool = False) -> list[Text]:
    """Write the head of an incident and its newest steps, each cut to ``width`` columns.

    ``plain`` marks a cut in ASCII.
    """
    phase = Text(incident.phase.value, style=PHASE_STYLE.get(incident.phase, "bold yellow"))
    ending = f" ({incident.reason.value})" if incident.reason else ""
    head = Text.assemble(
        f"{clock_time(incident.opened_at)} ", (incident.name, "bold"), " ", phase, ending, ": ",
        headline(incident),
    )  # fmt: skip
    lines = [head, *(step_line(step) for step in incident.timeline[-SHOWN_STEPS:])]
    for line in lines:
        if plain and line.cell_len > width:
            line.truncate(width - 3)
            line.append("...")
        line.truncate(width, overflow="ellipsis")
    return lines


def step_line(step: StepRecord) -> Text:
    """Return one step of the timeline: its time, outcome, sizes and message."""
    outcome = Text(step.outcome.value, style=OUTCOME_STYLE.get(step.outcome, ""))
    change, message = bytes_change(step), step.message.replace("\n", " ")
    rest = "  ".join(part for part in (change, message) if part)
    return Text.assemble(
        f"  {clock_time(step.time)} ", f"{step.step} ", outcome, "  " if rest else "", rest
    )
