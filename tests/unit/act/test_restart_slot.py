"""One replica's restart slot: the Lease is what its journal wants (``act/slots.py``).

Races with real API servers are in ``tests/cluster/test_supervisor_kube.py``.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from plimsoll_api.incidents import WaitReason
from plimsoll_api.names import (
    SERVICE_RESTARTS_ANNOTATION,
    SLOT_REPLICAS_ANNOTATION,
    SLOT_ROLES_ANNOTATION,
)
from plimsoll_api.roles import PodRole
from plimsoll_api.supervision import RestartBudget
from plimsoll_sidecar.act import lease_counts
from plimsoll_sidecar.act.actuator import Actuator
from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter
from plimsoll_sidecar.act.slots import (
    GROUP_LEASE_DURATION_S,
    LEASE_DURATION_S,
    LeaseSlots,
    SlotLostError,
)
from plimsoll_sidecar.clients.kube import ConflictError, ForbiddenError, KubeClient, KubeError
from plimsoll_sidecar.govern.command import Command, Outcome, SlotRequest, Verb

POLICY = RestartBudget(count=3, window_s=3600.0)
NOBODY = SlotRequest(None)


class Kube:
    """One Lease, with the compare-and-swap of an API server and its clock."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] = {"metadata": {"name": "slot-0", "resourceVersion": "1"}}
        self.time = 1_700_000_000.0
        self.calls = 0
        self.away = False
        self.before_get: Callable[[], None] = lambda: None

    def estimate_server_time(self) -> float:
        return self.time

    def get(self, path: str) -> dict[str, Any]:
        self._called()
        self.before_get()
        return copy.deepcopy(self.lease)

    def put(self, path: str, lease: dict[str, Any]) -> dict[str, Any]:
        self._called()
        version = self.lease["metadata"]["resourceVersion"]
        if lease["metadata"]["resourceVersion"] != version:
            raise ConflictError(409, "changed")
        self.lease = copy.deepcopy(lease)
        self.lease["metadata"]["resourceVersion"] = str(int(version) + 1)
        return lease

    def _called(self) -> None:
        self.calls += 1
        if self.away:
            raise KubeError(0, "no answer")

    @property
    def holder(self) -> str:
        return str(self.lease.get("spec", {}).get("holderIdentity", ""))


@pytest.fixture
def kube() -> Kube:
    return Kube()


def slots(
    kube: Kube, pod: str = "pod-0", clock: Callable[[], float] = time.monotonic
) -> LeaseSlots:
    return LeaseSlots(cast(KubeClient, kube), "n", ("slot-0",), pod, clock)


def test_it_is_kept_while_wanted_and_given_back_once(kube: Kube) -> None:
    mine = slots(kube)
    mine.slot_request = SlotRequest(None, taking=True)
    assert mine.acquire("pod-0-1", POLICY, kube.time) is None
    mine.slot_request = SlotRequest("pod-0-1")
    mine.reconcile(POLICY)
    assert kube.holder == "pod-0"
    mine.slot_request = NOBODY
    kube.away = True
    with pytest.raises(KubeError):
        mine.reconcile(POLICY)
    assert kube.holder == "pod-0"
    kube.away = False
    mine.reconcile(POLICY)
    assert kube.holder == ""
    calls = kube.calls
    mine.reconcile(POLICY)
    assert kube.calls == calls, "nothing is asked of the API server at rest"


def test_a_slot_from_before_our_own_restart_is_given_back_once_the_journal_was_read(
    kube: Kube,
) -> None:
    assert slots(kube).acquire("pod-0-1", POLICY, kube.time) is None
    after = slots(kube)
    after.reconcile(POLICY)
    assert kube.holder == "pod-0", "nobody knows what the journal says"
    after.slot_request = NOBODY
    after.reconcile(POLICY)
    assert kube.holder == ""


def test_a_wanted_slot_is_taken_back_after_our_own_restart(kube: Kube) -> None:
    now = 0.0
    assert slots(kube).acquire("pod-0-1", POLICY, kube.time) is None
    after, other = slots(kube), slots(kube, "pod-1", lambda: now)
    after.slot_request = SlotRequest("pod-0-1")
    after.reconcile(POLICY)
    assert other.acquire("pod-1-1", POLICY, kube.time) is not None
    assert len(lease_counts.read_service_restarts(kube.lease, 3600.0, kube.time)) == 1, (
        "counted once"
    )


def test_a_slot_that_others_took_is_an_error(kube: Kube) -> None:
    now = 0.0
    mine, other = slots(kube, clock=lambda: now), slots(kube, "pod-1", lambda: now)
    assert mine.acquire("pod-0-1", POLICY, kube.time) is None
    mine.slot_request = SlotRequest("pod-0-1")
    assert other.acquire("pod-1-1", POLICY, kube.time) is not None
    now = LEASE_DURATION_S + 1.0
    assert other.acquire("pod-1-1", POLICY, kube.time) is None
    with pytest.raises(SlotLostError, match="pod-1 holds the slot slot-0"):
        mine.reconcile(POLICY)


def test_a_follower_that_is_late_does_not_give_back_what_was_just_taken(kube: Kube) -> None:
    """It calls the API server while the governor takes the slot: the newer wish counts."""
    mine = slots(kube)
    mine.slot_request = NOBODY
    asked, go = threading.Event(), threading.Event()

    def wait() -> None:
        asked.set()
        assert go.wait(10)

    kube.before_get = wait
    follower = threading.Thread(target=mine.reconcile, args=(POLICY,))
    follower.start()
    assert asked.wait(10)
    mine.slot_request = SlotRequest(None, taking=True)
    taker = threading.Thread(target=mine.acquire, args=("pod-0-1", POLICY, kube.time))
    taker.start()
    kube.before_get = lambda: None
    go.set()
    follower.join(10)
    taker.join(10)
    mine.reconcile(POLICY)
    assert kube.holder == "pod-0"


def test_a_slot_whose_taking_got_no_answer_is_given_back(kube: Kube) -> None:
    mine = slots(kube)
    mine.slot_request = NOBODY
    mine.reconcile(POLICY)
    put = kube.put

    def unanswered(path: str, lease: dict[str, Any]) -> dict[str, Any]:
        put(path, lease)
        raise KubeError(0, "the answer was lost")

    kube.put = unanswered  # type: ignore[method-assign]
    with pytest.raises(KubeError):
        mine.acquire("pod-0-1", POLICY, kube.time)
    assert kube.holder == "pod-0"
    kube.put = put  # type: ignore[method-assign]
    mine.reconcile(POLICY)
    assert kube.holder == ""


@pytest.mark.parametrize("status", [0, 401, 403, 409, 500])
def test_an_api_server_that_starts_takes_no_slot_away(kube: Kube, status: int) -> None:
    now = 0.0
    mine = slots(kube, clock=lambda: now)
    assert mine.acquire("pod-0-1", POLICY, kube.time) is None

    def refuse() -> None:
        raise {403: ForbiddenError, 409: ConflictError}.get(status, KubeError)(status, "starting")

    kube.before_get = refuse
    now = LEASE_DURATION_S / 2
    assert mine.ensure_held("pod-0-1", POLICY) is None, "the Lease has not expired"
    now = LEASE_DURATION_S + 1.0
    with contextlib.suppress(KubeError):
        assert mine.ensure_held("pod-0-1", POLICY) is not None


@pytest.mark.parametrize("verb", [Verb.LEAVE, Verb.DRAIN, Verb.RESTART_ENGINE])
@pytest.mark.parametrize("status", [400, 401, 403, 500])
def test_without_an_answer_about_the_slot_nothing_is_begun(
    kube: Kube, tmp_path: Path, verb: Verb, status: int
) -> None:
    """The governor restarts the engine after a drain that has failed, but not after a refusal."""

    def refuse() -> None:
        raise {403: ForbiddenError}.get(status, KubeError)(status, "no answer")

    kube.before_get = refuse
    actuator = Actuator(
        cast(EngineAdapter, None), slots(kube), None, lambda _: (), tmp_path, POLICY, lambda: None
    )
    command = Command(verb=verb, operation_id="1", incident="pod-0-1", epoch="a:1")
    assert actuator.execute(command).outcome is Outcome.REFUSED


def test_a_slot_that_is_not_given_back_yet_pays_for_no_other_restart(kube: Kube) -> None:
    """The API server was away when the last incident ended, or the pod has the name of another."""
    for number in range(3):
        one = slots(kube, f"pod-{number}")
        assert one.acquire(f"pod-{number}-1", POLICY, kube.time) is None
        if number < 2:
            one.release_all_slots()
    assert one.acquire("pod-2-1", POLICY, kube.time) is None, "the same command again"
    refusal = one.acquire("pod-2-2", POLICY, kube.time + 1.0)
    assert refusal is not None
    assert refusal.reason is WaitReason.SERVICE_RESTART_BUDGET
    assert one.ensure_held("pod-2-1", POLICY) is None, "a restart that was counted goes on"


@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0])
def test_a_node_whose_clock_is_wrong_drops_no_count(
    kube: Kube, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    for number in range(2):
        good = slots(kube, f"pod-{number}")
        assert good.acquire(f"pod-{number}-1", POLICY, kube.time) is None
        good.release_all_slots()
    monkeypatch.setattr(time, "time", lambda: kube.time + ahead_s)
    wrong = slots(kube, "pod-2")
    assert wrong.acquire("pod-2-1", POLICY, kube.time + ahead_s) is None
    wrong.release_all_slots()
    assert kube.lease["metadata"]["annotations"][SERVICE_RESTARTS_ANNOTATION].count("incident") == 3
    assert slots(kube, "pod-0").read_stored_restarts().at == (kube.time,), (
        "its own count is kept as well"
    )
    refusal = slots(kube, "pod-3").acquire("pod-3-1", POLICY, kube.time + ahead_s)
    assert refusal is not None, "the service's budget is spent, whatever the clock"


def test_only_pods_of_the_same_role_replace_each_other_whatever_shares_the_slot() -> None:
    kube = Kube()
    kube.lease["metadata"]["annotations"] = {
        SLOT_REPLICAS_ANNOTATION: "d-0 p-0,p-0-1 p-1",
        SLOT_ROLES_ANNOTATION: "Decode=d-0 Prefill=p-0,p-1",
    }  # fmt: skip
    found = LeaseSlots(cast(KubeClient, kube), "n", ("slot-0",), "p-0")
    assert found.list_replicas() == [("p-0", "p-0-1"), ("p-1",)]
    assert found.list_partners(PodRole.PREFILL) == ("d-0",)
    assert found.list_partners(PodRole.DECODE) == ("p-0", "p-1")
    assert found.list_partners(PodRole.BOTH) == found.list_partners(None) == ()
    del kube.lease["metadata"]["annotations"][SLOT_ROLES_ANNOTATION]
    assert len(found.list_replicas()) == 3
    assert found.list_partners(PodRole.PREFILL) == ()


def test_a_group_whose_pods_are_replaced_keeps_the_slot_until_it_is_back(kube: Kube) -> None:
    """Its leader is gone and cannot renew: with its slot, the last ready group would restart."""
    now = 0.0
    leader = LeaseSlots(
        cast(KubeClient, kube), "n", ("slot-0",), "llm-1", lease_duration_s=GROUP_LEASE_DURATION_S
    )
    assert leader.acquire("i", POLICY) is None
    other = slots(kube, "llm-0", lambda: now)
    assert other.acquire("j", POLICY) is not None
    now = LEASE_DURATION_S + 60.0
    assert other.acquire("j", POLICY) is not None, "the group may take longer than one pod"
    assert slots(kube, "llm-1").ensure_held("i", POLICY) is None, "its new leader goes on"
    now = GROUP_LEASE_DURATION_S + now + 1.0
    assert other.acquire("j", POLICY) is not None, "it was renewed"
    now += GROUP_LEASE_DURATION_S + 1.0
    assert other.acquire("j", POLICY) is None
