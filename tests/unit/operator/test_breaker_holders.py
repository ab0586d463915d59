"""The circuit breaker over time: dead, forged and unruly holders, and unused turns.

Tests ``controllers/circuit_breaker.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest

from plimsoll_operator.config import DEFAULT_INTERVALS
from plimsoll_operator.controllers.circuit_breaker import MAX_LOST_RACES, CircuitBreaker
from plimsoll_operator.fleet.circuit_breaker import OPERATOR_HOLDER, get_holder
from plimsoll_operator.kinds import Kind, Object
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError, ConflictError


class Server:
    """Leases by name, in memory; ``before`` is called with each Lease that is to be replaced."""

    def __init__(self) -> None:
        self.store, self.now = Store(), 1000.0
        self.leases: dict[str, Object] = {}
        self.writes: Counter[tuple[str, str]] = Counter()
        self.before: Callable[[Object], None] = lambda _: None
        self._version = 0

    def write(self, lease: Object, **spec: Any) -> Object:
        self._version += 1
        meta = lease["metadata"] | {"resourceVersion": str(self._version)}
        written = copy.deepcopy(lease | {"metadata": meta, "spec": lease.get("spec", {}) | spec})
        self.leases[meta["name"]] = written
        self.store.put(copy.deepcopy(written))
        return copy.deepcopy(written)

    def service(
        self, name: str, holder: str = "", phase: str = "AwaitingSlot", **spec: Any
    ) -> None:
        meta = {"namespace": f"of-{name}", "labels": {"plimsoll.dev/service": name}, "uid": name}
        lease = {
            "kind": "Lease",
            "apiVersion": "v1",
            "metadata": {"name": f"{name}-restart-0"} | meta,
        }
        self.write(lease, holderIdentity=holder, **spec)
        self.store.put(
            {
                "apiVersion": "plimsoll.dev/v1alpha1",
                "kind": "LeakIncident",
                "metadata": {"name": name, "namespace": f"of-{name}", "uid": f"{name}-leak"},
                "spec": {
                    "workloadRef": {"kind": "InferenceService", "name": name},
                    "openedAt": "2026-01-01T00:00:00Z",
                },
                "status": {"phase": phase},
            }
        )

    def lease(self, service: str) -> Object:
        return self.leases[f"{service}-restart-0"]

    def shut(self) -> set[str]:
        return {
            name.removesuffix("-restart-0")
            for name, lease in self.leases.items()
            if get_holder(lease) == OPERATOR_HOLDER
        }

    async def replace(self, kind: Kind, lease: Object) -> Object:
        self.before(lease)
        meta = lease["metadata"]
        if self.leases[meta["name"]]["metadata"]["resourceVersion"] != meta["resourceVersion"]:
            raise ConflictError(409, "Conflict", meta["name"])
        return self.write(lease)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return copy.deepcopy(self.leases[name])

    def breaker(self, limit: int) -> CircuitBreaker:
        return CircuitBreaker(cast(Api, self), self.store, limit, lambda: self.now)

    def turn(self, breaker: CircuitBreaker, after_s: float = 0.0) -> None:
        self.now += after_s
        asyncio.run(breaker.run_once())


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.mark.parametrize(
    "forged",
    [
        {"renewTime": "1970-01-01T00:00:00.000000Z", "leaseDurationSeconds": 2**31 - 1},
        {"renewTime": "2999-01-01T00:00:00.000000Z", "leaseDurationSeconds": 2**31 - 1},
        {"leaseDurationSeconds": -5},
        {},
    ],
)
def test_a_holder_that_does_not_renew_expires_by_the_observers_clock(
    server: Server, forged: dict[str, Any]
) -> None:
    server.service("dead", "gone-0", **forged)
    server.service("waits")
    breaker = server.breaker(1)
    server.turn(breaker)
    assert breaker.last.held == 1
    assert server.shut() == {"waits"}
    server.turn(breaker, DEFAULT_INTERVALS.slot_expiry - 1)
    assert server.shut() == {"waits"}
    server.turn(breaker, 1)
    assert breaker.last.held == 0
    assert server.shut() == {"dead"}, "it had its turn, so the other one is first"


def test_a_holder_that_renews_lives_until_it_held_on_for_too_long(server: Server) -> None:
    server.service("busy", "busy-0")
    server.service("waits")
    breaker = server.breaker(1)
    server.turn(breaker)
    for minute in range(int(DEFAULT_INTERVALS.slot_hold / 60) - 1):
        server.write(server.lease("busy"), renewTime=f"at minute {minute}")
        server.turn(breaker, 60)
        assert server.shut() == {"waits"}
    server.write(server.lease("busy"), holderIdentity="busy-1")  # another name is not another hold
    server.turn(breaker, 60)
    assert server.shut() == set()
    assert get_holder(server.lease("busy")) == "busy-1", "what it has is left to it"


def test_a_turn_that_nobody_uses_passes_to_the_next(server: Server) -> None:
    names = {f"s{number}" for number in range(4)}
    for name in names:
        server.service(name)
    breaker = server.breaker(1)
    had: set[str] = set()
    for _ in names:
        server.turn(breaker)
        had |= names - server.shut()
        server.turn(breaker, DEFAULT_INTERVALS.slot_turn)
    assert had == names


def test_idle_incidents_cost_no_writes_while_nobody_asks(server: Server) -> None:
    for number in range(4):
        server.service(f"s{number}", phase="Confirmed")
    breaker = server.breaker(1)
    server.turn(breaker)
    shut = server.shut()
    for _ in range(10):
        server.turn(breaker, DEFAULT_INTERVALS.slot_turn)
    assert server.shut() == shut


def test_a_lease_that_is_written_all_the_time_keeps_no_other_one_shut(server: Server) -> None:
    for name in ("hostile", "busy", "waits"):
        server.service(name, "busy-0" if name == "busy" else "")
    breaker = server.breaker(1)
    server.turn(breaker)
    assert server.shut() == {"hostile", "waits"}
    # From now on the hostile one's version is never the one that was read.
    server.write(server.lease("hostile"), holderIdentity="")

    def interfere(lease: Object) -> None:
        if lease["metadata"]["uid"] == "hostile":
            server.write(server.lease("hostile"))

    server.before = interfere
    server.write(server.lease("busy"), holderIdentity="")
    server.turn(breaker)
    server.turn(breaker, DEFAULT_INTERVALS.slot_turn)
    server.turn(breaker)
    assert "waits" not in server.shut()


@pytest.mark.parametrize(
    "refusal",
    [
        ApiError(422, "Invalid", "spec.leaseTransitions: Invalid value"),
        ApiError(500, "InternalError", "failed calling webhook of this namespace"),
    ],
)
def test_a_lease_that_the_api_server_refuses_keeps_no_other_one_shut(
    server: Server, refusal: ApiError
) -> None:
    for name in ("refused", "busy", "waits"):
        server.service(name, "busy-0" if name == "busy" else "")

    def refuse(lease: Object) -> None:
        if lease["metadata"]["uid"] == "refused":
            raise refusal

    def turn(after_s: float = 0.0) -> None:
        with contextlib.suppress(ApiError):  # which the loop logs
            server.turn(breaker, after_s)

    server.before = refuse
    breaker = server.breaker(1)
    turn()
    assert server.shut() == {"waits"}
    server.write(server.lease("busy"), holderIdentity="")
    turn()
    turn(DEFAULT_INTERVALS.slot_turn)
    for _ in range(MAX_LOST_RACES + 1):
        turn(1.0)
        if "waits" not in server.shut():
            return
    raise AssertionError("the other service never had its turn")


def test_a_forged_count_of_transitions_can_be_written_on(server: Server) -> None:
    server.service("busy", "busy-0")
    server.service("waits", leaseTransitions=2**31 - 1)
    server.turn(server.breaker(1))
    assert 0 <= server.lease("waits")["spec"]["leaseTransitions"] < 2**31
