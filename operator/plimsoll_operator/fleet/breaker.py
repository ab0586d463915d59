"""The fleet's circuit breaker: at most so many services under disruptive remediation at once.

A supervisor restarts nothing without a slot Lease. Where more incidents are on their way than the
fleet may bear, the operator takes the free Leases of the services that must wait, and gives them
back as others finish. Only services with an open incident are touched: a quiet fleet costs no
write. The operator's hold expires like a supervisor's, so that without the operator each service's
own limit is what holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from plimsoll_operator.fleet.pods import ENDED
from plimsoll_operator.kinds import Object
from plimsoll_operator.store import Key, key_of

HOLDER = "plimsoll-operator"
DURATION_S = 120
RENEW_S = 40.0


@dataclass
class Turns:
    """Leases to ``take`` (or renew) and to ``give`` back."""

    take: list[Object] = field(default_factory=list)
    give: list[Object] = field(default_factory=list)
    held: int = 0
    waiting: int = 0


def turns(leases: list[Object], incidents: list[Object], limit: int) -> Turns:
    """Whose turn it is: the oldest incident's service first. ``limit`` counts held slots."""
    since: dict[Key, str] = {}
    for incident in incidents:
        key = key_of(incident)
        if key is None or (incident.get("status") or {}).get("phase") in ENDED:
            continue
        opened = incident["spec"]["openedAt"]
        since[key] = min(since.get(key, opened), opened)
    found = Turns(held=sum(holder(one) not in ("", HOLDER) for one in leases))
    candidates = [one for one in leases if holder(one) in ("", HOLDER)]
    waiting = [one for one in candidates if key_of(one) in since]
    waiting.sort(key=lambda one: (since[_key(one)], _key(one), one["metadata"]["name"]))
    found.waiting = len(waiting)
    free = max(0, limit - found.held)
    shut = waiting[free:]
    found.take = shut
    names = {(_key(one), one["metadata"]["name"]) for one in shut}
    found.give = [
        one
        for one in candidates
        if holder(one) == HOLDER and (_key(one), one["metadata"]["name"]) not in names
    ]
    return found


def holder(lease: Object) -> str:
    """Who has the Lease, empty where nobody."""
    return str((lease.get("spec") or {}).get("holderIdentity") or "")


def _key(lease: Object) -> Key:
    key = key_of(lease)
    assert key is not None  # it is in the store under its service
    return key
