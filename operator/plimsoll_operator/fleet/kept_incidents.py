"""Which incidents are deleted, so that a person can read them and a hostile pod cannot fill etcd.

A client with the token of a supervised pod can write incidents of that pod, and can leave them all
open. So the open ones are counted as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from plimsoll_api.incidents import ENDED, IncidentPhase
from plimsoll_api.times import unix_seconds
from plimsoll_operator.kinds import Object

KEPT_OF_POD = 10
"""Half of the names that a pod has (``plimsoll_api.leakincident.MAX_OF_POD``): one is free."""
KEPT_OPEN = 500
"""Open incidents of one service or policy: one for each replica, and some more."""
KEPT_OF_NAMESPACE = 2000
_SUSPECTED = frozenset({None, IncidentPhase.OPEN, IncidentPhase.TRIMMING})


def surplus(
    incidents: Iterable[Object], kept: int, now: str, least_age_s: float, elsewhere: int = 0
) -> list[Object]:
    """Return the incidents of a service or policy that are too many, oldest first.

    At most ``kept`` that have ended are left, :data:`KEPT_OPEN` open ones, :data:`KEPT_OF_POD` of a
    pod, and :data:`KEPT_OF_NAMESPACE` together with the ``elsewhere`` ones of the namespace. Ended
    ones go first; the newest that was confirmed stays, and so does what is younger than
    ``least_age_s``. ``now`` is RFC 3339.
    """
    order = sorted(incidents, key=lambda one: (not _ended(one), _created(one)))
    newest = max(filter(_confirmed, order), key=_created, default=None)
    free = {_uid(one) for one in order if one is not newest and _old(one, now, least_age_s)}
    of_pods: dict[str, list[Object]] = defaultdict(list)
    for one in order:
        of_pods[str(one["spec"].get("pod"))].append(one)
    gone: dict[str, Object] = {}

    def shed(some: list[Object], allowed: int) -> None:
        left = [one for one in some if _uid(one) not in gone]
        over = max(0, len(left) - allowed)
        for one in [one for one in left if _uid(one) in free][:over]:
            gone[_uid(one)] = one

    for some in of_pods.values():
        shed(some, KEPT_OF_POD)
    shed([one for one in order if _ended(one)], kept)
    shed([one for one in order if not _ended(one)], KEPT_OPEN)
    shed(order, max(0, KEPT_OF_NAMESPACE - elsewhere))
    return sorted(gone.values(), key=_created)


def _uid(incident: Object) -> str:
    meta = incident["metadata"]
    return str(meta.get("uid") or meta["name"])


def _created(incident: Object) -> str:
    return str(incident["metadata"].get("creationTimestamp") or "")


def _ended(incident: Object) -> bool:
    return (incident.get("status") or {}).get("phase") in ENDED


def _confirmed(incident: Object) -> bool:
    status = incident.get("status") or {}
    return bool(status.get("confirmedAt")) or status.get("phase") not in {*_SUSPECTED, *ENDED}


def _old(incident: Object, now: str, least_age_s: float) -> bool:
    """Whether it may go. The API server wrote the time."""
    try:
        return unix_seconds(now) - unix_seconds(_created(incident)) >= least_age_s
    except (ValueError, OverflowError):
        return False
