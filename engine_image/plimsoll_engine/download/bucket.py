"""Client of an S3-compatible bucket: lists objects, and reads one from an offset.

obstore signs, retries, and reads the variables of AWS's tools: keys, session tokens, web identity,
region, endpoint and path style.
"""

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

READ_TIMEOUT = timedelta(seconds=60)
"""Time without a byte after which a connection counts as dead."""
REQUEST_TIMEOUT = timedelta(hours=1)
"""Limit of one request: a part takes an hour at 19 kB/s."""
RETRIES = 8
"""Retries of one request. With obstore's pauses, a store may be away for about 25 s."""
PART = 64 << 20
"""Bytes of one request. Each has its own retries, however long the whole object takes."""
BLOCK = 1 << 20
MAX_OBJECTS = 10_000
"""Objects below one prefix. The largest checkpoints have some hundred files."""
MAX_REASON_CHARS = 300
"""Characters of a store's own words in a message."""
SECRET = "spec.model.credentialsSecretRef"
SOURCES = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
"""Variables that name credentials. Without them, requests are anonymous, as for public buckets."""
_STATUS = re.compile(r"status code: (\d{3})[^:]*(?:: (.*))?", re.DOTALL)
_PAGE = re.compile(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)
_REGION = re.compile(r"<Region>([a-z0-9-]{1,32})</Region>")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"|InvalidCertificate\(\s*(\w+)')


class Unreachable(Exception):
    """The store did not answer, or asked to retry later."""


class Changed(DownloadError):
    """The object has changed since it was listed."""


@dataclass(frozen=True)
class Item:
    """Object below the bucket's prefix. ``etag`` changes with its content."""

    path: str
    size: int
    etag: str


class Bucket:
    """Reader of the objects below ``s3://NAME/PREFIX``.

    Every call raises :class:`Unreachable`, or :class:`DownloadError` if a retry would not help.
    """

    def __init__(self, uri: str, retries: int = RETRIES) -> None:
        _check_environment()
        self._uri, self._anonymous = uri, not any(name in os.environ for name in SOURCES)
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
                retry_config={"max_retries": retries},
            )
        except BaseError as error:
            raise self._error_for(error) from None

    def list(self) -> list[Item]:
        """Return all objects."""
        found: list[Item] = []
        try:
            for page in self._store.list():
                found += (
                    Item(one["path"], one["size"], (one["e_tag"] or "").strip('"')) for one in page
                )
                if len(found) > MAX_OBJECTS:
                    raise DownloadError(
                        f"{self._uri} has more than {MAX_OBJECTS} objects: set spec.model.uri to "
                        "the prefix of one checkpoint"
                    )
        except BaseError as error:
            raise self._error_for(error) from None
        return found

    def read(self, item: Item, offset: int) -> Iterator[bytes]:
        """Yield the object's bytes from ``offset`` on.

        Raises :class:`Changed` if the object has changed since it was listed.
        """
        for start in range(offset, item.size, PART):
            options: GetOptions = {
                "if_match": f'"{item.etag}"',
                "range": (start, min(start + PART, item.size)),
            }
            try:
                yield from self._store.get(item.path, options=options).stream(BLOCK)
            except (BaseError, FileNotFoundError) as error:
                raise self._error_for(error) from None

    def _error_for(self, error: BaseError | FileNotFoundError) -> Exception:
        """Return the exception for a refusal, with what the manifest's author can do.

        obstore's exceptions have no fields: the status and the page are in their text.
        """
        text, _, details = str(error).partition("\n\nDebug source:")
        if isinstance(error, InvalidPathError):
            return DownloadError(f"{self._uri}: {text}: rename the object")
        if "redirect without LOCATION" in text or "AuthorizationHeaderMalformed" in text:
            named = _REGION.search(text)
            region = f"set AWS_REGION to {named[1]}" if named else "set AWS_REGION"
            return DownloadError(
                f"{self._uri} is in another region: {region} in the Secret of {SECRET}"
            )
        if (answer := _STATUS.search(text)) is None:
            causes = [found[0] or found[1] for found in _CAUSE.findall(details)]
            reason = causes[-1] if causes else text.rpartition(" - ")[2]
            return Unreachable(f"{self._uri}: {reason[:MAX_REASON_CHARS]}")
        page = _PAGE.search(answer[2] or "")
        reason = (f"{page[1]}: {page[2]}" if page else answer[2] or answer[0])[:MAX_REASON_CHARS]
        match int(answer[1]):
            case 404:
                return DownloadError(f"{self._uri} does not exist")
            case 412:
                return Changed(
                    f"{self._uri} changed while it was read; the next start reads it again"
                )
            case 401 | 403:
                who = "no credentials in" if self._anonymous else "the credentials of"
                return DownloadError(f"{self._uri} may not be read: {who} {SECRET}: {reason}")
            case 429 | 500 | 502 | 503 | 504:
                return Unreachable(f"{self._uri}: {answer[1]} {reason}")
        return DownloadError(f"{self._uri}: {answer[1]} {reason}")


def _check_environment() -> None:
    """Check the variables of AWS's tools and remove empty ones, which count as unset.

    Raises :class:`DownloadError` for an incomplete key or an endpoint that is not a URL.
    """
    for name in [name for name in os.environ if name.startswith("AWS_") and not os.environ[name]]:
        del os.environ[name]
    if ("AWS_ACCESS_KEY_ID" in os.environ) != ("AWS_SECRET_ACCESS_KEY" in os.environ):
        raise DownloadError(
            f"set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: the Secret of {SECRET} "
            "has only one of them"
        )
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        if (endpoint := os.environ.get(name)) is not None and not _is_url(endpoint):
            raise DownloadError(f"{name} must be a URL with http or https: {endpoint}")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    host = re.fullmatch(r"[\w.-]+|[0-9a-f:.]+", parts.hostname or "", re.ASCII)
    return parts.scheme in ("http", "https") and host is not None and port != 0
