"""One incident as every command shows it: a LeakIncident's content, from a cluster or a journal."""

from __future__ import annotations

from typing import Any

import msgspec

from plimsoll_api.incident_object import spec_of, status_of
from plimsoll_api.incident_record import IncidentRecord
from plimsoll_api.incident_story import Story
from plimsoll_api.incident_story import of_object as story_of
from plimsoll_api.leakincident import LeakIncidentSpec, LeakIncidentStatus
from plimsoll_api.names import POLICY_KIND, SERVICE_KIND
from plimsoll_api.supervisor_config import ServiceRef
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
        return story_of(self.name, self.spec, self.status)


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
