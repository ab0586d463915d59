"""The assessment of a multi-node group: the leader's, combine_group with those of its workers.

Tests ``govern/group.py``.
"""

from __future__ import annotations

import pytest

from plimsoll_api.admin import EngineState
from plimsoll_api.assessment import Assessment, BudgetState, Segment, Suspicion
from plimsoll_api.incidents import GROWTH_INCIDENT_KINDS, IncidentKind
from plimsoll_sidecar.govern.command import EngineView
from plimsoll_sidecar.govern.group import LEADER_PLACEHOLDER, UNKNOWN_BUDGET, combine_group
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.verification import StartHistory, Verdict, judge_restart

MIB = 1 << 20
HOST, DEVICE, STALL = IncidentKind.HOST_GROWTH, IncidentKind.DEVICE_GROWTH, IncidentKind.STALL


def leak(size: int, kind: IncidentKind = HOST) -> Suspicion:
    return Suspicion(kind, Segment.ANONYMOUS_OTHER, 0.9, size / 100, size * MIB, evidence=["grows"])


def seen(*suspicions: Suspicion, current: int = 100, warm: bool = True) -> Assessment:
    budget = BudgetState(current=current * MIB, baseline=50 * MIB)
    return Assessment(
        t=1.0, epoch=1, warm=warm, host=budget, device=budget, suspicions=list(suspicions)
    )


def test_a_group_without_a_leak_is_its_leader() -> None:
    own = seen(current=1)
    assert combine_group(own, {"g-1": seen(current=2), "g-2": None}, {}) == own


@pytest.mark.parametrize("kind", GROWTH_INCIDENT_KINDS)
def test_a_leak_of_a_worker_is_the_groups(kind: IncidentKind) -> None:
    worker = seen(leak(30, kind), current=200)
    found = combine_group(seen(), {"g-1": worker, "g-2": seen()}, {})
    (suspicion,) = found.suspicions
    assert (suspicion.kind, suspicion.pod, suspicion.bytes) == (kind, "g-1", 30 * MIB)
    measured = found.host if kind is HOST else found.device
    other = found.device if kind is HOST else found.host
    assert measured == worker.host
    assert other == seen().host


def test_the_same_leak_in_another_pod_joins_it() -> None:
    members = {"g-1": seen(leak(20)), "g-2": seen(leak(30))}
    (suspicion,) = combine_group(seen(leak(10)), members, {}).suspicions
    assert (suspicion.pod, suspicion.bytes) == ("g-2", 30 * MIB)
    assert suspicion.evidence == [
        "grows",
        "the memory of the leader also grows: by 10.0 MiB",
        "the memory of pod g-1 also grows: by 20.0 MiB",
    ]


def test_an_open_incident_follows_the_pod_that_it_began_in() -> None:
    members = {"g-1": seen(leak(20), current=120), "g-2": seen(leak(90), current=190)}
    found = combine_group(seen(), members, {HOST: "g-1"})
    (suspicion,) = found.suspicions
    assert (suspicion.pod, suspicion.bytes) == ("g-1", 20 * MIB)
    assert found.host == members["g-1"].host
    mine = combine_group(seen(leak(10)), members, {HOST: LEADER_PLACEHOLDER})
    assert [(one.pod, one.bytes) for one in mine.suspicions] == [(None, 10 * MIB)]
    assert mine.host == seen().host


def test_a_pod_that_says_nothing_is_unknown_not_well() -> None:
    found = combine_group(seen(), {"g-1": None}, {HOST: "g-1"})
    assert found.suspicions == []
    assert found.host == UNKNOWN_BUDGET
    assert not found.warm, "the absence of the suspicion means nothing"
    assert combine_group(seen(), {}, {HOST: "g-1"}) == found
    assert combine_group(seen(), {"g-1": None}, {}).warm, "no incident waits for it"


@pytest.mark.parametrize("kind", GROWTH_INCIDENT_KINDS)
def test_a_pod_that_is_gone_has_released_its_memory(kind: IncidentKind) -> None:
    members = {"g-1": None, "g-2": seen(leak(40, kind), current=190)}
    found = combine_group(seen(), members, {kind: "g-1"}, gone=["g-1"])
    measured = found.host if kind is HOST else found.device
    assert measured is not None
    assert measured.current == 0
    assert found.warm, "its incident can end"
    assert found.suspicions == [], "memory of another pod is not compared with that of this one"
    incident = Incident(
        name="i", kind=kind, epoch="boot:1", opened_at=0.0, phase_since=0.0, fenced_epoch="boot:1",
        baseline_bytes=50 * MIB, before_bytes=120 * MIB,
    )  # fmt: skip
    engine = EngineView(epoch="boot:2", state=EngineState.SERVING)
    verdict = judge_restart(incident, found, engine, StartHistory(), 60.0, 100.0)
    assert verdict is Verdict.CURED
    (other,) = combine_group(seen(), members, {}).suspicions
    assert other.pod == "g-2", "after that incident, the growth of another pod opens one"


def test_the_leader_keeps_what_is_no_leak() -> None:
    stall = Suspicion(STALL, None, 1.0, 0.0)
    found = combine_group(seen(stall), {"g-1": seen(leak(5), stall)}, {})
    assert [(one.kind, one.pod) for one in found.suspicions] == [(STALL, None), (HOST, "g-1")]
