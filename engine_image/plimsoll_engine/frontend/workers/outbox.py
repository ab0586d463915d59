"""Queue of messages that wait to be written to the worker.

While a worker hangs, clients still come and go, and a socket buffer would grow without bound. Here,
an abort cancels a submission that is not yet written. The queue thus holds at most one message per
running request, and one abort per request that the worker received before it hung.
"""

from __future__ import annotations

from plimsoll_engine.messages.worker_ipc import Abort, Stop, Submit, ToWorker


class Outbox:
    """Queue of messages to the worker, in sending order."""

    def __init__(self) -> None:
        self._waiting: dict[str, ToWorker] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: ToWorker) -> None:
        """Queue a message.

        An abort cancels a submission that is not sent yet. A stop clears the whole queue.
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
        """Remove and return the next message; None if the queue is empty."""
        for key in self._waiting:
            return self._waiting.pop(key)
        return None
