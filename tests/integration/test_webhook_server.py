"""The webhook answers in time and the leader keeps its Lease, whatever else comes to the port.

Tests ``admission/server.py`` with real connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from plimsoll_operator.admission import server as module
from plimsoll_operator.admission.certificate import create_ca_certificate, create_server_certificate
from plimsoll_operator.admission.configuration import WEBHOOK_TIMEOUT_S
from plimsoll_operator.admission.review import PolicyCache, Reviewer
from plimsoll_operator.admission.server import MAX_REVIEW_BYTES, AdmissionServer
from plimsoll_operator.config import Intervals
from plimsoll_operator.kinds import Object
from plimsoll_operator.render.containers import Images
from plimsoll_operator.runtime.client import Api
from plimsoll_operator.runtime.election import Election
from tests.ports import free_port

UNVERIFIED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
UNVERIFIED.check_hostname, UNVERIFIED.verify_mode = False, ssl.CERT_NONE
CLOCKS = Intervals(lease=3.0, renew=2.0, retry=0.4)
POLICY = {
    "apiVersion": "plimsoll.dev/v1alpha1",
    "kind": "SupervisionPolicy",
    "metadata": {
        "name": "p",
        "namespace": "ns",
        "uid": "u",
        "resourceVersion": "1",
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    },
    "spec": {"selector": {"matchLabels": {"app": "a"}}},
}


def review(**container: Any) -> bytes:
    engine = {"name": "vllm", "image": "vllm/vllm-openai:v1"} | container
    pod = {"metadata": {"name": "x", "labels": {"app": "a"}}, "spec": {"containers": [engine]}}
    request = {
        "uid": "1",
        "operation": "CREATE",
        "namespace": "ns",
        "kind": {"kind": "Pod"},
        "object": pod,
    }
    return json.dumps({"request": request}).encode()


HOSTILE = {
    "a script of 400 KB": review(command=["sh", "-c", "vllm serve " + "y" * 400_000]),
    "80,000 arguments": review(args=["a" * 8] * 80_000),
    "60 KB of quotes": review(args=["a '" * 20_000]),
    "10,000 containers' worth of ports": review(ports=[{"containerPort": 1}] * 40_000),
    "brackets": b"[" * 500_000,
    "a body that is too large": b" " * (MAX_REVIEW_BYTES + 1),
    "no JSON": b"\xff" * 1000,
    "no review": b"[]",
}


class Lease:
    """A Lease without other writers."""

    def __init__(self) -> None:
        self.lease: Object | None = None

    async def get(self, *_: object) -> Object | None:
        return self.lease

    async def create(self, _: object, item: Object) -> None:
        self.lease = {"metadata": item["metadata"] | {"resourceVersion": "1"}, "spec": item["spec"]}

    async def replace(self, _: object, item: Object) -> None:
        self.lease = item


class Hook:
    """A server with one policy; ``results`` counts its reviews."""

    def __init__(self, folder: Path) -> None:
        policies = PolicyCache()
        policies.update(POLICY, deleted=False)
        self.results: Counter[str] = Counter()
        reviewer = Reviewer(policies, Images("e", "s"), lambda one: self.results.update([one]))
        self.server = AdmissionServer(
            reviewer.respond_to_body, lambda: self.results.update(["failed"])
        )
        self.port = free_port()
        now = datetime.datetime.now(datetime.UTC)
        signer = create_ca_certificate(now)
        made = create_server_certificate("127.0.0.1", signer, now)
        (folder / "crt").write_bytes(made.certificate)
        (folder / "key").write_bytes(made.key)
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.load_cert_chain(folder / "crt", folder / "key")
        self.trust = ssl.create_default_context(cadata=signer.bundle.decode())

    @contextlib.asynccontextmanager
    async def runs(self) -> AsyncIterator[Callable[[bytes], Any]]:
        """Serve; yields how to send a review."""
        task = asyncio.create_task(self.server.run(self.port, self.context))
        connector = aiohttp.TCPConnector(ssl=self.trust, limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def ask(body: bytes) -> tuple[int, bytes]:
                url = f"https://127.0.0.1:{self.port}/pods"
                async with session.post(url, data=body) as answer:
                    return answer.status, await answer.read()

            await self.server.listening.wait()
            yield ask
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.server.stop()


async def supervised(ask: Callable[[bytes], Any]) -> float:
    """Seconds of a review that is answered as it should be."""
    began = time.monotonic()
    status, text = await ask(review(args=["serve", "m"]))
    assert status == 200
    assert json.loads(text)["response"]["patchType"] == "JSONPatch"
    return time.monotonic() - began


async def trickle(port: int, first: bytes) -> None:
    """Send a byte now and then, without an end."""
    with contextlib.suppress(OSError, ssl.SSLError):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=UNVERIFIED)
        writer.write(first)
        while not writer.is_closing():
            await asyncio.sleep(0.3)
            writer.write(b"x")
            await writer.drain()
        writer.close()


@pytest.fixture
def cpu_time() -> Iterator[None]:
    """Take precedence over tests in other processes, as a pod gets the CPU time it requests."""
    if os.geteuid() != 0:
        yield
        return
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, -15)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


@pytest.mark.usefixtures("cpu_time")
def test_the_leader_keeps_its_lease_and_pods_are_answered_under_hostile_reviews(
    tmp_path: Path,
) -> None:
    async def play() -> None:
        hook = Hook(tmp_path)
        election = Election(cast(Api, Lease()), "ns", "l", "me", intervals=CLOCKS)
        async with hook.runs() as ask:
            await election.acquire()
            kept = asyncio.create_task(election.keep_renewing())

            async def flood(body: bytes) -> None:
                while True:
                    with contextlib.suppress(aiohttp.ClientError, OSError):
                        await ask(body)
                    await asyncio.sleep(0.05)

            head = b"POST /pods HTTP/1.1\r\nHost: x\r\n"
            slow = [head + b"A: ", head + b"Content-Length: 900000\r\n\r\n"] * 20
            floods = [asyncio.create_task(flood(body)) for body in HOSTILE.values()]
            floods += [asyncio.create_task(trickle(hook.port, one)) for one in slow]
            took = []
            ends = time.monotonic() + 2.5 * CLOCKS.lease
            while time.monotonic() < ends:
                took.append(await supervised(ask))
                assert election.is_leader()
                await asyncio.sleep(0.1)
            assert not kept.done()
            for task in (*floods, kept):
                task.cancel()
            await asyncio.gather(*floods, kept, return_exceptions=True)
            assert max(took) < WEBHOOK_TIMEOUT_S
            assert hook.results["failed"] > 10, "the hostile ones did come"

    asyncio.run(play())


@pytest.mark.parametrize("shape", HOSTILE)
def test_each_hostile_review_ends_in_time(shape: str, tmp_path: Path) -> None:
    async def play() -> None:
        async with Hook(tmp_path).runs() as ask:
            began = time.monotonic()
            status, text = await ask(HOSTILE[shape])
            assert time.monotonic() - began < WEBHOOK_TIMEOUT_S
            allowed = status == 200 and json.loads(text)["response"]["allowed"]
            assert allowed or status in (400, 413)

    asyncio.run(play())


def test_connections_that_say_nothing_make_room_for_those_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 8)

    async def play() -> None:
        hook = Hook(tmp_path)
        async with hook.runs() as ask:
            silent = [asyncio.create_task(trickle(hook.port, b"P")) for _ in range(30)]
            await asyncio.sleep(0.5)
            assert await supervised(ask) < WEBHOOK_TIMEOUT_S
            assert len(hook.server._open) <= 8
            for task in silent:
                task.cancel()

    asyncio.run(play())


def test_a_connection_that_says_nothing_ends_and_one_that_asks_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(module, "IDLE_TIMEOUT_S", 1.0)

    async def play() -> None:
        hook = Hook(tmp_path)
        async with hook.runs() as ask:
            silent = asyncio.create_task(trickle(hook.port, b"P"))
            for _ in range(8):
                await supervised(ask)
                await asyncio.sleep(0.2)
            assert silent.done()
            assert len(hook.server._open) == 1
            await asyncio.sleep(1.5)
            assert not hook.server._open

    asyncio.run(play())


def test_more_reviews_than_have_room_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_REVIEWS", 4)

    async def play() -> None:
        hook = Hook(tmp_path)
        hook.server._review = lambda _: time.sleep(0.5) or b"{}"  # type: ignore[func-returns-value]
        async with hook.runs() as ask:
            found = await asyncio.gather(*(ask(b"{}") for _ in range(12)))
            counts = Counter(status for status, _ in found)
            assert counts == {200: 4, 429: 8}
            await asyncio.sleep(0.1)
            assert (await ask(b"{}"))[0] == 200

    asyncio.run(play())
