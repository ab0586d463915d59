"""The operator's scraper against servers that do whatever a pod may do, over real connections."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll_operator.fleet.supervisor_metrics import SupervisorMetrics
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.scraper import MAX_PAGE_BYTES, SCRAPE_TIMEOUT_S, Scraper

PAGE = (
    b'plimsoll_memory_budget_consumed_ratio{kind="host"} 0.25\n'
    b"plimsoll_restart_budget_remaining 2.0\n"
)
KNOWN = SupervisorMetrics(host=0.25, restarts_left=2)
OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def scrape(answer: Answer, times: int = 1) -> tuple[list[SupervisorMetrics | None], int, int]:
    """Figures of each scrape, how many failed, and how many connections were made."""

    async def run() -> tuple[list[SupervisorMetrics | None], int, int]:
        connections = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            try:
                await reader.readuntil(b"\r\n\r\n")
                await answer(writer)
                await writer.drain()
            except (OSError, asyncio.IncompleteReadError):
                pass  # the scraper had read enough
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        scraper = Scraper(Store(), lambda _: None, port=port)
        async with server, scraper.make_session() as session:
            found = [await scraper.fetch_metrics(session, "127.0.0.1") for _ in range(times)]
        return found, scraper.failures, connections

    return asyncio.run(asyncio.wait_for(run(), 60))


def sends(*parts: bytes, pause_s: float = 0.0) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return answer


def whole(body: bytes, more: bytes = b"") -> bytes:
    return OK + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_a_page_of_many_chunks_is_read_as_a_whole() -> None:
    filler = b"# padding of a supervisor with much to tell\n" * 3000
    body = filler + PAGE
    assert len(body) < MAX_PAGE_BYTES
    pieces = [body[at : at + 8192] for at in range(0, len(body), 8192)]
    length = OK + b"Content-Length: %d\r\n\r\n" % len(body)
    assert scrape(sends(length, *pieces, pause_s=0.005))[0] == [KNOWN]
    chunks = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
    assert scrape(sends(CHUNKED, *chunks, b"0\r\n\r\n", pause_s=0.005))[0] == [KNOWN]


@pytest.mark.parametrize("status", [b"301 Moved", b"302 Found", b"307 Temporary", b"308 Permanent"])
def test_no_redirect_is_followed(status: bytes) -> None:
    target = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        if target.is_set():
            writer.write(whole(PAGE))
            return
        target.set()
        port = writer.get_extra_info("sockname")[1]
        where = b"http://127.0.0.1:%d/secret" % port
        head = b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nLocation: " + where
        writer.write(head + b"\r\nContent-Length: 0\r\n\r\n")

    found, failures, connections = scrape(answer)
    assert (found, failures, connections) == ([None], 1, 1)


@pytest.mark.parametrize(
    "answer",
    [
        sends(whole(PAGE + b"#" * MAX_PAGE_BYTES)),
        sends(CHUNKED, *[b"4000\r\n" + b"#" * 0x4000 + b"\r\n"] * 40),
        sends(whole(gzip.compress(PAGE), b"Content-Encoding: gzip\r\n")),
        sends(OK + b"Content-Length: 99999\r\n\r\n" + PAGE),
        sends(CHUNKED + b"fffffffffffffffff\r\n" + PAGE),
        sends(OK + b"Content-Length: -1\r\n\r\n" + PAGE),
        sends(OK + b"X: " + b"y" * 100_000 + b"\r\n\r\n" + PAGE),
        sends(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"),
        sends(b"HTTP/1.1 206 Partial\r\nContent-Length: %d\r\n\r\n" % len(PAGE) + PAGE),
        sends(b"\x00\xff garbage\r\n\r\n"),
        sends(b""),
    ],
    ids=[
        "long", "long-chunked", "gzip", "short", "chunk-size", "negative", "header",
        "busy", "partial", "garbage", "nothing",
    ],
)  # fmt: skip
def test_what_is_no_whole_page_is_that_pods_unknown(answer: Answer) -> None:
    found, failures, _ = scrape(answer)
    assert (found, failures) == ([None], 1)


def test_a_gzip_bomb_is_that_pods_unknown() -> None:
    bomb = gzip.compress(b"#" * (1 << 28))  # a second: not in every worker that collects tests
    found, failures, _ = scrape(sends(whole(bomb, b"Content-Encoding: gzip\r\n")))
    assert (found, failures) == ([None], 1)


@pytest.mark.parametrize(
    "body",
    [
        PAGE.replace(b"0.25", b"+Inf").replace(b"2.0", b"+Inf"),
        PAGE.replace(b"0.25", b"NaN").replace(b"2.0", b"1e308"),
        PAGE.decode().encode("utf-16"),
        bytes(range(256)) * 100,
    ],
    ids=["infinite", "huge", "utf-16", "bytes"],
)
def test_a_page_of_nonsense_has_no_figures(body: bytes) -> None:
    assert scrape(sends(whole(body)))[:2] == ([SupervisorMetrics()], 0)


def test_a_slow_drip_ends_in_time() -> None:
    began = time.monotonic()
    head = OK + b"Content-Length: 2000\r\n\r\n" + PAGE
    found, failures, _ = scrape(sends(head, *[b"#"] * 1000, pause_s=0.1))
    assert (found, failures) == ([None], 1)
    assert time.monotonic() - began < SCRAPE_TIMEOUT_S + 5


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.binary(max_size=400), st.binary(max_size=200).map(whole)))
def test_any_bytes_are_an_answer_or_a_failure(raw: bytes) -> None:
    found, failures, _ = scrape(sends(raw))
    assert failures == (found == [None])


def test_slow_pods_of_one_namespace_keep_no_other_waiting() -> None:
    """Four hundred pods never answer in one namespace; another namespace's round ends at once."""

    async def run() -> None:
        served = asyncio.Event()
        store = Store()
        for number in range(400):
            pod(store, "hostile", number, "198.51.100.1")
        pod(store, "quiet", 0, "198.51.100.2")

        class Scrape(Scraper):
            async def fetch_metrics(
                self, session: object, address: str
            ) -> SupervisorMetrics | None:
                if address == "198.51.100.2":
                    served.set()
                    return KNOWN
                await asyncio.sleep(SCRAPE_TIMEOUT_S)
                return None

        task = asyncio.create_task(Scrape(store, lambda _: None).run(0.01))
        try:
            await asyncio.wait_for(served.wait(), SCRAPE_TIMEOUT_S)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def pod(store: Store, namespace: str, number: int, address: str) -> None:
    labels = {"plimsoll.dev/service": "s"}
    meta = {"namespace": namespace, "uid": f"{namespace}-{number}"}
    service = {"apiVersion": "v", "kind": "InferenceService"}
    store.put(service | {"metadata": meta | {"name": "s", "uid": namespace}})
    status = {"phase": "Running", "podIP": address}
    about = {"kind": "Pod", "metadata": meta | {"name": f"p{number}", "labels": labels}}
    store.put(about | {"status": status})
