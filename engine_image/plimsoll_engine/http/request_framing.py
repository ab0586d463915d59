"""HTTP connection that bounds a request's header and chunks, and refuses ambiguous lengths.

A proxy that trusts ``Content-Length``, while h11 trusts ``Transfer-Encoding``, would read the rest
of the body as another client's request.
"""

from __future__ import annotations

import re
from typing import Any

import h11

from plimsoll_engine.http.limits import MAX_HEADER_BYTES, MAX_SMALL_CHUNKS, MIN_CHUNK_BYTES

AMBIGUOUS_LENGTH_MESSAGE = (
    "the request has both Transfer-Encoding and Content-Length: send one of them"
)
LONG_HEADER_MESSAGE = (
    f"the request's header is larger than the maximum of {MAX_HEADER_BYTES} bytes: send less"
)
SMALL_CHUNKS_MESSAGE = (
    f"the body has more than {MAX_SMALL_CHUNKS} chunks of fewer than {MIN_CHUNK_BYTES} bytes on "
    "average: send larger chunks"
)
_ABSOLUTE_TARGET_PATTERN = re.compile(rb"https?://([^/?@]+)((?:[/?].*)?)", re.IGNORECASE)


class StrictConnection(h11.Connection):
    """h11 connection that refuses long headers, ambiguous lengths and many small chunks."""

    error_message: str | None = None

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        # Chunks and bytes of the current request.
        self._chunks = self._chunked_bytes = 0

    def next_event(self) -> Any:
        """Return the next event. Raises h11.RemoteProtocolError if the request is refused."""
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            is_long = error.error_status_hint == 431
            self.error_message = (
                LONG_HEADER_MESSAGE if is_long else f"the request is not valid HTTP: {error}"[:256]
            )
            # h11 raises it in its own method, so the traceback would be a reference cycle.
            raise error.with_traceback(None) from None
        if isinstance(event, h11.Data):
            self._count_chunk(event)
        return self._check_request(event) if isinstance(event, h11.Request) else event

    def _count_chunk(self, data: h11.Data) -> None:
        # Each chunk takes 9 microseconds: those of one byte would block the event loop.
        self._chunked_bytes += len(data.data)
        self._chunks += data.chunk_end
        if self._chunks > MAX_SMALL_CHUNKS + self._chunked_bytes // MIN_CHUNK_BYTES:
            self._refuse(SMALL_CHUNKS_MESSAGE)

    def _check_request(self, request: h11.Request) -> h11.Request:
        self._chunks = self._chunked_bytes = 0
        headers = list(request.headers)
        # h11 checks the size only of a header that did not come in one piece.
        if len(request.target) + sum(len(n) + len(v) for n, v in headers) > MAX_HEADER_BYTES:
            self._refuse(LONG_HEADER_MESSAGE)
        if {b"transfer-encoding", b"content-length"} <= {name for name, _ in headers}:
            self._refuse(AMBIGUOUS_LENGTH_MESSAGE)
        if (url := _ABSOLUTE_TARGET_PATTERN.fullmatch(request.target)) is None:
            return request
        # A server accepts a URL as the target. Its host replaces the one in the header (RFC 9112,
        # section 3.2.2).
        host, target = url.groups()
        return h11.Request(
            method=request.method,
            target=target if target.startswith(b"/") else b"/" + target,
            headers=[(b"host", host), *(header for header in headers if header[0] != b"host")],
            http_version=request.http_version,
        )

    def _refuse(self, message: str) -> None:
        self.error_message = message
        raise h11.RemoteProtocolError(message)
