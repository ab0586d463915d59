"""Handle events of LeakIncidents."""

from __future__ import annotations

from typing import Any

import kopf

from plimsoll_operator.kinds import INCIDENT
from plimsoll_operator.runtime.watches import Watches, registry


@kopf.on.event(INCIDENT.group, INCIDENT.version, INCIDENT.plural, registry=registry)
async def handle_leak_incident(event: kopf.RawEvent, memo: Watches, **_: Any) -> None:
    """Queue the service or policy of the incident."""
    memo.handle_event(INCIDENT, event["type"], dict(event["object"]))
