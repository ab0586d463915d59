"""What the cases wait for: service, and what the supervisor confirms."""

from __future__ import annotations

import time

from plimsoll_api.incidents import IncidentKind
from plimsoll_sidecar.govern.incident import Incident
from tests.conformance.rig import START_S, Rig, until


def served(rig: Rig, seconds: float) -> None:
    """An engine that has served for so long in its present life."""
    until(rig.serving, START_S, "an engine that serves")
    rig.load()
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        assert rig.serving(), rig.log()
        time.sleep(1.0)


def confirmed(rig: Rig, kind: IncidentKind, since: float) -> Incident | None:
    return next(
        (
            one
            for one in rig.incidents()
            if one.kind is kind and one.opened_at >= since and one.confirmed_at is not None
        ),
        None,
    )


def until_confirmed(
    rig: Rig, kind: IncidentKind, since: float, limit_s: float
) -> tuple[float, Incident]:
    """Seconds from ``since`` (Unix time) to the confirmation."""
    until(lambda: confirmed(rig, kind, since), limit_s, f"{kind.value}: {rig.log()}")
    incident = confirmed(rig, kind, since)
    assert incident is not None
    assert incident.confirmed_at is not None
    return incident.confirmed_at - since, incident
