"""Requests whose length two servers could read differently.

h11 refuses differing ``Content-Length`` fields and any transfer coding but ``chunked``. It lets
``Transfer-Encoding`` win over ``Content-Length``, as RFC 9112 (6.1) permits; a proxy in front that
goes by the length instead would take the rest of the body for another client's request.
"""

from __future__ import annotations

from typing import Any

import h11

AMBIGUOUS = "the request has both Transfer-Encoding and Content-Length: send one of them"


class StrictConnection(h11.Connection):
    """Refuses a request that gives its length twice. ``fault`` then says why, for the client."""

    fault: str | None = None

    def next_event(self) -> Any:
        """h11's next event. Raises h11.RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"transfer-encoding", b"content-length"} <= names:
                self.fault = AMBIGUOUS
                raise h11.RemoteProtocolError(AMBIGUOUS)
        return event
