"""One incident as every command shows it: a LeakIncident's content, from a cluster or a journal."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.text import Text

from plimsoll_api.incident_object import spec_of, status_of
from plimsoll_api.incident_record import IncidentRecord
from plimsoll_api.incident_story import Story, StoryStep, story_of_object
from plimsoll_api.leakincident import LeakIncidentSpec, LeakIncidentStatus
from plimsoll_api.names import POLICY_KIND, SERVICE_KIND
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.times import clock_time
from plimsoll_cli.targets import parse


class IncidentView(msgspec.Struct, kw_only=True):
    """A LeakIncident's content. Times are RFC 3339, as in the object."""

    name: str
    namespace: str
    spec: LeakIncidentSpec
    status: LeakIncidentStatus

    @property
    def story(self) -> Story:
        """What happened, as ordered facts."""
        return story_of_object(self.name, self.spec, self.status)


class UnreadableError(ValueError):
    """An object that is no LeakIncident of this version; the message names it."""


def of_object(item: dict[str, Any]) -> IncidentView:
    """From a LeakIncident; UnreadableError where it has another shape."""
    meta = item.get("metadata") or {}
    name = str(meta.get("name", "?"))
    try:
        return IncidentView(
            name=name,
            namespace=str(meta.get("namespace", "")),
            spec=msgspec.convert(item.get("spec"), LeakIncidentSpec),
            status=msgspec.convert(item.get("status") or {}, LeakIncidentStatus),
        )
    except msgspec.ValidationError as error:
        raise UnreadableError(f"LeakIncident {name}: {error}") from None


def of_journal(incident: IncidentRecord) -> IncidentView:
    """From a replica that runs on this machine: service and replica have one name there."""
    service = incident.name.rpartition("-")[0]
    return IncidentView(
        name=incident.name,
        namespace="",
        spec=spec_of(incident, ServiceRef(service), service, "engine"),
        status=status_of(incident),
    )


def target(incident: IncidentView) -> str:
    """Name what the incident is about, as other commands take it: a service, or KIND/NAME."""
    found = incident.spec.workload_ref
    return found.name if found.kind == SERVICE_KIND else f"{found.kind.lower()}/{found.name}"


def is_of(incident: IncidentView, name: str) -> bool:
    """Whether ``name`` is the incident's service, workload or policy, or its KIND/NAME."""
    spec = incident.spec
    policy = spec.policy_ref.name if spec.policy_ref else None
    if "/" not in name:
        return name in (spec.workload_ref.name, policy)
    wanted = parse(name)
    if wanted.kind == POLICY_KIND:
        return wanted.name == policy
    if wanted.is_pod:
        return wanted.name == spec.pod
    return (spec.workload_ref.kind, spec.workload_ref.name) == (wanted.kind, wanted.name)


SHOWN_STEPS = 8
STYLE = {
    "Succeeded": "green", "Failed": "red", "Refused": "red", "Begun": "yellow",
    "Requested": "yellow",
    "Resolved": "bold green", "Unresolved": "bold red", "Suppressed": "bold magenta",
}  # fmt: skip
"""Of phases and of outcomes of steps."""
OPEN_STYLE = "bold yellow"


def state(story: Story) -> Text:
    """Return where the incident stands, in its colour."""
    text = Text(story.phase, style=STYLE.get(story.phase, OPEN_STYLE))
    return text.append(story.state.removeprefix(story.phase), style="default")


def cut(line: Text, width: int, plain: bool) -> Text:
    """Cut a line to ``width`` columns; ``plain`` marks the cut in ASCII."""
    if line.cell_len > width:
        line.truncate(width - 3 if plain else width, overflow="crop" if plain else "ellipsis")
        line.append("..." if plain else "")
    return line


def incident_lines(story: Story, width: int, plain: bool = False) -> list[Text]:
    """Write the head of an incident and its newest steps, each cut to ``width`` columns."""
    head = Text.assemble(
        f"{clock_time(story.opened_at)} ", (story.name, "bold"), " ", state(story), ": ",
        story.headline,
    )  # fmt: skip
    steps = (
        step_line(f"{clock_time(step.at)} {step.name} ", step)
        for step in story.steps[-SHOWN_STEPS:]
    )
    return [cut(line, width, plain) for line in (head, *steps)]


def step_line(start: str, step: StoryStep, width: int = 0) -> Text:
    """Return one step after ``start``: its outcome, at least ``width`` columns, and its text."""
    outcome = (f"{step.outcome:<{width}}", STYLE.get(step.outcome, ""))
    return Text.assemble("  ", start, outcome, "  " if step.text else "", step.text)
