"""One of several operators leads, whatever the API server does to their requests.

The cases of client-go's own tests of leader election, two faults that its design excludes, and a
search for two leaders. Time is virtual.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import pytest

from plimsoll_operator.config import DEFAULT_INTERVALS, Intervals
from plimsoll_operator.kinds import LEASE, Object
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.runtime.election import MAX_LEASE_DURATION_S, Election, LeadershipLostError
from plimsoll_operator.runtime.queue import RateLimit
from tests.virtual_time import clock, run

OTHER = {
    "holderIdentity": "other",
    "leaseDurationSeconds": 15,
    "acquireTime": "2026-01-01T00:00:00.000000Z",
    "renewTime": "2026-01-01T00:00:00.000000Z",
    "leaseTransitions": 3,
}
OWN = OTHER | {"holderIdentity": "me"}


class Server:
    """An API server with one Lease, as far as the client's connection sees it.

    ``before`` and ``after`` say how long a request waits until it has its effect, and from then
    until its answer; ``status`` may refuse it.
    """

    def __init__(self, spec: Object | None = None, exists: bool = True) -> None:
        self.lease: Object | None = None
        if exists:
            meta = {"name": "l", "namespace": "ns", "resourceVersion": "1"}
            self.lease = {"metadata": meta} | ({"spec": dict(spec)} if spec is not None else {})
        self.before: Callable[[str], float] = lambda _: 0.0
        self.after: Callable[[str], float] = lambda _: 0.0
        self.status: Callable[[str], int | None] = lambda _: None
        self.writes: list[Object] = []
        self.timeouts: list[str] = []

    def api(self) -> Api:
        limit = RateLimit(1e6, 10**6, clock(), asyncio.sleep)
        return Api(self, DEFAULT_INTERVALS.renew / 2, limit, max_tries=1)

    def election(self, identity: str = "me", intervals: Intervals = DEFAULT_INTERVALS) -> Election:
        return Election(self.api(), "ns", "l", identity, clock(), intervals)

    async def param_serialize(self, method: str, path: str, **rest: Any) -> Any:
        return method, path, rest["header_params"], rest["body"], None

    async def call_api(self, method: str, url: str, _: Any, body: Any, **rest: Any) -> Any:
        self.timeouts += parse_qs(urlsplit(url).query).get("timeout", [])
        async with asyncio.timeout(rest["_request_timeout"]):
            await asyncio.sleep(self.before(method))
            code = self.status(method)
            answer = (code, {"reason": "Refused"}) if code else self._answer(method, body)
            await asyncio.sleep(self.after(method))

        async def iter_any() -> AsyncIterator[bytes]:
            yield json.dumps(answer[1]).encode()

        response = SimpleNamespace(content=SimpleNamespace(iter_any=iter_any))
        headers = {"Retry-After": "10"} if answer[0] == 429 else {}
        return SimpleNamespace(status=answer[0], headers=headers, response=response)

    def _answer(self, method: str, body: Any) -> tuple[int, Object]:
        if method == "GET":
            return (404, {}) if self.lease is None else (200, self.lease)
        version = body["metadata"].get("resourceVersion")
        if version != (self.lease or {"metadata": {}})["metadata"].get("resourceVersion"):
            return 409, {"reason": "Conflict"}
        self.write(body)
        return 200, body

    def write(self, body: Object) -> None:
        """Write the Lease, as anybody may."""
        self.writes.append(copy.deepcopy(body))
        kept = self.lease or {"metadata": {"resourceVersion": "0"}}
        version = int(kept["metadata"]["resourceVersion"]) + 1
        meta = body["metadata"] | {"resourceVersion": str(version)}
        self.lease = copy.deepcopy(body) | {"metadata": meta}

    @property
    def spec(self) -> Object:
        assert self.lease is not None
        found: Object = self.lease.get("spec") or {}
        return found


async def leads_within(election: Election, seconds: float) -> bool:
    """Whether it leads after so many seconds at most."""
    try:
        async with asyncio.timeout(seconds):
            await election.acquire()
    except TimeoutError:
        return False
    return election.is_leader()


ACQUIRE: dict[str, tuple[Server, float, bool, int]] = {
    # what there is, for how long it is tried, whether it leads then, transitions
    "no object": (Server(exists=False), 1, True, 0),
    "an object without a holder": (Server(), 1, True, 1),
    "an object that was given back": (Server(OTHER | {"holderIdentity": ""}), 1, True, 4),
    "the own object of a process before": (Server(OWN), 1, True, 3),
    "a holder that was just seen": (Server(OTHER), 14, False, 3),
    "a holder that renews no more": (Server(OTHER), 19, True, 4),
    "a longer duration by the holder": (Server(OTHER | {"leaseDurationSeconds": 60}), 59, False, 3),
    "no duration of its own": (Server(OTHER | {"leaseDurationSeconds": None}), 19, True, 4),
}


@pytest.mark.parametrize("case", ACQUIRE)
def test_who_may_take_the_lease(case: str) -> None:
    server, seconds, leads, transitions = copy.deepcopy(ACQUIRE[case])

    async def play() -> None:
        before = copy.deepcopy(server.lease)
        assert await leads_within(server.election(), seconds) is leads
        assert server.spec["leaseTransitions"] == transitions
        if not leads:
            assert (server.lease, server.writes) == (before, [])
            return
        assert server.spec["holderIdentity"] == "me"
        assert server.spec["leaseDurationSeconds"] == 15
        new = case != "the own object of a process before"
        assert (server.spec["acquireTime"] != OTHER["acquireTime"]) is new
        assert server.spec["renewTime"] != OTHER["renewTime"]

    run(play())


def test_a_holder_that_renews_is_left_alone_and_one_whose_metadata_change_is_not() -> None:
    async def play(renewed: bool) -> bool:
        server = Server(OTHER)

        async def change() -> None:
            for count in range(100):
                await asyncio.sleep(2)
                lease = copy.deepcopy(server.lease or {})
                lease["metadata"]["labels"] = {"count": str(count)}
                if renewed:
                    lease["spec"]["renewTime"] = str(count)
                server.write(lease)

        async with asyncio.TaskGroup() as group:
            task = group.create_task(change())
            led = await leads_within(server.election(), 100)
            task.cancel()
        return led

    assert not run(play(renewed=True))
    assert run(play(renewed=False))


def test_a_wrong_duration_keeps_nobody_out_for_ever() -> None:
    async def play() -> float:
        await Server(OTHER | {"leaseDurationSeconds": 2**31 - 1}).election().acquire()
        return clock()()

    assert MAX_LEASE_DURATION_S < run(play()) < MAX_LEASE_DURATION_S + 2 * DEFAULT_INTERVALS.retry


def test_of_two_that_create_or_take_it_at_once_one_leads() -> None:
    async def play(server: Server) -> None:
        server.before = lambda _: random.random()
        both = [server.election(name) for name in ("a", "b")]
        led = await asyncio.gather(*(leads_within(one, 5) for one in both))
        assert sorted(led) == [False, True]

    for _ in range(20):
        run(play(Server(exists=False)))
        run(play(Server(OTHER | {"holderIdentity": ""})))


def test_a_renewal_changes_neither_transitions_nor_the_time_of_acquisition() -> None:
    async def play() -> None:
        server = Server(OTHER | {"holderIdentity": ""})
        election = server.election()
        await election.acquire()
        first = dict(server.spec)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(election.keep_renewing(), 100)
        assert election.is_leader()
        assert len(server.writes) == 50
        for field in ("acquireTime", "leaseTransitions", "holderIdentity"):
            assert server.spec[field] == first[field]

    run(play())


def test_a_renewal_that_meets_somebody_elses_edit_is_made_again() -> None:
    async def play() -> None:
        server = Server(exists=False)
        election = server.election()
        await election.acquire()
        edited = False

        def status(method: str) -> int | None:
            nonlocal edited
            fresh, edited = method == "PUT" and not edited, edited or method == "PUT"
            return 409 if fresh else None

        server.status = status
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(election.keep_renewing(), 60)
        assert election.is_leader()

    run(play())


RELEASE: dict[str, tuple[Server, str]] = {
    "the own Lease": (Server(OWN), "given"),
    "no object": (Server(exists=False), "left"),
    "somebody else's": (Server(OTHER), "left"),
    "an object without a spec": (Server(), "left"),
    "a server that refuses": (Server(OWN), "left"),
    "a server that does not answer": (Server(OWN), "left"),
}


@pytest.mark.parametrize("case", RELEASE)
def test_what_is_given_back_at_the_end(case: str) -> None:
    server, wanted = copy.deepcopy(RELEASE[case])

    async def play() -> None:
        other = Server(exists=False)
        election = other.election()
        await election.acquire()
        election._api = server.api()
        if case == "a server that refuses":
            server.status = lambda method: 409 if method == "PUT" else None
        if case == "a server that does not answer":
            server.before = lambda _: 1e9
        before = copy.deepcopy(server.lease)
        await election.release()
        assert not election.is_leader()
        assert clock()() <= DEFAULT_INTERVALS.renew
        if wanted == "left":
            assert server.lease == before
            return
        assert (server.spec["holderIdentity"], server.spec["leaseDurationSeconds"]) == ("", 1)
        assert server.spec["leaseTransitions"] == OWN["leaseTransitions"]

    run(play())


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({}, False),
        ({"lease": 10.0}, True),
        ({"renew": 15.0}, True),
        ({"renew": 2.0}, True),
        ({"retry": 0.0}, True),
        ({"retry": -1.0}, True),
        ({"lease": float("nan")}, True),
        ({"lease": float("inf")}, True),
        ({"lease": 3.0, "renew": 2.0, "retry": 0.5}, False),
    ],
)
def test_times_that_could_make_two_leaders_are_refused(
    values: dict[str, float], wrong: bool
) -> None:
    assert (Intervals(**values).find_problem() is not None) is wrong


TROUBLE = {
    "429 with Retry-After: 10": lambda server: setattr(server, "status", lambda _: 429),
    "no answer": lambda server: setattr(server, "before", lambda _: 1e9),
    "answers just within the timeout": lambda server: setattr(
        server, "before", lambda _: DEFAULT_INTERVALS.renew / 2 - 0.01
    ),
    "500": lambda server: setattr(server, "status", lambda _: 500),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_who_cannot_renew_ends_before_anybody_takes_over(
    trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        server = Server(exists=False)
        election = server.election()
        await election.acquire()
        began = clock()()
        TROUBLE[trouble](server)
        with pytest.raises(LeadershipLostError, match="not renewed for 10 s"):
            await election.keep_renewing()
        said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert said
        assert all(one.partition("Lease: ")[2] for one in said), "each says why"
        assert clock()() - began == pytest.approx(DEFAULT_INTERVALS.renew)
        assert not election.is_leader()

    run(play())


def test_a_renewal_counts_from_before_it_was_sent() -> None:
    async def play() -> None:
        server = Server(exists=False)
        server.after = lambda method: 4.5 if method == "POST" else 0.0
        election = server.election()
        await election.acquire()
        assert clock()() == 4.5
        server.status = lambda _: 503
        with pytest.raises(LeadershipLostError):
            await election.keep_renewing()
        assert clock()() == pytest.approx(DEFAULT_INTERVALS.renew), (
            "the Lease is as old as the request"
        )

    run(play())


def test_who_sees_somebody_else_in_the_lease_ends_at_once() -> None:
    async def play() -> None:
        server = Server(exists=False)
        election = server.election()
        await election.acquire()
        server.write({"metadata": {}, "spec": OTHER})
        with pytest.raises(LeadershipLostError, match="held by other"):
            await election.keep_renewing()
        assert clock()() <= DEFAULT_INTERVALS.retry + 0.1

    run(play())


def test_keeping_it_in_two_parts_gives_no_time_away() -> None:
    async def play() -> None:
        server = Server(exists=False)
        election = server.election()
        await election.acquire()
        server.status = lambda _: 503
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(election.keep_renewing(), 6)
        with pytest.raises(LeadershipLostError):
            await election.keep_renewing()
        assert clock()() == pytest.approx(DEFAULT_INTERVALS.renew)

    run(play())


def test_a_process_that_was_stopped_writes_nothing_when_it_goes_on() -> None:
    async def play() -> None:
        server, now = Server(exists=False), 0.0
        election = Election(server.api(), "ns", "l", "me", lambda: now)
        await election.acquire()
        work = server.api()
        work.get_remaining_s = election.get_remaining_s
        lease = await work.get(LEASE, "ns", "l")
        assert lease is not None
        now = 9.1
        lease = await work.replace(LEASE, await work.get(LEASE, "ns", "l") or {})
        assert server.timeouts[-1] == "1s", "the API server gives up what it cannot do in time"
        now = 10.1  # a signal, a debugger or the machine held all of it up
        sent = work.requests
        with pytest.raises(OSError, match="not sent, because another operator may be the leader"):
            await work.replace(LEASE, lease)
        assert work.requests == sent
        assert await work.get(LEASE, "ns", "l") is not None, "to read does no harm"

    run(play())


def test_an_impatient_client_asks_once_and_says_how_it_was_refused() -> None:
    async def play() -> None:
        server = Server(OTHER)
        server.status = lambda _: 429
        api = server.api()
        with pytest.raises(ApiError, match="429"):
            await api.get(LEASE, "ns", "l")
        assert (api.requests, api.refusals, clock()()) == (1, 1, 0.0)

    run(play())


@pytest.mark.parametrize("trouble", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("seed", range(5))
def test_no_throttled_server_makes_two_leaders(seed: int, trouble: float) -> None:
    """Each operator that ends is followed by another one, as a Deployment does it."""
    chance = random.Random(seed)

    async def play() -> set[str]:
        server = Server(exists=False)
        elections: dict[str, Election] = {}
        led: set[str] = set()

        def delay(_: str) -> float:
            return chance.uniform(0.0, 12.0) if chance.random() < trouble else 0.01

        server.before = server.after = delay
        server.status = lambda _: 429 if chance.random() < trouble / 3 else None

        async def replica(number: int) -> None:
            for life in range(1000):
                name = f"{number}.{life}"
                election = elections[name] = server.election(name)
                try:
                    await election.acquire()
                    await asyncio.wait_for(election.keep_renewing(), chance.uniform(5.0, 120.0))
                except TimeoutError:
                    if chance.random() < 0.5:
                        await election.release()
                except LeadershipLostError:
                    pass
                del elections[name]

        async def look() -> None:
            for _ in range(6000):
                await asyncio.sleep(0.1)
                leaders = [name for name, one in elections.items() if one.is_leader()]
                assert len(leaders) < 2, leaders
                led.update(leaders)

        replicas = [asyncio.create_task(replica(number)) for number in range(3)]
        try:
            await look()
        finally:
            for task in replicas:
                task.cancel()
            await asyncio.gather(*replicas, return_exceptions=True)
        return led

    assert run(play()), "somebody leads at times, or this shows nothing"


def test_the_fake_is_asked_as_the_api_server_is() -> None:
    async def play() -> None:
        server = Server(exists=False)
        made = await server.api().create(
            LEASE, {"metadata": {"name": "l", "namespace": "ns"}, "spec": {}}
        )
        with pytest.raises(ApiError, match="409"):
            await server.api().create(LEASE, made)
        stale = {"metadata": made["metadata"] | {"resourceVersion": "0"}}
        with pytest.raises(ApiError, match="409"):
            await server.api().replace(LEASE, stale)
        assert cast(Any, server.lease)["metadata"]["resourceVersion"] == "1"

    run(play())
