"""The supervisor's view beyond its own pod: other replicas, and a multi-node group. Pure.

The other replicas are a suspicion's control group. Replicas under one load grow alike if the cause
is what they share, and a replica grows alone if the cause is its own. The cause has one of three
scopes: this replica, its revision, or all revisions of the service. A leak and a growth without one
have these scopes with different probabilities, which are the assumptions of the model:

- A leak is often of one replica, which met a rare request or error (1/2); of the revision, whose
  code every request passes (2/5); seldom older than the revision, for it would have been found
  (1/10).
- A growth without a leak comes with what all replicas have: warm-up, caches and pools that fill,
  load (7/10). It may come with a new revision (1/5), and is seldom of one replica: a task that only
  it was given (1/10).

Where a replica shares the cause, its growth is taken to be normal about that of this one, otherwise
about zero, with a deviation of half of this one's growth in either case: loads and ages that differ
by up to two times are let through. With ``x``, the other's growth as a share of this one's, its
logarithm of the likelihood ratio is ``(x - 1/2) / (1/2)**2``: with ``x`` between 0 and 1, from -2
to 2. The replicas' sum gives the likelihood of each scope, and

    log odds = log(sum of P(scope | leak) * likelihood) - log(the same for no leak).

Without replicas to compare with, that is 0. However many there are, the probabilities above bound
it: at most log 5 for a leak, and log 7 against one. It is added to the log odds of the growth by
itself (``odds.py``), as independent evidence.

RESIN (Lou et al., OSDI 2022) finds leaks of a fleet by comparing the memory of many hosts, in
buckets of usage. A service has few replicas, so here each weighs as much as its growth tells.

The assessment of a multi-node group is made of those of its pods (:func:`joined`). A group has one
incident of a kind, at its leader. A leak of a worker is the leader's suspicion, and the worker's
budget takes the place of its own for as long as that incident is open: what a restart brought back
is measured where the leak was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from plimsoll_api.assessment import Assessment, BudgetState, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.peers import Peer, PeerGrowth
from plimsoll_api.units import format_bytes

IF_LEAK = (0.5, 0.4, 0.1)
IF_NO_LEAK = (0.1, 0.2, 0.7)
"""Probabilities that the cause is of this replica, of its revision, of all revisions."""
DEVIATION = 0.5
COMPARABLE = 0.5
"""A replica counts once it has had this share of the time since the warm-up, and of the requests a
second, of the one that grows: what it has not met yet says nothing. More of either is no harm."""
SAME_GROWTH = 2.0
"""What the operator published of this replica lags behind. A growth that has become larger or
smaller by more than this factor is another one than the published."""
LEAST_CHANCE = 0.0005
"""A suspicion states its chance in tenths of a percent."""


@dataclass(frozen=True, slots=True)
class PeerEvidence:
    """``log_odds`` of a leak by the other replicas alone (natural), and in words what they do."""

    log_odds: float
    sentence: str


def weighed(assessment: Assessment, pod: str, peers: Sequence[Peer]) -> Assessment:
    """Return ``assessment`` of ``pod`` with the evidence of ``peers``, which may include the pod.

    The chance of each suspected growth changes, and its evidence has one sentence more. Nothing
    else does: the rules alone confirm. Unchanged where there is nothing to compare with.
    """
    mine = next((one for one in peers if one.pod == pod), None)
    if mine is None:
        return assessment
    found = [_weighed(one, mine, peers) for one in assessment.suspicions]
    return replace(assessment, suspicions=found)


def evidence(
    own: PeerGrowth, same: Iterable[PeerGrowth], others: Iterable[PeerGrowth]
) -> PeerEvidence | None:
    """Compare ``own`` growth with that of replicas of the ``same`` revision and of ``others``.

    None if none of them is comparable.
    """
    siblings = [_share(own, one) for one in same if _comparable(own, one)]
    strangers = [_share(own, one) for one in others if _comparable(own, one)]
    if not siblings and not strangers:
        return None
    revision = math.fsum(_log_ratio(share) for share in siblings)
    service = revision + math.fsum(_log_ratio(share) for share in strangers)
    scopes = (0.0, revision, service)
    log_odds = _log_mean(IF_LEAK, scopes) - _log_mean(IF_NO_LEAK, scopes)
    counts = [
        f"{sum(share >= 0.5 for share in shares)} of {len(shares)} {name}"
        for shares, name in ((siblings, "of its revision"), (strangers, "of other revisions"))
        if shares
    ]
    return PeerEvidence(
        log_odds, f"of the replicas with comparable age and load, {', '.join(counts)} grow alike"
    )


def _weighed(suspicion: Suspicion, mine: Peer, peers: Sequence[Peer]) -> Suspicion:
    own = _memory(mine, suspicion.kind)
    if own is None or not _same_growth(own.bytes, suspicion.bytes):
        return suspicion
    same: list[PeerGrowth] = []
    others: list[PeerGrowth] = []
    for one in peers:
        theirs = _memory(one, suspicion.kind)
        if theirs is not None and one.pod != mine.pod and one.workload == mine.workload:
            (same if one.revision == mine.revision else others).append(theirs)
    found = evidence(own, same, others)
    if found is None:
        return suspicion
    before = min(1 - LEAST_CHANCE, max(LEAST_CHANCE, suspicion.confidence))
    log_odds = math.log(before / (1 - before)) + found.log_odds
    chance = 1 / (1 + math.exp(-log_odds))
    sentence = f"{found.sentence}: with that, the chance of a leak is {chance:.1%}"
    return replace(suspicion, confidence=round(chance, 3), evidence=[*suspicion.evidence, sentence])


def _memory(peer: Peer, kind: IncidentKind) -> PeerGrowth | None:
    if kind is IncidentKind.HOST_GROWTH:
        return peer.host
    return peer.device if kind is IncidentKind.DEVICE_GROWTH else None


def _same_growth(published: int, suspected: int) -> bool:
    least, most = sorted((published, suspected))
    return 0 < most <= SAME_GROWTH * least


def _comparable(own: PeerGrowth, other: PeerGrowth) -> bool:
    if own.age_s == 0 or other.age_s < COMPARABLE * own.age_s:
        return False
    return other.requests * own.age_s >= COMPARABLE * own.requests * other.age_s


def _share(own: PeerGrowth, other: PeerGrowth) -> float:
    """Return the other's growth as a share of the own; what is more than all is no more."""
    return min(1.0, other.bytes / own.bytes) if own.bytes else 1.0


def _log_ratio(share: float) -> float:
    return (share - 0.5) / DEVIATION**2


def _log_mean(weights: Sequence[float], logs: Sequence[float]) -> float:
    """Return the logarithm of the weighted mean of the exponentials of ``logs``."""
    most = max(logs)
    parts = (weight * math.exp(log - most) for weight, log in zip(weights, logs, strict=True))
    return most + math.log(math.fsum(parts))


LEAKS = (IncidentKind.HOST_GROWTH, IncidentKind.DEVICE_GROWTH)
"""What the leader tells for its group. Workers tell the rest themselves."""
MINE = ""
UNKNOWN = BudgetState()


def joined(
    own: Assessment, members: Mapping[str, Assessment | None], origins: Mapping[IncidentKind, str]
) -> Assessment:
    """Return what the leader knows of its group.

    ``members`` holds the assessments of the other pods, None for one that says nothing now.
    ``origins`` maps the kinds of open incidents to the pod that they began in, :data:`MINE` for the
    leader: until its end an incident follows that pod's memory.
    """
    found, warm = own, own.warm
    for kind in LEAKS:
        pod = origins.get(kind)
        if pod is None:
            pod = _worst(kind, own, members)
        theirs = own if pod == MINE else members.get(pod)
        suspicion = _suspicion(theirs, kind)
        if suspicion is not None:
            others = _others(kind, pod, own, members)
            suspicion = replace(suspicion, pod=pod or None, evidence=[*suspicion.evidence, *others])
        kept = [one for one in found.suspicions if one.kind is not kind]
        found = replace(found, suspicions=[*kept, *([suspicion] if suspicion else [])])
        if pod != MINE:
            found = _measured(found, kind, theirs)
            warm = warm and theirs is not None and theirs.warm
    return replace(found, warm=warm)


def _measured(own: Assessment, kind: IncidentKind, theirs: Assessment | None) -> Assessment:
    """``own`` with the budget of another pod; unknown where that says nothing."""
    if kind is IncidentKind.HOST_GROWTH:
        return replace(own, host=(theirs.host if theirs else None) or UNKNOWN)
    return replace(
        own,
        device=(theirs.device if theirs else None) or UNKNOWN,
        reserved=theirs.reserved if theirs else None,
    )


def _worst(kind: IncidentKind, own: Assessment, members: Mapping[str, Assessment | None]) -> str:
    """Return the pod with the worst suspicion, the leader if no pod has one."""
    worst, pod = _rank(_suspicion(own, kind)), MINE
    for name in sorted(members):
        rank = _rank(_suspicion(members[name], kind))
        if rank > worst:
            worst, pod = rank, name
    return pod


def _others(
    kind: IncidentKind, pod: str, own: Assessment, members: Mapping[str, Assessment | None]
) -> list[str]:
    """Name the other pods that leak too: their leaks join this one."""
    everyone = {"the leader": own if pod != MINE else None} | {
        f"pod {name}": members[name] for name in sorted(members) if name != pod
    }
    return [
        f"{name} grows too: {format_bytes(suspicion.bytes)}"
        for name, assessment in everyone.items()
        if (suspicion := _suspicion(assessment, kind)) is not None
    ]


def _suspicion(assessment: Assessment | None, kind: IncidentKind) -> Suspicion | None:
    found = [one for one in assessment.suspicions if one.kind is kind] if assessment else []
    return max(found, key=_rank, default=None)


def _rank(suspicion: Suspicion | None) -> tuple[bool, float, int]:
    if suspicion is None:
        return False, -1.0, 0
    return suspicion.over_budget, suspicion.consumed_ratio, suspicion.bytes
