"""The download of a checkpoint from a bucket, by its own process, against a small store on loopback
that checks who asks, reads ranges, lists by page and cuts connections."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_cli.errors import RunError
from plimsoll_cli.local import model
from plimsoll_engine.download import bucket
from plimsoll_engine.download.s3 import download
from plimsoll_engine.download.target import DownloadError
from tests.http_server import Handler, answering

KEY = "AKIDEXAMPLE"
CREDENTIALS = "/v1/credentials"
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

    ``swapped`` takes the place of objects that were listed, at the first cut. Requests carry the
    session's ``token``; None: they are anonymous."""

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    reads: list[tuple[str, str]] = field(default_factory=list)
    cutting: bool = True
    swapped: dict[str, bytes] = field(default_factory=dict)
    token: str | None = ""
    identities: list[str] = field(default_factory=list)


class _Bucket(Handler):
    store: Store

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), dict(parse_qsl(url.query, keep_blank_values=True))
        if url.path == CREDENTIALS:
            return self._send_credentials()
        if not self._authorized():
            return self._error(403, "InvalidAccessKeyId", "there is no such key")
        bucket, _, key = path.removeprefix("/").partition("/")
        if bucket == "elsewhere":
            return self._error(301, "PermanentRedirect", "")
        if bucket == "malformed":
            wrong = "the region is wrong; expecting 'eu-west-3'"
            region = "<Region>eu-west-3</Region>"
            return self._error(400, "AuthorizationHeaderMalformed", wrong, region)
        if bucket != BUCKET:
            return self._error(404, "NoSuchBucket", "there is none")
        return self._read(key) if key else self._list(query)

    def _send_credentials(self) -> None:
        """Answer as the agent of EKS Pod Identity does."""
        self.store.identities.append(self.headers["Authorization"])
        keys = {"AccessKeyId": KEY, "SecretAccessKey": "secret", "Token": self.store.token}
        self._send(200, json.dumps(keys | {"Expiration": "2999-01-01T00:00:00Z"}).encode())

    def _authorized(self) -> bool:
        given = self.headers.get("Authorization", "")
        if self.store.token is None:
            return not given
        scope = re.search(rf"Credential={KEY}/\d{{8}}/{REGION}/s3/aws4_request,", given)
        return bool(scope) and self.headers.get("x-amz-security-token", "") == self.store.token

    def _list(self, query: dict[str, str]) -> None:
        keys = sorted(key for key in self.store.objects if key.startswith(query["prefix"]))
        first = int(query.get("continuation-token", 0))
        more = first + PAGE < len(keys)
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><ETag>&quot;{etag(self.store.objects[key])}&quot;"
            f"</ETag><Size>{len(self.store.objects[key])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in keys[first : first + PAGE]
        )
        token = f"<NextContinuationToken>{first + PAGE}</NextContinuationToken>" if more else ""
        text = '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        self._send(200, f"{text}{contents}{token}</ListBucketResult>".encode())

    def _read(self, key: str) -> None:
        asked = self.headers.get("Range", "")
        if not asked.startswith("bytes=0-") and key in self.store.swapped:
            self.store.objects[key] = self.store.swapped[key]
        data = self.store.objects[key]
        self.store.reads.append((key, asked))
        if self.headers["If-Match"] != f'"{etag(data)}"':
            self._error(412, "PreconditionFailed", "another one is there")
            return
        first, last = (int(one) for one in asked.removeprefix("bytes=").split("-"))
        rest = data[first : last + 1]
        headers = {
            "Content-Range": f"bytes {first}-{first + len(rest) - 1}/{len(data)}",
            "ETag": f'"{etag(data)}"',
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        }
        self._send(206, rest, headers, CUT if self.store.cutting else len(rest))

    def _send(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, most: int = 1 << 30
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:most])

    def _error(self, status: int, code: str, message: str, details: str = "") -> None:
        text = f"<Error><Code>{code}</Code><Message>{message}</Message>{details}</Error>"
        self._send(status, text.encode())


def etag(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(objects={f"models/tiny/{name}": data for name, data in FILES.items()})
    made.objects |= {"models/tiny/old.pth": b"x", "models/tiny2/config.json": b"no"}
    with answering(type("Bucket", (_Bucket,), {"store": made})) as port:
        made.url = f"http://127.0.0.1:{port}"
        yield made


def environ(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": REGION,
    }


@pytest.fixture
def variables(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the variables of AWS's tools: the store's, and others by name."""

    def put(**more: str) -> None:
        for name, value in (environ(store.url) | {"NO_PROXY": "127.0.0.1"} | more).items():
            monkeypatch.setenv(name, value)

    put()
    return put


def files(target: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(target)): path for path in target.rglob("*") if path.is_file()}
    return {n: p.read_bytes() for n, p in found.items() if not n.startswith(".plimsoll")}


def test_a_checkpoint_comes_once_whatever_is_cut_off(
    store: Store, variables: Callable[..., None], tmp_path: Path
) -> None:
    uri, target = f"s3://{BUCKET}/models/tiny", tmp_path / "model"
    first = download(uri, target)
    assert files(target) == FILES
    offsets = [asked for key, asked in store.reads if key.endswith(".safetensors")]
    last = len(WEIGHTS) - 1
    wanted = [f"bytes={first}-{last}" for first in (0, CUT, 2 * CUT)]
    assert offsets == wanted, "it goes on where it was cut"
    store.reads.clear()
    assert download(uri, target) == first
    assert store.reads == [], "nothing is fetched again"

    # Another start fetches what changed, and what the bucket has no more goes.
    del store.objects["models/tiny/empty.txt"]
    store.objects["models/tiny/config.json"] = b'{"model_type": "big!"}'
    assert download(uri, target) != first
    assert [key for key, _ in store.reads] == ["models/tiny/config.json"]
    left = {name: data for name, data in FILES.items() if name != "empty.txt"}
    assert files(target) == left | {"config.json": b'{"model_type": "big!"}'}


def test_what_a_killed_download_left_is_gone_on_with(
    store: Store, variables: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "model"
    uri = f"s3://{BUCKET}/models/tiny/"
    store.cutting = False
    version = download(uri, target)
    mark = hashlib.sha256(etag(WEIGHTS).encode()).hexdigest()[:12]
    for name in (".plimsoll-complete", ".plimsoll-objects.json", "model.safetensors"):
        (target / name).unlink()
    (target / f"model.safetensors.{mark}.part").write_bytes(WEIGHTS[:CUT])
    (target / "model.safetensors.of-another.part").write_bytes(b"x")
    store.reads.clear()
    download(uri, target)
    assert ("models/tiny/model.safetensors", f"bytes={CUT}-{len(WEIGHTS) - 1}") in store.reads
    assert files(target) == FILES

    store.objects["models/tiny/config.json"] = b"newer"
    variables(AWS_ENDPOINT_URL_S3="http://127.0.0.1:9")
    assert download(uri, target) == version
    assert f"using the files in {target}" in caplog.text


def test_an_object_that_changes_meanwhile_is_no_mixture(
    store: Store, variables: Callable[..., None], tmp_path: Path
) -> None:
    """The listing's etag is a condition of every read, and its part is not kept."""
    store.swapped = {"models/tiny/model.safetensors": os.urandom(len(WEIGHTS))}
    with pytest.raises(DownloadError, match="changed during the download"):
        download(f"s3://{BUCKET}/models/tiny", tmp_path / "model")
    assert not list((tmp_path / "model").glob("model.safetensors*"))


@pytest.mark.parametrize("part", [70_000, 250_000, 1 << 20])
def test_a_large_object_comes_in_parts(
    store: Store,
    variables: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: int,
) -> None:
    """Each part has its own retries, so that many cuts do not end a long download."""
    monkeypatch.setattr(bucket, "REQUEST_RANGE_BYTES", part)
    download(f"s3://{BUCKET}/models/tiny", tmp_path / "model")
    assert files(tmp_path / "model") == FILES


def test_markers_of_folders_are_not_files(
    store: Store, variables: Callable[..., None], tmp_path: Path
) -> None:
    store.objects |= {"models/tiny/": b"", "models/tiny/tokenizer/": b""}
    download(f"s3://{BUCKET}/models/tiny", tmp_path / "model")
    assert files(tmp_path / "model") == FILES


def test_who_asks(store: Store, variables: Callable[..., None], tmp_path: Path) -> None:
    """Without keys nobody signs; a session's token and the pod's identity are sent."""
    uri = f"s3://{BUCKET}/models/tiny"
    store.token = "of-session"
    variables(AWS_SESSION_TOKEN=store.token)
    download(uri, tmp_path / "session")
    store.token = None
    variables(AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="", AWS_SESSION_TOKEN="")
    download(uri, tmp_path / "anonymous")
    store.token = "of-role"
    (tmp_path / "token").write_text("identity")
    variables(
        AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="", AWS_SESSION_TOKEN="",
        AWS_CONTAINER_CREDENTIALS_FULL_URI=f"{store.url}{CREDENTIALS}",
        AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=str(tmp_path / "token"),
    )  # fmt: skip
    download(uri, tmp_path / "role")
    assert set(store.identities) == {"identity"}
    for name in ("session", "anonymous", "role"):
        assert files(tmp_path / name) == FILES


@pytest.mark.parametrize(
    ("uri", "given", "said"),
    [
        (f"s3://{BUCKET}/none", {}, "has no objects"),
        ("s3://absent/x", {}, "s3://absent/x does not exist"),
        ("s3://elsewhere/x", {}, "is in another region: set AWS_REGION in the Secret"),
        ("s3://malformed/x", {}, "is in another region: set AWS_REGION to eu-west-3 in the Secret"),
        (
            f"s3://{BUCKET}/models",
            {"AWS_ACCESS_KEY_ID": "other"},
            "was denied: correct the credentials in .*InvalidAccessKeyId: there is no such key",
        ),
        (
            f"s3://{BUCKET}/models",
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            "was denied: set the credentials in",
        ),
        (f"s3://{BUCKET}/models", {"AWS_SECRET_ACCESS_KEY": ""}, "only one of AWS_ACCESS_KEY_ID"),
        *(
            (f"s3://{BUCKET}/models", {"AWS_ENDPOINT_URL_S3": url}, "must be a URL with http")
            for url in ("ftp://store", "store:9000", "http://", "http://a b", "http://a:99999")
        ),
    ],
)
def test_what_cannot_be_had_is_said(
    store: Store,
    variables: Callable[..., None],
    tmp_path: Path,
    uri: str,
    given: dict[str, str],
    said: str,
) -> None:
    variables(**given)
    with pytest.raises(DownloadError, match=said):
        download(uri, tmp_path / "model")


@pytest.mark.parametrize("name", ["a//b", "a/../../b", "a/.", ".plimsoll-complete"])
def test_names_that_leave_the_folder_are_refused(
    store: Store, variables: Callable[..., None], tmp_path: Path, name: str
) -> None:
    store.objects[f"models/tiny/{name}"] = b"x"
    with pytest.raises(DownloadError, match="object"):
        download(f"s3://{BUCKET}/models/tiny", tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["a b+c=d@e.txt", "100%.txt", "a%2Fb", "a?b#c", "ü/*~.txt"])
def test_odd_names_come_whole(
    store: Store, variables: Callable[..., None], tmp_path: Path, name: str
) -> None:
    store.objects = {f"models/tiny/{name}": b"x"}
    download(f"s3://{BUCKET}/models/tiny", tmp_path / "model")
    assert files(tmp_path / "model") == {name: b"x"}


def test_a_bucket_with_too_many_objects_is_refused(
    store: Store, variables: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "MAX_OBJECTS", len(FILES))
    with pytest.raises(DownloadError, match="more than 4 objects: set spec"):
        download(f"s3://{BUCKET}/models/tiny", tmp_path / "model")


def test_the_init_containers_command(
    store: Store, variables: Callable[..., None], tmp_path: Path
) -> None:
    def run(uri: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "plimsoll_engine.download", f"--s3={uri}"]
        done = subprocess.run(
            [*command, f"--to={tmp_path / 'model'}"],
            env=os.environ,
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
    store: Store, variables: Callable[..., None], tmp_path: Path
) -> None:
    service = local(f"s3://{BUCKET}/models/tiny")
    folder, absent = model.locate_checkpoint(service, tmp_path)
    said: list[str] = []
    for _ in range(2):  # whole the second time
        assert absent
        asyncio.run(model.prepare_checkpoint(service, folder, said.append))
        assert files(folder) == FILES
    with pytest.raises(RunError, match=r"spec\.model\.uri: cannot download s3://weights/absent: "):
        asyncio.run(
            model.prepare_checkpoint(
                local(f"s3://{BUCKET}/absent"), tmp_path / "other", said.append
            )
        )
