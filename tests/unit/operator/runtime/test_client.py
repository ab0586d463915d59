"""Lists of objects of any size, from a server of HTTP: short pages where objects are large."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from plimsoll_operator.kinds import SERVICE
from plimsoll_operator.runtime import client
from plimsoll_operator.runtime.client import Api, TooLargeError
from plimsoll_operator.runtime.queue import RateLimit

LIMIT = 100_000


class Server(ThreadingHTTPServer):
    """Lists of objects of these sizes; ``pages`` has the length of each page that was sent."""

    sizes: tuple[int, ...] = ()
    pages: list[int]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        query = parse_qs(urlsplit(self.path).query)
        at, limit = int(query.get("continue", ["0"])[0]), int(query["limit"][0])
        page = self.server.sizes[at : at + limit]
        self.server.pages.append(len(page))
        more = at + limit < len(self.server.sizes)
        meta = {"resourceVersion": "7"} | ({"continue": str(at + limit)} if more else {})
        items = [{"metadata": {"name": "n"}, "spec": {"x": "x" * size}} for size in page]
        body = json.dumps({"apiVersion": "v1", "metadata": meta, "items": items}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", LIMIT)
    http = Server(("127.0.0.1", 0), Handler)
    http.pages = []
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield http
    http.shutdown()
    http.server_close()
    thread.join(10)


def sizes(server: Server, folder: Path) -> list[int]:
    """The sizes of the objects that the operator's client lists."""
    named = {"cluster": "c", "user": "u"}
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "contexts": [{"name": "x", "context": named}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }  # fmt: skip
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))

    async def main() -> list[int]:
        api = await Api.connect(str(file), 10.0, RateLimit(1e6, 1_000_000))
        try:
            pages = [page async for page, _ in api.pages(SERVICE, None)]
        finally:
            await api.close()
        return [len(one["spec"]["x"]) for page in pages for one in page]

    return asyncio.run(main())


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
    with pytest.raises(TooLargeError, match="an answer of more than"):
        sizes(server, tmp_path)
