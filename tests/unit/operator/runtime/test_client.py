"""Lists of objects of any size, from a server of HTTP: short pages where objects are large."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from plimsoll_operator.kinds import POD, SERVICE
from plimsoll_operator.runtime import client
from plimsoll_operator.runtime.client import Api, TooLargeError
from plimsoll_operator.runtime.queue import RateLimit
from tests.http_server import Handler

LIMIT = 100_000


class Server(ThreadingHTTPServer):
    """Lists of objects of these sizes; ``pages`` has the length of each page that was sent.

    ``answer``, if set, is sent instead.
    """

    answer: bytes | None = None
    sizes: tuple[int, ...] = ()
    pages: list[int]


class Lists(Handler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        query = parse_qs(urlsplit(self.path).query)
        at, limit = int(query.get("continue", ["0"])[0]), int(query.get("limit", ["9"])[0])
        page = self.server.sizes[at : at + limit]
        self.server.pages.append(len(page))
        more = at + limit < len(self.server.sizes)
        meta = {"resourceVersion": "7"} | ({"continue": str(at + limit)} if more else {})
        items = [{"metadata": {"name": "n"}, "spec": {"x": "x" * size}} for size in page]
        body = json.dumps({"apiVersion": "v1", "metadata": meta, "items": items}).encode()
        self.answer(200, self.server.answer or body)

    def do_POST(self) -> None:
        """The refusal of an eviction, as the API server words it."""
        assert isinstance(self.server, Server)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(429, self.server.answer or b"")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(client, "MAX_RESPONSE_BYTES", LIMIT)
    http = Server(("127.0.0.1", 0), Lists)
    http.pages = []
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield http
    http.shutdown()
    http.server_close()
    thread.join(10)


def asked(server: Server, folder: Path, call: Callable[[Api], Awaitable[Any]]) -> Any:
    """What ``call`` gets with the operator's client."""
    named = {"cluster": "c", "user": "u"}
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "contexts": [{"name": "x", "context": named}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }  # fmt: skip
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))

    async def main() -> Any:
        api = await Api.connect(str(file), 10.0, RateLimit(1e6, 1_000_000))
        try:
            return await call(api)
        finally:
            await api.close()

    return asyncio.run(main())


def sizes(server: Server, folder: Path) -> list[int]:
    """The sizes of the objects that the operator's client lists."""

    async def listed(api: Api) -> list[int]:
        pages = [page async for page, _ in api.list_pages(SERVICE, None)]
        return [len(one["spec"]["x"]) for page in pages for one in page]

    found: list[int] = asked(server, folder, listed)
    return found


@pytest.mark.parametrize(
    "large", [(0, 0), (0, 300), (100, 40)], ids=["none", "all of them", "some in the middle"]
)
def test_no_page_of_large_objects_is_read_as_a_whole(
    server: Server, tmp_path: Path, large: tuple[int, int]
) -> None:
    begin, count = large
    made = [30_000 if begin <= at < begin + count else 10 for at in range(300)]
    server.sizes = tuple(made)
    assert sizes(server, tmp_path) == made
    if not count:
        assert server.pages == [200, 100]


def test_one_object_that_is_too_large_ends_the_list_with_its_reason(
    server: Server, tmp_path: Path
) -> None:
    server.sizes = (10, LIMIT, 10)
    with pytest.raises(TooLargeError, match="the response is larger than"):
        sizes(server, tmp_path)


@pytest.mark.parametrize(
    "answer",
    [
        "<html>",
        "[]",
        "7",
        "{}",
        '{"items": []}',
        '{"metadata": 7, "items": []}',
        '{"metadata": {"resourceVersion": "7"}, "items": 7}',
        '{"metadata": {"resourceVersion": "7"}, "items": [7]}',
        '{"metadata": {"resourceVersion": "7"}, "items": [{}]}',
    ],
)
def test_a_success_that_is_no_list_is_a_server_that_does_not_answer(
    server: Server, tmp_path: Path, answer: str
) -> None:
    """A proxy before the API server answers so: watches begin again, and none ends for good."""
    server.answer = answer.encode()
    for call in (
        lambda api: api.list_metadata(POD, "n"),
        lambda api: api.list_object_events("n", "uid"),
        lambda api: anext(api.list_pages(SERVICE, None)),
    ):
        with pytest.raises(OSError, match=r"the response (is not|contains no list)"):
            asked(server, tmp_path, call)


def test_a_list_without_items_is_empty(server: Server, tmp_path: Path) -> None:
    server.answer = b'{"metadata": {"resourceVersion": "7"}, "items": null}'
    assert asked(server, tmp_path, lambda api: api.list_metadata(POD, "n")) == ([], "7")


@pytest.mark.parametrize("item", ["7", "{}", '{"metadata": 7}', '{"metadata": {}}'])
def test_an_event_that_is_none_ends_the_watch_as_a_silent_server_does(
    server: Server, tmp_path: Path, item: str
) -> None:
    server.answer = b'{"type": "ADDED", "object": %s}\n' % item.encode()
    with pytest.raises(OSError, match="a line of the response is not a watch event"):
        asked(server, tmp_path, lambda api: anext(api.watch(POD, "n", "7")))


def test_a_write_that_has_its_connection_too_late_is_not_sent(
    server: Server, tmp_path: Path
) -> None:
    """A paused leader's write, whose time was asked for before it was paused."""

    async def write(api: Api) -> None:
        left = iter((9.0, 0.0))
        api.get_remaining_s = lambda: next(left)
        await api.replace(POD, {"metadata": {"name": "a", "namespace": "n"}})

    with pytest.raises(OSError, match="not sent, because another operator may be the leader"):
        asked(server, tmp_path, write)


def test_a_refused_eviction_names_the_disruption_budget(server: Server, tmp_path: Path) -> None:
    refused = "Cannot evict pod as it would violate the pod's disruption budget."
    cause = "The disruption budget qwen needs 3 healthy pods and has 3 currently"
    status = {
        "reason": "TooManyRequests",
        "message": refused,
        "details": {"causes": [{"reason": "DisruptionBudget", "message": cause}]},
    }
    server.answer = json.dumps(status).encode()
    found = asked(server, tmp_path, lambda api: api.evict("ml", "qwen-0", "u"))
    assert found == f"429 TooManyRequests: {refused} {cause}"
    server.answer = json.dumps(status | {"details": {"causes": [7]}}).encode()
    assert asked(server, tmp_path, lambda api: api.evict("ml", "qwen-0", "u")).startswith("429")
