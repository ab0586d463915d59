"""Client of an S3-compatible bucket, configured by the environment variables of AWS's tools."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from obstore.exceptions import BaseError, InvalidPathError
from obstore.store import S3Store

from plimsoll_engine.download.target import DownloadError

if TYPE_CHECKING:
    from obstore import GetOptions

# Maximum time without received data.
READ_TIMEOUT = timedelta(seconds=60)
# At 19 kB/s, a request for REQUEST_RANGE_BYTES takes an hour.
REQUEST_TIMEOUT = timedelta(hours=1)
# Per request. With obstore's backoff, they bridge an outage of 25 s.
MAX_RETRIES = 8
# Each range of an object is a request with retries of its own.
REQUEST_RANGE_BYTES = 64 << 20
STREAM_CHUNK_BYTES = 1 << 20
# The largest checkpoints have some hundred files.
MAX_OBJECTS = 10_000
# Maximum length of the store's own error text in a message.
MAX_REASON_CHARS = 300
CREDENTIALS_FIELD = "spec.model.credentialsSecretRef"
# Variables that configure credentials. If none is set, requests are anonymous.
CREDENTIAL_VARIABLES = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
_STATUS_PATTERN = re.compile(r"status code: (\d{3})[^:]*(?:: (.*))?", re.DOTALL)
_ERROR_PAGE_PATTERN = re.compile(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)
_REGION_PATTERN = re.compile(r"<Region>([a-z0-9-]{1,32})</Region>")
_CAUSE_PATTERN = re.compile(r'(?:message|error): "([^"]+)"|InvalidCertificate\(\s*(\w+)')


class StoreUnreachableError(Exception):
    """The store did not respond, or asked the client to retry later."""


class ObjectChangedError(DownloadError):
    """The object has changed since it was listed."""


@dataclass(frozen=True)
class BucketObject:
    """Object in the bucket, with its path relative to the prefix and its size in bytes."""

    path: str
    size: int
    etag: str


class Bucket:
    """Reader of the objects below ``s3://NAME/PREFIX``.

    Methods raise StoreUnreachableError if a retry may help, otherwise DownloadError.
    """

    def __init__(self, uri: str, max_retries: int = MAX_RETRIES) -> None:
        _check_environment()
        self._uri, self._anonymous = (
            uri,
            not any(name in os.environ for name in CREDENTIAL_VARIABLES),
        )
        name, _, prefix = uri.removeprefix("s3://").partition("/")
        try:
            self._store = S3Store(
                name,
                prefix=prefix.strip("/") or None,
                config={"skip_signature": True} if self._anonymous else {},
                client_options={
                    "allow_http": True,
                    "read_timeout": READ_TIMEOUT,
                    "timeout": REQUEST_TIMEOUT,
                },
                retry_config={"max_retries": max_retries},
            )
        except BaseError as error:
            raise self._convert_error(error) from None

    def list_objects(self) -> list[BucketObject]:
        """Return all objects below the prefix."""
        found: list[BucketObject] = []
        try:
            for page in self._store.list():
                found += (
                    BucketObject(one["path"], one["size"], (one["e_tag"] or "").strip('"'))
                    for one in page
                )
                if len(found) > MAX_OBJECTS:
                    raise DownloadError(
                        f"{self._uri} has more than {MAX_OBJECTS} objects: set spec.model.uri to "
                        "the prefix of one checkpoint"
                    )
        except BaseError as error:
            raise self._convert_error(error) from None
        return found

    def read_object(self, bucket_object: BucketObject, offset: int) -> Iterator[bytes]:
        """Yield the content of ``bucket_object`` from ``offset`` on. Raises ObjectChangedError."""
        for start in range(offset, bucket_object.size, REQUEST_RANGE_BYTES):
            options: GetOptions = {
                "if_match": f'"{bucket_object.etag}"',
                "range": (start, min(start + REQUEST_RANGE_BYTES, bucket_object.size)),
            }
            try:
                yield from self._store.get(bucket_object.path, options=options).stream(
                    STREAM_CHUNK_BYTES
                )
            except (BaseError, FileNotFoundError) as error:
                raise self._convert_error(error) from None

    def _convert_error(self, error: BaseError | FileNotFoundError) -> Exception:
        # obstore's exceptions have no fields: the status and the error page are in their text.
        text, _, details = str(error).partition("\n\nDebug source:")
        if isinstance(error, InvalidPathError):
            return DownloadError(
                f"{self._uri} has an object with an invalid name: {text}; rename the object"
            )
        if "redirect without LOCATION" in text or "AuthorizationHeaderMalformed" in text:
            named = _REGION_PATTERN.search(text)
            region = f"set AWS_REGION to {named[1]}" if named else "set AWS_REGION"
            return DownloadError(
                f"{self._uri} is in another region: {region} in the Secret"
                f" that {CREDENTIALS_FIELD} names"
            )
        if (answer := _STATUS_PATTERN.search(text)) is None:
            causes = [found[0] or found[1] for found in _CAUSE_PATTERN.findall(details)]
            reason = causes[-1] if causes else text.rpartition(" - ")[2]
            return StoreUnreachableError(f"{self._uri}: {reason[:MAX_REASON_CHARS]}")
        page = _ERROR_PAGE_PATTERN.search(answer[2] or "")
        reason = (f"{page[1]}: {page[2]}" if page else answer[2] or answer[0])[:MAX_REASON_CHARS]
        match int(answer[1]):
            case 404:
                return DownloadError(f"{self._uri} does not exist: correct spec.model.uri")
            case 412:
                return ObjectChangedError(
                    f"{self._uri} changed during the download: start the download again"
                )
            case 401 | 403:
                action = "set" if self._anonymous else "correct"
                return DownloadError(
                    f"access to {self._uri} was denied: {action} the credentials in "
                    f"{CREDENTIALS_FIELD} ({reason})"
                )
            case 429 | 500 | 502 | 503 | 504:
                return StoreUnreachableError(
                    f"{self._uri} answered with HTTP {answer[1]}: {reason}"
                )
        return DownloadError(f"{self._uri} answered with HTTP {answer[1]}: {reason}")


def _check_environment() -> None:
    for name in [name for name in os.environ if name.startswith("AWS_") and not os.environ[name]]:
        del os.environ[name]
    if ("AWS_ACCESS_KEY_ID" in os.environ) != ("AWS_SECRET_ACCESS_KEY" in os.environ):
        raise DownloadError(
            f"the Secret of {CREDENTIALS_FIELD} has only one of AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY: set both"
        )
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        if (endpoint := os.environ.get(name)) is not None and not _is_url(endpoint):
            raise DownloadError(f"{name} must be a URL with http or https, got {endpoint}")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    host = re.fullmatch(r"[\w.-]+|[0-9a-f:.]+", parts.hostname or "", re.ASCII)
    return parts.scheme in ("http", "https") and host is not None and port != 0
