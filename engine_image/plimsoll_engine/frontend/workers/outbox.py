"""Queue of messages that wait to be written to the worker.

While a worker hangs, clients still submit and abort requests. An abort cancels a submission in the
queue, so the queue does not grow without bound.
"""

from __future__ import annotations

from msgspec.structs import replace

from plimsoll_engine.messages.choices import MAX_JOINED_TOKENS, create_choice
from plimsoll_engine.messages.worker_ipc import Abort, Stop, Submit, ToWorker


class Outbox:
    """Queue of messages to the worker, in sending order."""

    def __init__(self) -> None:
        self._waiting: dict[str, ToWorker] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: ToWorker) -> None:
        """Queue ``message``.

        An abort cancels a submission in the queue. A stop replaces all queued messages.
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
            message = self._waiting.pop(key)
            return self._join_choices(message) if isinstance(message, Submit) else message
        return None

    def _join_choices(self, first_submit: Submit) -> Submit:
        # Joins the choices that directly follow it in the queue.
        choices, tokens = [], len(first_submit.prompt_ids) + len(first_submit.output_ids)
        for waiting in self._waiting.values():
            choice = create_choice(first_submit, waiting) if isinstance(waiting, Submit) else None
            if choice is None:
                break
            tokens += len(first_submit.prompt_ids) + len(choice.output_ids)
            if tokens > MAX_JOINED_TOKENS:
                break
            choices.append(choice)
        for choice in choices:
            del self._waiting[f"submit {choice.request_id}"]
        return replace(first_submit, choices=choices) if choices else first_submit
