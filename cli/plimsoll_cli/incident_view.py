"""Common form of incidents from a cluster and from a local journal, and their text lines."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.text import Text

from plimsoll_api.incident_object import make_spec, make_status
from plimsoll_api.incident_record import IncidentRecord
from plimsoll_api.incident_story import Story, StoryStep, make_object_story
from plimsoll_api.leakincident import LeakIncidentSpec, LeakIncidentStatus
from plimsoll_api.names import POLICY_KIND, SERVICE_KIND
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.times import format_clock_time
from plimsoll_cli.targets import parse_target


class IncidentView(msgspec.Struct, kw_only=True):
    """Incident in the form of a LeakIncident; times are in RFC 3339."""

    name: str
    namespace: str
    spec: LeakIncidentSpec
    status: LeakIncidentStatus

    @property
    def story(self) -> Story:
        """Facts about the incident for display."""
        return make_object_story(self.name, self.spec, self.status)


class UnreadableError(ValueError):
    """Raised for an object that is not a valid LeakIncident; the message names the object."""


def make_view_from_object(item: dict[str, Any]) -> IncidentView:
    """Return the view of a LeakIncident object. Raises UnreadableError."""
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


def make_view_from_journal(incident: IncidentRecord) -> IncidentView:
    """Return the view of an incident in a local journal; the pod has the service's name."""
    service = incident.name.rpartition("-")[0]
    return IncidentView(
        name=incident.name,
        namespace="",
        spec=make_spec(incident, ServiceRef(service), service, "engine"),
        status=make_status(incident),
    )


def format_target(incident: IncidentView) -> str:
    """Return the incident's service (NAME) or workload (KIND/NAME) as an argument for commands."""
    found = incident.spec.workload_ref
    return found.name if found.kind == SERVICE_KIND else f"{found.kind.lower()}/{found.name}"


def matches_target(incident: IncidentView, name: str) -> bool:
    """Report whether ``name`` names the incident's service, workload, pod or policy.

    ``name`` is NAME or KIND/NAME. A pod is only found as ``pod/NAME``.
    """
    spec = incident.spec
    policy = spec.policy_ref.name if spec.policy_ref else None
    if "/" not in name:
        return name in (spec.workload_ref.name, policy)
    wanted = parse_target(name)
    if wanted.kind == POLICY_KIND:
        return wanted.name == policy
    if wanted.is_pod:
        return wanted.name == spec.pod
    return (spec.workload_ref.kind, spec.workload_ref.name) == (wanted.kind, wanted.name)


MAX_SHOWN_STEPS = 8
STYLE_BY_STATE = {
    "Succeeded": "green", "Failed": "red", "Refused": "red", "Begun": "yellow",
    "Requested": "yellow",
    "Resolved": "bold green", "Unresolved": "bold red", "Suppressed": "bold magenta",
}  # fmt: skip
"""Styles by outcome of a step, or by final phase of an incident."""
OPEN_STATE_STYLE = "bold yellow"


def format_state(story: Story) -> Text:
    """Return the incident's state as coloured text."""
    text = Text(story.phase, style=STYLE_BY_STATE.get(story.phase, OPEN_STATE_STYLE))
    return text.append(story.state.removeprefix(story.phase), style="default")


def truncate(line: Text, width: int, ascii_only: bool) -> Text:
    """Return ``line`` cut to ``width`` columns; if ``ascii_only``, with an ellipsis in ASCII."""
    if line.cell_len > width:
        line.truncate(
            width - 3 if ascii_only else width, overflow="crop" if ascii_only else "ellipsis"
        )
        line.append("..." if ascii_only else "")
    return line


def format_incident(story: Story, width: int, ascii_only: bool = False) -> list[Text]:
    """Return the headline and the newest steps as lines of at most ``width`` columns."""
    head = Text.assemble(
        f"{format_clock_time(story.opened_at)} ", (story.name, "bold"), " ", format_state(story),
        ": ", story.headline,
    )  # fmt: skip
    steps = (
        format_step(f"{format_clock_time(step.at)} {step.name} ", step)
        for step in story.steps[-MAX_SHOWN_STEPS:]
    )
    return [truncate(line, width, ascii_only) for line in (head, *steps)]


def format_step(start: str, step: StoryStep, width: int = 0) -> Text:
    """Return one line: ``start``, the step's outcome in ``width`` columns, and its text."""
    outcome = (f"{step.outcome:<{width}}", STYLE_BY_STATE.get(step.outcome, ""))
    return Text.assemble("  ", start, outcome, "  " if step.text else "", step.text)
