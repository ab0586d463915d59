"""The download of a checkpoint from a bucket, by its own process, against a small store on loopback
that checks signatures, reads ranges, lists by page and cuts connections."""

from __future__ import annotations

import asyncio
import hashlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_cli.errors import RunError
from plimsoll_cli.local import model
from plimsoll_engine.download.s3 import download
from plimsoll_engine.download.sigv4 import Credentials, sign
from plimsoll_engine.download.target import DownloadError

KEYS = Credentials("AKIDEXAMPLE", "secret")
BUCKET, REGION, PAGE, CUT = "weights", "eu-central-1", 2, 100_000
WEIGHTS = os.urandom(2 * CUT + 50_000)
FILES = {
    "config.json": b'{"model_type": "tiny"}',
    "tokenizer/über 1.json": b"{}",
    "empty.txt": b"",
    "model.safetensors": WEIGHTS,
}


@dataclass
class Store:
    """What the bucket holds by key, what was asked, and whether answers are cut after CUT bytes.

    ``swapped`` takes the place of objects that were listed, at the first cut."""

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    reads: list[tuple[str, str]] = field(default_factory=list)
    cutting: bool = True
    swapped: dict[str, bytes] = field(default_factory=dict)


class _Handler(http.server.BaseHTTPRequestHandler):
    store: Store

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), dict(parse_qsl(url.query, keep_blank_values=True))
        if not self._authorized(path, query):
            return self._error(403, "SignatureDoesNotMatch", "the signature is wrong")
        bucket, _, key = path.removeprefix("/").partition("/")
        if bucket == "elsewhere":
            return self._error(301, "PermanentRedirect", "", {"x-amz-bucket-region": "us-west-2"})
        if bucket != BUCKET:
            return self._error(404, "NoSuchBucket", "there is none")
        return self._read(key) if key else self._list(query)

    def _authorized(self, path: str, query: dict[str, str]) -> bool:
        given = self.headers.get("Authorization", "")
        names = given.partition("SignedHeaders=")[2].partition(",")[0].split(";")
        own = {"host", "x-amz-date", "x-amz-content-sha256"}
        headers = {name: self.headers[name] for name in names if name not in own}
        at = datetime.strptime(self.headers.get("x-amz-date", ""), "%Y%m%dT%H%M%SZ")
        host = self.headers["Host"]
        wanted = sign(host, path, query, headers, KEYS, REGION, at.replace(tzinfo=UTC))
        return given == wanted["Authorization"] and self.headers.get("Range") == headers.get(
            "range"
        )

    def _list(self, query: dict[str, str]) -> None:
        keys = sorted(key for key in self.store.objects if key.startswith(query["prefix"]))
        first = int(query.get("continuation-token", 0))
        more = first + PAGE < len(keys)
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><ETag>&quot;{etag(self.store.objects[key])}&quot;"
            f"</ETag><Size>{len(self.store.objects[key])}</Size></Contents>"
            for key in keys[first : first + PAGE]
        )
        token = f"<NextContinuationToken>{first + PAGE}</NextContinuationToken>" if more else ""
        text = '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        self._send(200, f"{text}{contents}{token}</ListBucketResult>".encode())

    def _read(self, key: str) -> None:
        asked = self.headers.get("Range", "")
        if asked and key in self.store.swapped:
            self.store.objects[key] = self.store.swapped[key]
        data = self.store.objects[key]
        self.store.reads.append((key, asked))
        if self.headers["If-Match"] != f'"{etag(data)}"':
            self._error(412, "PreconditionFailed", "another one is there")
            return
        rest = data[int(asked.removeprefix("bytes=").rstrip("-")) :] if asked else data
        self._send(206 if asked else 200, rest, CUT if self.store.cutting else len(rest))

    def _send(self, status: int, data: bytes, most: int = 1 << 30) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:most])

    def _error(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def etag(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(objects={f"models/tiny/{name}": data for name, data in FILES.items()})
    made.objects |= {"models/tiny/old.pth": b"x", "models/tiny2/config.json": b"no"}
    handler = type("Handler", (_Handler,), {"store": made})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def environ(url: str, secret: str = "secret") -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": KEYS.access_key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": REGION,
    }


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def files(target: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(target)): path for path in target.rglob("*") if path.is_file()}
    return {n: p.read_bytes() for n, p in found.items() if not n.startswith(".plimsoll")}


def test_a_checkpoint_comes_once_whatever_is_cut_off(store: Store, tmp_path: Path) -> None:
    uri, target = f"s3://{BUCKET}/models/tiny", tmp_path / "model"
    first = download(uri, target, environ(store.url))
    assert files(target) == FILES
    offsets = [asked for key, asked in store.reads if key.endswith(".safetensors")]
    assert offsets == ["", f"bytes={CUT}-", f"bytes={2 * CUT}-"], "it goes on where it was cut"
    store.reads.clear()
    assert download(uri, target, environ(store.url)) == first
    assert store.reads == [], "nothing is fetched again"

    # Another start fetches what changed, and what the bucket has no more goes.
    del store.objects["models/tiny/empty.txt"]
    store.objects["models/tiny/config.json"] = b'{"model_type": "big!"}'
    assert download(uri, target, environ(store.url)) != first
    assert [key for key, _ in store.reads] == ["models/tiny/config.json"]
    left = {name: data for name, data in FILES.items() if name != "empty.txt"}
    assert files(target) == left | {"config.json": b'{"model_type": "big!"}'}


def test_what_a_killed_download_left_is_gone_on_with(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "model"
    uri = f"s3://{BUCKET}/models/tiny/"
    store.cutting = False
    version = download(uri, target, environ(store.url))
    mark = hashlib.sha256(etag(WEIGHTS).encode()).hexdigest()[:12]
    for name in (".plimsoll-complete", ".plimsoll-objects.json", "model.safetensors"):
        (target / name).unlink()
    (target / f"model.safetensors.{mark}.part").write_bytes(WEIGHTS[:CUT])
    (target / "model.safetensors.of-another.part").write_bytes(b"x")
    store.reads.clear()
    download(uri, target, environ(store.url))
    assert ("models/tiny/model.safetensors", f"bytes={CUT}-") in store.reads
    assert files(target) == FILES

    store.objects["models/tiny/config.json"] = b"newer"
    assert download(uri, target, environ("http://127.0.0.1:9")) == version
    assert "using the cached files" in caplog.text


def test_an_object_that_changes_meanwhile_is_no_mixture(store: Store, tmp_path: Path) -> None:
    """The listing's etag is a condition of every read, and its part is not kept."""
    store.swapped = {"models/tiny/model.safetensors": os.urandom(len(WEIGHTS))}
    with pytest.raises(DownloadError, match="changed while it was read"):
        download(f"s3://{BUCKET}/models/tiny", tmp_path / "model", environ(store.url))
    assert not list((tmp_path / "model").glob("model.safetensors*"))


@pytest.mark.parametrize(
    ("uri", "secret", "said"),
    [
        (f"s3://{BUCKET}/none", "secret", "has no objects"),
        ("s3://absent/x", "secret", "s3://absent does not exist"),
        ("s3://elsewhere/x", "secret", "is in us-west-2: set AWS_REGION in the Secret"),
        (f"s3://{BUCKET}/models", "wrong", "SignatureDoesNotMatch"),
        (f"s3://{BUCKET}/models", "", "set both AWS_ACCESS_KEY_ID"),
    ],
)
def test_what_cannot_be_had_is_said(
    store: Store, tmp_path: Path, uri: str, secret: str, said: str
) -> None:
    with pytest.raises(DownloadError, match=said):
        download(uri, tmp_path / "model", environ(store.url, secret))


def test_the_init_containers_command(store: Store, tmp_path: Path) -> None:
    def run(uri: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "plimsoll_engine.download", f"--s3={uri}"]
        done = subprocess.run(
            [*command, f"--to={tmp_path / 'model'}"],
            env={**os.environ, **environ(store.url)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr

    code, said = run(f"s3://{BUCKET}/models/tiny")
    assert code == 0, said
    assert files(tmp_path / "model") == FILES
    code, said = run("s3://absent")
    assert (code, said.count("\n")) == (1, 1), "one line says why"


def local(uri: str) -> InferenceService:
    return InferenceService.model_validate(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "tiny"},
            "spec": {"model": {"uri": uri}, "memory": {"host": {"growthBudget": "256Mi"}}},
        }
    )


def test_a_local_replica_gets_its_model_from_a_bucket(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ(store.url).items():
        monkeypatch.setenv(name, value)
    service = local(f"s3://{BUCKET}/models/tiny")
    folder, absent = model.resolve(service, tmp_path)
    said: list[str] = []
    for _ in range(2):  # whole the second time
        assert absent
        asyncio.run(model.make(service, folder, said.append))
        assert files(folder) == FILES
    with pytest.raises(RunError, match=r"spec\.model\.uri: s3://weights/absent: "):
        asyncio.run(model.make(local(f"s3://{BUCKET}/absent"), tmp_path / "other", said.append))
