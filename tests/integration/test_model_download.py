"""The download of a checkpoint, by the hub's real client against a small hub on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from plimsoll_engine.download import source
from tests.http_server import Handler, answering

COMMIT = "a" * 40
FILES = {"config.json": b'{"model_type": "tiny"}', "model.safetensors": b"w" * 300_000}


class Hub(Handler):
    """As much of the hub's protocol as a download needs."""

    asked: list[str]
    repository = "org/tiny"
    files = FILES

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        if self.path.startswith("/api/models/org/gated"):
            self.send_response(403)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        files = self.files
        if self.path.startswith(f"/api/models/{self.repository}"):
            siblings = [{"rfilename": n, "size": len(d)} for n, d in files.items()]
            tree = [
                {"type": "file", "path": n, "size": len(d), "oid": "0"} for n, d in files.items()
            ]
            what: Any = {"id": self.repository, "sha": COMMIT, "siblings": siblings}
            self._send(json.dumps(tree if "/tree/" in self.path else what).encode(), body)
            return
        name = self.path.rpartition("/")[2]
        if f"/{self.repository}/resolve/{COMMIT}/" in self.path and name in files:
            self._send(files[name], body, etag=hashlib.sha1(files[name]).hexdigest())
            return
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, data: bytes, body: bool, etag: str = "") -> None:
        start = 0
        if asked := self.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("Content-Type", "application/json")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if etag:
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(data[start:])


@contextmanager
def serving(
    host: str = "127.0.0.1", repository: str = "org/tiny", files: dict[str, bytes] = FILES
) -> Iterator[tuple[str, list[str]]]:
    """A hub's address and what was asked of it."""
    asked: list[str] = []
    handler = type("Served", (Hub,), {"asked": asked, "repository": repository, "files": files})
    with answering(handler, host) as port:
        yield f"http://{host}:{port}", asked


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    with serving() as served:
        yield served


def environment(url: str, home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_ETAG_TIMEOUT": "3",
    }


def run(url: str, repository: str, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plimsoll_engine.download"]
    arguments = [f"--repository={repository}", f"--to={target}"]
    env = environment(url, target.parent / "home")
    return subprocess.run(
        [*command, *arguments], env=env, capture_output=True, text=True, timeout=60
    )


def test_a_checkpoint_comes_once_and_serves_without_the_hub(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, asked = hub
    target = tmp_path / "org" / "tiny" / "main"
    first = run(url, "org/tiny", target)
    assert first.returncode == 0, first.stdout + first.stderr
    assert {name: (target / name).read_bytes() for name in FILES} == FILES
    assert COMMIT in first.stdout

    asked.clear()
    assert run(url, "org/tiny", target).returncode == 0
    assert not any("/resolve/" in path for path in asked), "nothing is fetched again"

    away = run("http://127.0.0.1:9", "org/tiny", target)
    assert away.returncode == 0, away.stdout
    assert f"using the files in {target}" in away.stdout


@pytest.mark.parametrize(
    ("repository", "said"),
    [("org/gated", "spec.model.tokenSecretRef"), ("org/none", "does not exist, or is private")],
)
def test_what_cannot_be_had_is_said(
    hub: tuple[str, list[str]], tmp_path: Path, repository: str, said: str
) -> None:
    done = run(hub[0], repository, tmp_path / "model")
    assert done.returncode == 1
    assert said in done.stdout


def test_a_model_of_the_hub_is_served_from_its_cache(
    hub: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``--model hf://org/tiny`` takes it: fetched once, found again without the hub."""
    url, asked = hub

    def folder(model: str, hub_url: str) -> Path:
        for name, value in environment(hub_url, tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        return source.fetch_folder(model)

    here = folder("hf://org/tiny", url)
    assert {name: (here / name).read_bytes() for name in FILES} == FILES
    assert here.is_relative_to(tmp_path / "home")
    asked.clear()
    assert folder("hf://org/tiny@main", url) == here
    assert not any("/resolve/" in path for path in asked), "nothing is fetched again"
    assert folder(f"hf://org/tiny@{COMMIT}", "http://127.0.0.1:9") == here

    with pytest.raises(source.SourceError) as caught:
        folder("hf://org/other", "http://127.0.0.1:9")
    for name in ("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "--model"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "model", ["hf://", "hf://tiny", "hf://a/b/c", "hf://org/tiny@", "hf://org/../x@y"]
)
def test_a_name_that_is_none_of_the_hub_is_refused(model: str) -> None:
    with pytest.raises(source.SourceError, match="hf://ORGANISATION/NAME@REVISION"):
        source.fetch_folder(model)
    with pytest.raises(source.SourceError):
        source.make_default_model_name(model)


def test_a_hub_model_is_served_by_its_name(tmp_path: Path) -> None:
    assert source.make_default_model_name("hf://org/tiny@v1") == "org/tiny"
    assert source.make_default_model_name(str(tmp_path / "some" / "..")) == tmp_path.name
