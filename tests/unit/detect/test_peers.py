"""The other replicas' growth shifts the chance of a leak, within bounds, and nothing else.

Tests ``detect/fleet.py``.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from plimsoll_api.assessment import Assessment, Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.peers import (
    MAX_BASELINE_AGE_S,
    MAX_PEER_GROWTH_BYTES,
    MAX_PEER_REQUESTS,
    Peer,
    PeerGrowth,
)
from plimsoll_sidecar.detect.fleet import add_peer_evidence, compare_growth

MIB = 1 << 20
HOUR = 3600
OWN = PeerGrowth(100 * MIB, HOUR, 36_000)
FLAT = replace(OWN, bytes=2 * MIB)
ALIKE = replace(OWN, bytes=96 * MIB)

GROWN = st.builds(
    PeerGrowth,
    st.integers(0, MAX_PEER_GROWTH_BYTES) | st.integers(0, 200 * MIB),
    st.integers(0, MAX_BASELINE_AGE_S) | st.integers(0, 2 * HOUR),
    st.integers(0, MAX_PEER_REQUESTS) | st.integers(0, 80_000),
)
PEERS = st.lists(
    st.builds(
        Peer,
        st.sampled_from([f"qwen-{n}" for n in range(8)]),
        st.sampled_from(["old", "new"]),
        st.sampled_from(["", "Deployment/other"]),
        st.none() | GROWN,
        st.none() | GROWN,
    ),
    max_size=12,
)


def suspicion(chance: float = 0.9, kind: IncidentKind = IncidentKind.HOST_GROWTH) -> Suspicion:
    return Suspicion(
        kind=kind,
        segment=Segment.PYTHON_OBJECTS,
        confidence=chance,
        consumed_ratio=0.2,
        bytes=OWN.bytes,
        over_budget=True,
        unconfirmed="may be garbage",
        evidence=["first"],
    )


def seen(*suspicions: Suspicion) -> Assessment:
    return Assessment(t=5.0, epoch=1, warm=True, suspicions=list(suspicions))


def log_odds(same: list[PeerGrowth], others: list[PeerGrowth] | None = None) -> float:
    found = compare_growth(OWN, same, others or [])
    assert found is not None
    return found.log_odds


def test_a_replica_that_grows_alone_is_likelier_to_leak() -> None:
    one, two, many = (log_odds([replace(OWN, bytes=0)] * count) for count in (1, 2, 20))
    # By hand: (.5 e^-2 + .5) / (.9 e^-2 + .1) for one sibling.
    assert one == pytest.approx(0.9407, abs=1e-3)
    assert one < two < many < math.log(5) + 1e-9
    assert many == pytest.approx(math.log(5), abs=1e-6)


def test_growth_that_all_replicas_share_is_less_likely_a_leak() -> None:
    one, many = log_odds([replace(OWN)]), log_odds([replace(OWN)] * 20)
    assert math.log(5 / 9) - 1e-9 < many < one < 0


def test_growth_that_came_with_the_revision_is_likelier_a_leak_of_it() -> None:
    """All new replicas grow and those before the roll-out do not; or those do, too."""
    assert log_odds([ALIKE] * 3, [FLAT] * 3) == pytest.approx(math.log(2), abs=0.1)
    assert log_odds([ALIKE] * 3, [ALIKE] * 3) == pytest.approx(-math.log(7), abs=0.1)
    assert log_odds([FLAT] * 3, [FLAT] * 3) == pytest.approx(math.log(5), abs=0.1)


def test_half_the_growth_says_nothing_and_more_than_all_says_no_more() -> None:
    assert log_odds([replace(OWN, bytes=50 * MIB)]) == pytest.approx(0, abs=1e-12)
    assert log_odds([replace(OWN, bytes=900 * MIB)]) == log_odds([OWN])


@pytest.mark.parametrize(
    "other",
    [
        replace(FLAT, age_s=HOUR // 2 - 1),
        replace(FLAT, requests=17_999),
        replace(FLAT, age_s=4 * HOUR, requests=36_000),
        replace(FLAT, age_s=0, requests=0),
    ],
    ids=["younger", "less busy", "older and less busy", "just warm"],
)
def test_a_replica_that_has_met_less_is_no_evidence(other: PeerGrowth) -> None:
    assert compare_growth(OWN, [other], [other]) is None


def test_an_older_or_busier_replica_is_evidence() -> None:
    older = replace(FLAT, age_s=400 * HOUR, requests=400 * 36_000)
    assert log_odds([older]) == log_odds([FLAT]) == log_odds([replace(FLAT, requests=10**9)])


def test_without_requests_idle_replicas_compare() -> None:
    idle = PeerGrowth(40 * MIB, HOUR, 0)
    assert compare_growth(idle, [replace(idle, bytes=0)], []) is not None


@given(GROWN, st.lists(GROWN, max_size=64), st.lists(GROWN, max_size=64), st.randoms())
def test_evidence_is_bounded_and_does_not_depend_on_the_order(
    own: PeerGrowth, same: list[PeerGrowth], others: list[PeerGrowth], dice: random.Random
) -> None:
    found = compare_growth(own, same, others)
    if found is None:
        return
    assert -math.log(7) - 1e-9 <= found.log_odds <= math.log(5) + 1e-9
    assert len(found.sentence) < 160
    for some in (same, others):
        dice.shuffle(some)
    assert compare_growth(own, same, others) == found


@given(PEERS, st.floats(0, 1))
def test_only_the_chance_and_one_sentence_change(peers: list[Peer], chance: float) -> None:
    kinds = (IncidentKind.HOST_GROWTH, IncidentKind.DEVICE_GROWTH, IncidentKind.STALL)
    before = seen(*(suspicion(chance, kind) for kind in kinds))
    after = add_peer_evidence(before, "qwen-0", peers)
    assert after == add_peer_evidence(before, "qwen-0", peers)
    assert replace(after, suspicions=[]) == replace(before, suspicions=[])
    for old, new in zip(before.suspicions, after.suspicions, strict=True):
        assert replace(new, confidence=old.confidence, evidence=old.evidence) == old
        assert new.evidence[:1] == ["first"]
        assert len(new.evidence) <= 2
        assert 0 <= new.confidence <= 1
        if len(new.evidence) == 1:
            assert new == old
    assert after.suspicions[2] == before.suspicions[2], "a stall is no growth"


@given(PEERS)
def test_without_a_comparable_peer_nothing_changes(peers: list[Peer]) -> None:
    before = seen(suspicion())
    assume(all(one.pod != "mine" for one in peers))
    assert add_peer_evidence(before, "mine", peers) is before
    alone = Peer("mine", "new", host=OWN)
    strangers = [replace(one, workload="Deployment/other") for one in peers]
    assert add_peer_evidence(before, "mine", [alone, *strangers]) == before
    assert add_peer_evidence(before, "mine", [alone]) == before
    assert add_peer_evidence(before, "mine", []) is before


@pytest.mark.parametrize("published", [0, 40 * MIB, 250 * MIB])
def test_what_was_published_of_another_growth_says_nothing(published: int) -> None:
    mine = Peer("qwen-0", "new", host=replace(OWN, bytes=published))
    flat = Peer("qwen-1", "new", host=FLAT)
    before = seen(suspicion())
    assert add_peer_evidence(before, "qwen-0", [mine, flat]) == before


def test_the_sentence_says_what_the_others_do() -> None:
    peers = [
        Peer("qwen-0", "new", host=OWN),
        Peer("qwen-1", "new", host=FLAT),
        Peer("qwen-2", "new", host=ALIKE),
        Peer("qwen-3", "new", host=FLAT),
        Peer("qwen-4", "new", host=replace(FLAT, age_s=60)),
        Peer("qwen-5", "new", device=FLAT),
        Peer("qwen-6", "old", host=FLAT),
    ]
    (found,) = add_peer_evidence(seen(suspicion(0.9)), "qwen-0", peers).suspicions
    assert found.evidence[1] == (
        "of the replicas with comparable age and load, 1 of 3 of its revision, "
        "0 of 1 of other revisions show the same growth; "
        "with this evidence, a leak has a probability of 97.3%"
    )
    assert found.confidence == 0.973
    (certain,) = add_peer_evidence(seen(suspicion(1.0)), "qwen-0", peers).suspicions
    assert certain.confidence == 1.0
