"""The circuit breaker against supervisors that are quicker: its limit holds in every order.

An API server in memory that compares versions as the real one does, writes that take their time,
and watch events that come late.

Tests ``controllers/circuit_breaker.py``.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest

from plimsoll_operator.controllers.circuit_breaker import CircuitBreaker
from plimsoll_operator.fleet.circuit_breaker import OPERATOR_HOLDER, get_holder
from plimsoll_operator.kinds import Key, Kind, Object, Ref
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ConflictError

SERVICES, LIMIT, TURNS = 9, 3, 150


class Server:
    """Leases by name; ``most`` is how many were ever held by supervisors at once."""

    def __init__(self, store: Store, rng: random.Random) -> None:
        self.store, self.rng = store, rng
        self.leases: dict[str, Object] = {}
        self.writes: Counter[tuple[str, str]] = Counter()
        self.version = self.most = 0
        self._events: asyncio.Queue[Object] = asyncio.Queue()

    def write(self, lease: Object) -> Object:
        name = lease["metadata"]["name"]
        known = self.leases.get(name, lease)
        if known["metadata"].get("resourceVersion") != lease["metadata"].get("resourceVersion"):
            raise ConflictError(409, "Conflict", name)
        self.version += 1
        meta = lease["metadata"] | {"resourceVersion": str(self.version)}
        self.leases[name] = copy.deepcopy(lease | {"metadata": meta})
        held = sum(get_holder(one) not in ("", OPERATOR_HOLDER) for one in self.leases.values())
        self.most = max(self.most, held)
        self._events.put_nowait(copy.deepcopy(self.leases[name]))
        return copy.deepcopy(self.leases[name])

    async def watch(self) -> None:
        while True:
            event = await self._events.get()
            await self.pause(12)
            self.store.put(event)

    async def replace(self, kind: Kind, lease: Object) -> Object:
        await self.pause(6)
        return self.write(lease)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        await self.pause(6)
        return copy.deepcopy(self.leases[name])

    async def pause(self, most: int) -> None:
        for _ in range(self.rng.randrange(most)):
            await asyncio.sleep(0)


def lease(name: str) -> Object:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": f"{name}-restart-0",
            "namespace": "ml",
            "uid": name,
            "labels": {"plimsoll.dev/service": name},
        },
        "spec": {},
    }


def incident(name: str, opened: int) -> Object:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LeakIncident",
        "metadata": {"name": name, "namespace": "ml", "uid": f"{name}-leak"},
        "spec": {
            "workloadRef": {"kind": "InferenceService", "name": name},
            "openedAt": f"2026-01-01T00:00:00.{opened:06d}Z",
        },
    }


def opens(store: Store, name: str, at: int) -> None:
    """The service's only incident is one that was opened now."""
    store.remove(store.get(Key("ml", name), Ref("LeakIncident", name)) or incident(name, 0))
    store.put(incident(name, at))


async def supervisor(server: Server, name: str, taken: Counter[str], clock: Iterator[int]) -> None:
    """Takes its slot whenever it is free, gives it back, and leaks again."""
    while True:
        await server.pause(9)
        found = copy.deepcopy(server.leases[f"{name}-restart-0"])
        if get_holder(found):
            continue
        await server.pause(4)
        try:
            mine = server.write(found | {"spec": {"holderIdentity": f"{name}-0"}})
        except ConflictError:
            continue
        taken[name] += 1
        await server.pause(40)
        server.write(mine | {"spec": {"holderIdentity": ""}})
        opens(server.store, name, next(clock))  # its next leak, before the last one is forgotten
        await server.pause(60)


async def play(seed: int) -> tuple[int, Counter[str]]:
    """The most slots that were held at once, and how often each service had its own."""
    rng, store = random.Random(seed), Store()
    server = Server(store, rng)
    names, clock = [f"s{number}" for number in range(SERVICES)], itertools.count()
    for name in names:
        store.put(server.write(lease(name)))
        opens(store, name, next(clock))
    breaker = CircuitBreaker(cast(Api, server), store, LIMIT)
    await breaker.run_once()
    taken: Counter[str] = Counter()
    tasks = [asyncio.create_task(server.watch())]
    tasks += [asyncio.create_task(supervisor(server, name, taken, clock)) for name in names]
    for _ in range(TURNS):
        await breaker.run_once()
        await server.pause(10)
    for task in tasks:
        task.cancel()
    results: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [one for one in results if isinstance(one, Exception)]
    return server.most, taken


@pytest.mark.parametrize("seed", range(20))
def test_the_limit_holds_whoever_is_quicker_and_turns_go_on(seed: int) -> None:
    most, taken = asyncio.run(play(seed))
    assert most == LIMIT
    assert len(taken) == SERVICES, "each has its turn"
