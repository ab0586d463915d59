"""Client of an S3-compatible bucket: lists objects, and reads one from an offset.

A download needs only these two requests, so there is no SDK, which would be larger than the rest of
the frontend. Settings come from the variables that AWS's tools read.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

from plimsoll_engine.download.sigv4 import Credentials, encode_path, encode_query, sign
from plimsoll_engine.download.target import DownloadError

TIMEOUT_S = 60.0
"""Time without a byte after which a connection counts as dead."""
BLOCK = 1 << 20
SECRET = "spec.model.credentialsSecretRef"


class Unreachable(Exception):
    """The store did not answer, or asked to retry later."""


class Changed(DownloadError):
    """The object has changed since it was listed."""


@dataclass(frozen=True)
class BucketSettings:
    """Access to a bucket. ``endpoint`` is the URL of a store other than AWS's, else empty.

    Without ``credentials``, requests are anonymous, which public buckets accept.
    """

    region: str = "us-east-1"
    endpoint: str = ""
    credentials: Credentials | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> BucketSettings:
        """Read the variables of AWS's tools.

        Raises :class:`DownloadError` for an incomplete key.
        """
        key, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
        if bool(key) != bool(secret):
            raise DownloadError(
                f"set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: the Secret of {SECRET} "
                "has only one of them"
            )
        token = environ.get("AWS_SESSION_TOKEN", "")
        region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
        endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or ""
        if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
            raise DownloadError(f"AWS_ENDPOINT_URL_S3 must be a URL with http or https: {endpoint}")
        return cls(
            region=region or "us-east-1",
            endpoint=endpoint.rstrip("/"),
            credentials=Credentials(key, secret, token) if key and secret else None,
        )


@dataclass(frozen=True)
class Item:
    """Object in a bucket. ``etag`` changes with its content."""

    key: str
    size: int
    etag: str


class Bucket:
    """Reader of one bucket.

    Every call raises :class:`Unreachable`, or :class:`DownloadError` if a retry would not help.
    """

    def __init__(self, name: str, settings: BucketSettings) -> None:
        self._name, self._settings = name, settings
        if settings.endpoint:
            self._root, self._path = settings.endpoint, f"/{name}"
        elif "." in name:  # no certificate fits NAME.s3.REGION.amazonaws.com
            self._root = f"https://s3.{settings.region}.amazonaws.com"
            self._path = f"/{name}"
        else:
            self._root = f"https://{name}.s3.{settings.region}.amazonaws.com"
            self._path = ""

    def list(self, prefix: str) -> list[Item]:
        """Return all objects below ``prefix``, sorted by key (ListObjectsV2)."""
        found: list[Item] = []
        query = {"list-type": "2", "prefix": prefix}
        while True:
            with self._get("/", query, {}) as answer:
                page = _parse(answer.read())
            for one in page.findall("{*}Contents"):
                text = {part.tag.rpartition("}")[2]: part.text or "" for part in one}
                found.append(Item(text["Key"], int(text["Size"]), text["ETag"].strip('"')))
            token = page.findtext("{*}NextContinuationToken")
            if not token:
                return sorted(found, key=lambda one: one.key)
            query["continuation-token"] = token

    def read(self, item: Item, offset: int) -> Iterator[bytes]:
        """Yield the object's bytes from ``offset`` on.

        Raises :class:`Changed` if the object has changed since it was listed.
        """
        headers = {"If-Match": f'"{item.etag}"'}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        with self._get(f"/{item.key}", {}, headers) as answer:
            if offset and answer.status != 206:
                raise DownloadError(f"{self._root} does not support range requests")
            try:
                while block := answer.read(BLOCK):
                    yield block
            except (OSError, http.client.HTTPException) as error:
                raise Unreachable(f"{item.key}: {str(error) or repr(error)}") from error

    def _get(
        self, path: str, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        path = self._path + path
        sent = dict(headers)
        if self._settings.credentials:
            host = urlsplit(self._root).netloc
            now = datetime.now(UTC)
            credentials, region = self._settings.credentials, self._settings.region
            sent = sign(host, path, query, sent, credentials, region, now)
        url = f"{self._root}{encode_path(path)}" + (f"?{encode_query(query)}" if query else "")
        request = urllib.request.Request(url, headers=sent)  # noqa: S310 - BucketSettings.of checks the scheme
        try:
            answer: http.client.HTTPResponse = urllib.request.urlopen(  # noqa: S310
                request, timeout=TIMEOUT_S
            )
        except urllib.error.HTTPError as error:
            raise self._error_for(error) from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self._root}: {error}") from error
        return answer

    def _error_for(self, error: urllib.error.HTTPError) -> Exception:
        """Return the exception for an HTTP error, with what the manifest's author can do."""
        where = f"s3://{self._name}"
        region = error.headers.get("x-amz-bucket-region")
        if error.code in (301, 307, 400) and region and region != self._settings.region:
            return DownloadError(
                f"{where} is in {region}: set AWS_REGION in the Secret of {SECRET}"
            )
        match error.code:
            case 404:
                return DownloadError(f"{where} does not exist at {self._root}")
            case 412:
                return Changed(f"{where} changed while it was read; the next start reads it again")
            case 401 | 403:
                who = "the credentials of" if self._settings.credentials else "no credentials in"
                return DownloadError(
                    f"{where} may not be read: {who} {SECRET}: {_error_text(error)}"
                )
            case 429 | 500 | 502 | 503 | 504:
                return Unreachable(f"{where}: {error.code} {_error_text(error)}")
        return DownloadError(f"{where}: {error.code} {_error_text(error)}")


def _error_text(error: urllib.error.HTTPError) -> str:
    try:
        page = _parse(error.read())
    except (DownloadError, OSError, http.client.HTTPException):
        return str(error.reason)
    return f"{page.findtext('{*}Code')}: {page.findtext('{*}Message')}"


def _parse(data: bytes) -> ET.Element:
    try:
        return ET.fromstring(data)  # noqa: S314 - expat bounds the growth of entities since 2.4.1
    except ET.ParseError as error:
        raise DownloadError(f"not an S3 response: {error}: {data[:80]!r}") from None
