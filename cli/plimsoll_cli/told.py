"""One incident as every command shows it: a LeakIncident's content, from a cluster or a journal."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.record.incident import (
    IncidentAttribution,
    IncidentSpec,
    IncidentStatus,
    spec_of,
    status_of,
)

ENDED = ("Resolved", "Unresolved", "Suppressed")
UNKNOWN = IncidentStatus(
    phase="Open",
    attribution=IncidentAttribution(confidence=0.0, bytes=0, evidence=[]),
    timeline=[],
    consumed_percent=0,
)


class Told(msgspec.Struct, kw_only=True):
    """Times are RFC 3339, as in the object; :func:`seconds` reads them."""

    name: str
    namespace: str
    spec: IncidentSpec
    status: IncidentStatus

    @property
    def ended(self) -> bool:
        return self.status.phase in ENDED


class UnreadableError(ValueError):
    """An object that is no LeakIncident of this version; the message names it."""


def of_object(item: dict[str, Any]) -> Told:
    """From a LeakIncident; UnreadableError where it has another shape."""
    meta = item.get("metadata") or {}
    name = str(meta.get("name", "?"))
    status = dict(item.get("status") or {})
    # A supervisor writes the object first and its status after that.
    seen = {"confidence": 0.0, "bytes": 0, "evidence": []} | (status.get("attribution") or {})
    whole = msgspec.to_builtins(UNKNOWN) | status | {"attribution": seen}
    try:
        return Told(
            name=name,
            namespace=str(meta.get("namespace", "")),
            spec=msgspec.convert(item.get("spec"), IncidentSpec),
            status=msgspec.convert(whole, IncidentStatus),
        )
    except msgspec.ValidationError as error:
        raise UnreadableError(f"LeakIncident {name}: {error}") from None


def of_journal(incident: Incident) -> Told:
    """From a replica that runs on this machine: service and replica have one name there."""
    service = incident.name.rpartition("-")[0]
    return Told(
        name=incident.name,
        namespace="",
        spec=spec_of(incident, service, service, "engine"),
        status=status_of(incident),
    )


def seconds(text: str | None) -> float | None:
    """Unix seconds of an RFC 3339 time; None of none."""
    return None if text is None else datetime.fromisoformat(text).timestamp()
