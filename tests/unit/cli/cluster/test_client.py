"""Lists that expire, and a namespace that is not there: an API server stands in on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from plimsoll_cli.cluster.client import MAX_LIST_RESTARTS, Cluster
from plimsoll_cli.errors import RunError, UsageError

Body = tuple[int, dict[str, object]]
Answer = Callable[[str | None], Body]
"""Status and body for a continue token."""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Answer], Cluster]]:
    servers = []

    def start(answer: Answer) -> Cluster:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                token = parse_qs(urlsplit(self.path).query).get("continue", [None])[0]
                status, body = answer(token)
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        name = {"cluster": "c", "user": "u", "namespace": "ns"}
        config = {
            "current-context": "c",
            "clusters": [
                {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
            ],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": name}],
        }
        file = tmp_path / "kubeconfig"
        file.write_text(yaml.safe_dump(config))
        return Cluster(file)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def page(names: str, token: str = "") -> Body:
    items = [{"metadata": {"name": one, "namespace": "ns"}} for one in names]
    return 200, {"items": items, "metadata": {"continue": token}}


GONE: Body = 410, {"kind": "Status", "reason": "Expired"}


def test_a_list_that_expires_yields_each_object_once(serve: Callable[[Answer], Cluster]) -> None:
    lists = iter([page("ab", "1"), GONE, page("ab", "2"), page("cd")])
    cluster = serve(lambda token: next(lists))
    assert [
        one["metadata"]["name"] for one in cluster.list_custom_objects("leakincidents")
    ] == list("abcd")


def test_a_list_that_always_expires_is_an_error(serve: Callable[[Answer], Cluster]) -> None:
    asked: list[str | None] = []

    def answer(token: str | None) -> Body:
        asked.append(token)
        return GONE if token else page("ab", "1")

    with pytest.raises(RunError, match=r"expired .* times before all pages were read"):
        list(serve(answer).list_custom_objects("leakincidents"))
    assert asked == [None, "1"] * (MAX_LIST_RESTARTS + 1)


def test_a_namespace_that_does_not_exist_is_an_error(serve: Callable[[Answer], Cluster]) -> None:
    with pytest.raises(UsageError, match="namespace ns does not exist"):
        serve(lambda token: (404, {})).check_namespace()
    serve(lambda token: (403, {})).check_namespace()
    serve(lambda token: (200, {})).check_namespace()
