"""Lists that expire, a namespace that is not there, and kubeconfigs that cannot be used.

An API server stands in on loopback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from typer.testing import CliRunner

from plimsoll_cli.cluster.client import MAX_LIST_RESTARTS, Cluster
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.main import app
from tests.http_server import Handler, answering

Body = tuple[int, dict[str, object] | bytes]
Answer = Callable[[str | None], Body]
"""Status and body for a continue token."""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Answer], Cluster]]:
    servers = ExitStack()

    def start(answer: Answer) -> Cluster:
        class Server(Handler):
            def do_GET(self) -> None:
                token = parse_qs(urlsplit(self.path).query).get("continue", [None])[0]
                status, body = answer(token)
                self.answer(status, body if isinstance(body, bytes) else json.dumps(body).encode())

        port = servers.enter_context(answering(Server))
        name = {"cluster": "c", "user": "u", "namespace": "ns"}
        config = {
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": name}],
        }
        file = tmp_path / "kubeconfig"
        file.write_text(yaml.safe_dump(config))
        return Cluster(file)

    with servers:
        yield start


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


def test_text_that_the_locale_lacks_is_printed_as_escapes(
    serve: Callable[[Answer], Cluster], tmp_path: Path
) -> None:
    incident = {
        "metadata": {"name": "s-0-1", "namespace": "ns"},
        "spec": {
            "id": "s-0-1", "workloadRef": {"kind": "Deployment", "name": "s"}, "pod": "s-0",
            "container": "c", "epoch": "a:1", "openedAt": "2026-01-01T00:00:00Z", "kind": "Stall",
        },
        "status": {"phase": "Resolved", "message": "\u6ca1\u6709"},
    }  # fmt: skip
    serve(lambda token: (200, incident))
    command = ["explain", "s-0-1", "--kubeconfig", str(tmp_path / "kubeconfig")]
    done = subprocess.run(
        [sys.executable, "-m", "plimsoll_cli.main", *command],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONIOENCODING": "latin1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\\u6ca1\\u6709" in done.stdout


@pytest.mark.parametrize("body", [b"<html>log in", b"\xff\xfe", b"", b"[]"])
def test_a_server_that_is_no_api_server_is_named(
    serve: Callable[[Answer], Cluster], body: bytes
) -> None:
    """Such as a proxy with a page to log in."""
    with pytest.raises(RunError, match=r"127.0.0.1:\d+ answers /version without JSON"):
        serve(lambda token: (200, body)).get("/version")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "cannot be used: Invalid kube-config. "),
        (b"hello", "the file is no kubeconfig"),
        (b"\xff\xfe\x00", "the file is no kubeconfig"),
        (b"a: [", "the kubeconfig is not valid YAML"),
        (b"kind: Config", "cannot be used: Expected key current-context"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_named(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=expected) as caught:
        Cluster(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("command", "has_local"), [("incidents", True), ("top", False)])
def test_local_is_offered_where_a_command_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, has_local: bool
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    done = CliRunner().invoke(app, [command])
    assert isinstance(done.exception, UsageError)
    assert "no cluster is configured: " in str(done.exception)
    assert ("--local" in str(done.exception)) is has_local


def test_a_server_that_is_away_is_named_without_the_library(tmp_path: Path) -> None:
    config = {
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(RunError, match=r"127\.0\.0\.1:1 does not answer: Failed to establish"):
        Cluster(file).get("/version")
