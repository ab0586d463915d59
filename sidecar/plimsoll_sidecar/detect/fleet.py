"""Compare growth with that of other replicas, and assess a multi-node group as a whole. No I/O.

The other replicas are the control group of a suspicion. Under the same load, all replicas that
share the cause of a growth show it. A replica grows alone if only this replica has the cause. A
cause has one of three scopes: this replica, its revision, or all revisions. The model assumes a
probability for each scope, which differs between a leak and other growth:

- A leak often affects one replica, which met a rare request or error (1/2). It may also affect the
  revision, because every request passes its code (2/5). Older leaks would have been found (1/10).
- Most other causes affect all replicas: warm-up, caches that fill, load (7/10). Some come with a
  new revision (1/5). Few affect one replica, such as a task that no other replica got (1/10).

The growth of another replica is modelled as normally distributed: around the growth of this replica
if both share the cause, and around zero if not. The standard deviation is half of this replica's
growth in both cases, which allows for loads and ages that differ by a factor of up to two. Let
``x`` be the growth of the other replica as a share of this replica's growth, from 0 to 1. The
log-likelihood ratio of the other replica is then ``(x - 1/2) / (1/2)**2``, from -2 to 2. The sum
over the replicas gives the likelihood of each scope, and

    log odds = log(sum of P(scope | leak) * likelihood) - log(the same for no leak).

The log odds are 0 if there is no replica to compare with. Because of the probabilities above, they
are at most log 5 for a leak and log 7 against a leak, for any number of replicas. They are added to
the log odds of the growth itself (``odds.py``), as independent evidence.

RESIN (Lou et al., OSDI 2022) also finds leaks by comparing the memory of many hosts, which it sorts
into buckets of usage. A service has few replicas, so each replica contributes its own likelihood
ratio instead.

:func:`combine_group` combines the assessments of the pods of a multi-node group. A group has at
most one incident of each kind, which belongs to its leader. If a worker leaks, the leader reports
the suspicion. While the incident is open, the budget of this worker replaces the leader's budget,
so that the effect of a restart is measured in the pod that leaked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from plimsoll_api.assessment import Assessment, BudgetState, Suspicion
from plimsoll_api.incidents import GROWTH_INCIDENT_KINDS, IncidentKind
from plimsoll_api.peers import Peer, PeerGrowth
from plimsoll_api.units import format_bytes

SCOPE_PROBABILITIES_IF_LEAK = (0.5, 0.4, 0.1)
SCOPE_PROBABILITIES_IF_NO_LEAK = (0.1, 0.2, 0.7)
"""Probabilities that the scope of the cause is this replica, its revision, or all revisions."""
GROWTH_DEVIATION_SHARE = 0.5
"""Standard deviation of another replica's growth, as a share of this replica's growth."""
MIN_COMPARABLE_SHARE = 0.5
"""Minimum share for a comparable replica. Its time since the warm-up and its requests per second
are each at least this share of this replica's."""
MAX_SAME_GROWTH_FACTOR = 2.0
"""Maximum factor between the growth that the operator published, which is older, and the present
growth. Beyond it, the two are different growths."""
DEVICE_KINDS = frozenset({IncidentKind.DEVICE_GROWTH, IncidentKind.STALL})
"""Kinds of incidents that an unhealthy device may explain."""
MIN_SHOWN_PROBABILITY = 0.0005
"""Minimum probability in messages, which round to a tenth of a percent."""
LEADER_PLACEHOLDER = ""
"""Placeholder for the name of the leader's pod."""
UNKNOWN_BUDGET, UNKNOWN_ASSESSMENT = BudgetState(), Assessment(0.0, 0, False)


@dataclass(frozen=True, slots=True)
class PeerEvidence:
    """Log-odds of a leak from the other replicas alone, and a sentence that explains them."""

    log_odds: float
    sentence: str


def add_peer_evidence(assessment: Assessment, pod: str, peers: Sequence[Peer]) -> Assessment:
    """Return ``assessment`` of ``pod``, with the evidence from its ``peers``.

    The evidence changes only the probability and the evidence of each suspicion of growth. It never
    confirms a leak. If ``peers`` does not include ``pod`` itself, the assessment stays as it is.
    """
    mine = next((peer for peer in peers if peer.pod == pod), None)
    if mine is None:
        return assessment
    suspicions = [_weigh_suspicion(suspicion, mine, peers) for suspicion in assessment.suspicions]
    return replace(assessment, suspicions=suspicions)


def add_device_health(assessment: Assessment, unhealthy: Sequence[str]) -> Assessment:
    """Return ``assessment`` with the ``unhealthy`` devices of the pod as evidence.

    An unhealthy device explains a stall, and device memory that is not freed, better than a leak
    does. The probability of a leak stays the same, because the kubelet does not say what is wrong.
    """
    if not unhealthy:
        return assessment
    reported = f"the kubelet reports an unhealthy device: {', '.join(unhealthy)}"
    return replace(
        assessment,
        suspicions=[
            replace(one, unhealthy_device=unhealthy[0], evidence=[reported, *one.evidence])
            if one.kind in DEVICE_KINDS
            else one
            for one in assessment.suspicions
        ],
    )


def compare_growth(
    own_growth: PeerGrowth,
    same_revision: Iterable[PeerGrowth],
    other_revisions: Iterable[PeerGrowth],
) -> PeerEvidence | None:
    """Return the evidence from the growth of other replicas; None if no replica is comparable.

    ``same_revision`` and ``other_revisions`` hold the growth of the replicas of this revision and
    of other revisions.
    """
    siblings = _compute_growth_shares(own_growth, same_revision)
    strangers = _compute_growth_shares(own_growth, other_revisions)
    if not siblings and not strangers:
        return None
    revision = _sum_log_likelihood_ratios(siblings)
    scopes = (0.0, revision, revision + _sum_log_likelihood_ratios(strangers))
    log_odds = _compute_log_mean(SCOPE_PROBABILITIES_IF_LEAK, scopes) - _compute_log_mean(
        SCOPE_PROBABILITIES_IF_NO_LEAK, scopes
    )
    counts = [
        f"{sum(share >= 0.5 for share in shares)} of {len(shares)} {name}"
        for shares, name in ((siblings, "of its revision"), (strangers, "of other revisions"))
        if shares
    ]
    return PeerEvidence(
        log_odds,
        f"of the replicas with comparable age and load, {', '.join(counts)} show the same growth",
    )


def _weigh_suspicion(suspicion: Suspicion, own_peer: Peer, peers: Sequence[Peer]) -> Suspicion:
    own = _find_growth(own_peer, suspicion.kind)
    if own is None or not _is_same_growth(own.bytes, suspicion.bytes):
        return suspicion
    same: list[PeerGrowth] = []
    others: list[PeerGrowth] = []
    for peer in peers:
        growth = _find_growth(peer, suspicion.kind)
        if growth is not None and peer.pod != own_peer.pod and peer.workload == own_peer.workload:
            (same if peer.revision == own_peer.revision else others).append(growth)
    evidence = compare_growth(own, same, others)
    if evidence is None:
        return suspicion
    before = min(1 - MIN_SHOWN_PROBABILITY, max(MIN_SHOWN_PROBABILITY, suspicion.confidence))
    log_odds = math.log(before / (1 - before)) + evidence.log_odds
    probability = 1 / (1 + math.exp(-log_odds))
    text = f"{evidence.sentence}; with this evidence, a leak has a probability of {probability:.1%}"
    return replace(
        suspicion, confidence=round(probability, 3), evidence=[*suspicion.evidence, text]
    )


def _find_growth(peer: Peer, kind: IncidentKind) -> PeerGrowth | None:
    if kind is IncidentKind.HOST_GROWTH:
        return peer.host
    return peer.device if kind is IncidentKind.DEVICE_GROWTH else None


def _is_same_growth(published: int, suspected: int) -> bool:
    least, most = sorted((published, suspected))
    return 0 < most <= MAX_SAME_GROWTH_FACTOR * least


def _is_comparable(own_growth: PeerGrowth, other: PeerGrowth) -> bool:
    if own_growth.age_s == 0 or other.age_s < MIN_COMPARABLE_SHARE * own_growth.age_s:
        return False
    return (
        other.requests * own_growth.age_s
        >= MIN_COMPARABLE_SHARE * own_growth.requests * other.age_s
    )


def _compute_growth_shares(own_growth: PeerGrowth, others: Iterable[PeerGrowth]) -> list[float]:
    """Return the growth of each comparable replica as a share of this replica's growth."""
    return [
        min(1.0, other.bytes / own_growth.bytes) if own_growth.bytes else 1.0
        for other in others
        if _is_comparable(own_growth, other)
    ]


def _sum_log_likelihood_ratios(shares: Iterable[float]) -> float:
    return math.fsum((share - 0.5) / GROWTH_DEVIATION_SHARE**2 for share in shares)


def _compute_log_mean(weights: Sequence[float], logs: Sequence[float]) -> float:
    """Return the logarithm of the weighted mean of ``exp(logs)``."""
    most = max(logs)
    parts = (weight * math.exp(log - most) for weight, log in zip(weights, logs, strict=True))
    return most + math.log(math.fsum(parts))


def combine_group(
    own_assessment: Assessment,
    members: Mapping[str, Assessment | None],
    origins: Mapping[IncidentKind, str],
) -> Assessment:
    """Return the leader's assessment of its multi-node group.

    ``own_assessment`` is the leader's assessment of its own pod. ``members`` holds the assessments
    of the other pods by pod name; None for a pod that does not report now. ``origins`` maps the
    kind of each open incident to the pod that leaked, or to :data:`LEADER_PLACEHOLDER`. Until an
    incident ends, its growth is measured in this pod.
    """
    result, warm = own_assessment, own_assessment.warm
    for kind in GROWTH_INCIDENT_KINDS:
        pod = origins.get(kind)
        if pod is None:
            pod = _find_worst_pod(kind, own_assessment, members)
        reported = own_assessment if pod == LEADER_PLACEHOLDER else members.get(pod)
        suspicion = _find_suspicion(reported, kind)
        if suspicion is not None:
            others = _describe_other_leaks(kind, pod, own_assessment, members)
            suspicion = replace(suspicion, pod=pod or None, evidence=[*suspicion.evidence, *others])
        kept = [other for other in result.suspicions if other.kind is not kind]
        result = replace(result, suspicions=[*kept, *([suspicion] if suspicion else [])])
        if pod != LEADER_PLACEHOLDER:
            result = _replace_budget(result, kind, reported)
            warm = warm and reported is not None and reported.warm
    return replace(result, warm=warm)


def _replace_budget(
    own_assessment: Assessment, kind: IncidentKind, reported: Assessment | None
) -> Assessment:
    """Return ``own_assessment`` with the budget from ``reported``, the assessment of another pod.

    The budget is unknown if ``reported`` is None.
    """
    reported = reported or UNKNOWN_ASSESSMENT
    if kind is IncidentKind.HOST_GROWTH:
        return replace(own_assessment, host=reported.host or UNKNOWN_BUDGET)
    device = reported.device or UNKNOWN_BUDGET
    return replace(own_assessment, device=device, reserved=reported.reserved)


def _find_worst_pod(
    kind: IncidentKind, own_assessment: Assessment, members: Mapping[str, Assessment | None]
) -> str:
    """Return the pod with the strongest suspicion, or the leader if no pod has one."""
    worst, pod = _rank_suspicion(_find_suspicion(own_assessment, kind)), LEADER_PLACEHOLDER
    for name in sorted(members):
        rank = _rank_suspicion(_find_suspicion(members[name], kind))
        if rank > worst:
            worst, pod = rank, name
    return pod


def _describe_other_leaks(
    kind: IncidentKind,
    pod: str,
    own_assessment: Assessment,
    members: Mapping[str, Assessment | None],
) -> list[str]:
    """Return a sentence for each pod other than ``pod`` that also leaks."""
    others = {"the leader": own_assessment if pod != LEADER_PLACEHOLDER else None} | {
        f"pod {name}": members[name] for name in sorted(members) if name != pod
    }
    return [
        f"the memory of {name} also grows: by {format_bytes(suspicion.bytes)}"
        for name, assessment in others.items()
        if (suspicion := _find_suspicion(assessment, kind)) is not None
    ]


def _find_suspicion(assessment: Assessment | None, kind: IncidentKind) -> Suspicion | None:
    suspicions = assessment.suspicions if assessment else []
    return max(
        (each for each in suspicions if each.kind is kind), key=_rank_suspicion, default=None
    )


def _rank_suspicion(suspicion: Suspicion | None) -> tuple[bool, float, int]:
    if suspicion is None:
        return False, -1.0, 0
    return suspicion.over_budget, suspicion.consumed_ratio, suspicion.bytes
