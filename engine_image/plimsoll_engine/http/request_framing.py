"""HTTP connection that refuses requests of ambiguous length.

A proxy that trusts ``Content-Length``, while h11 trusts ``Transfer-Encoding``, would read the rest
of the body as another client's request.
"""

from __future__ import annotations

from typing import Any

import h11

AMBIGUOUS_LENGTH_MESSAGE = (
    "the request has both Transfer-Encoding and Content-Length: send one of them"
)


class StrictConnection(h11.Connection):
    """h11 connection that refuses requests with both Transfer-Encoding and Content-Length."""

    error_message: str | None = None

    def next_event(self) -> Any:
        """Return the next event. Raises h11.RemoteProtocolError if the length is ambiguous."""
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            # h11 raises it in its own method, so the traceback would be a reference cycle.
            raise error.with_traceback(None) from None
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"transfer-encoding", b"content-length"} <= names:
                self.error_message = AMBIGUOUS_LENGTH_MESSAGE
                raise h11.RemoteProtocolError(AMBIGUOUS_LENGTH_MESSAGE)
        return event
