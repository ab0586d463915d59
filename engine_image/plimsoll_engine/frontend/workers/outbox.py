"""What waits to be written to the worker. Pure.

A hung worker does not read, and clients come and go meanwhile. Were each message written to the
socket's buffer, that buffer would grow for as long as the hang; here an abort cancels a submission
that was not written yet, so that the outbox never holds more than one message a live request, and
one abort for each request that the worker was given before it hung.
"""

from __future__ import annotations

from plimsoll_engine.messages.worker_ipc import Abort, Stop, Submit, ToWorker


class Outbox:
    """Messages in the order they are to be written."""

    def __init__(self) -> None:
        self._waiting: dict[str, ToWorker] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: ToWorker) -> None:
        """Queue a message.

        An abort takes back a submission that was not sent yet, and a stop everything.
        """
        if isinstance(message, Stop):
            self._waiting = {"stop": message}
        elif isinstance(message, Submit):
            self._waiting[f"submit {message.request_id}"] = message
        elif isinstance(message, Abort):
            if self._waiting.pop(f"submit {message.request_id}", None) is None:
                self._waiting[f"abort {message.request_id}"] = message
        else:
            self._count += 1
            self._waiting[f"query {self._count}"] = message

    def take(self) -> ToWorker | None:
        """Return the next message, or None."""
        for key in self._waiting:
            return self._waiting.pop(key)
        return None
