"""The request log: all that is needed to go on with a running request in another worker.

A request is in the log from its admission to its one :meth:`RequestLog.release`, whatever its end.
It holds tokens and text state and nothing that holds it, so it dies by reference counting alone.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plimsoll_engine.frontend.detokenize import Decode, Detokenizer, StopMatcher
from plimsoll_engine.ipc import Sampling, Submit


class QueueFull(Exception):
    """The engine holds as many unanswered requests as it may."""


class RequestFailed(Exception):
    """A request that ended with an error. ``reason`` is ``invalid`` where the client can cure it,
    ``unavailable`` where another replica can answer, ``error`` otherwise."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Delta(NamedTuple):
    """New text of a stream; ``finish_reason`` is ``stop`` or ``length`` on the last one."""

    text: str
    finish_reason: str | None


@dataclass(slots=True)
class Times:
    """Monotonic seconds."""

    arrived: float
    first_token: float | None = None
    last_token: float | None = None


class Generation:
    """One running request."""

    __slots__ = (
        "__weakref__", "_detokenizer", "_error", "_pending", "_stops", "_wake", "ended",
        "finish_reason", "output_ids", "parked", "prompt_ids", "request_id", "sampling", "times",
        "with_worker",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: Sampling,
        decode: Decode,
        stops: Sequence[str] = (),
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.output_ids: list[int] = []
        self.finish_reason: str | None = None
        self.parked = False
        self.with_worker = False  # the present worker was given it and has not ended it
        self.times = Times(arrived=time.monotonic())
        self._detokenizer = Detokenizer(decode)
        self._stops = StopMatcher(stops)
        self._pending: list[str] = []
        self._error: tuple[str, str] | None = None
        self._wake = asyncio.Event()
        self.ended = asyncio.Event()

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self._error is not None

    def push(self, token_id: int, finish_reason: str | None) -> None:
        """Take in a token of the worker. A stop string ends the request before the worker does."""
        if self.done:
            return
        self.output_ids.append(token_id)
        piece, stopped = self._stops.push(self._detokenizer.push(token_id))
        if not stopped and finish_reason is not None:
            rest, stopped = self._stops.push(self._detokenizer.finish())
            piece += rest if stopped else rest + self._stops.finish()
        self.finish_reason = "stop" if stopped else finish_reason
        if piece:
            self._pending.append(piece)
        if piece or self.done:
            self._wake.set()
        if self.done:
            self.ended.set()

    def fail(self, error: RequestFailed) -> None:
        """End the request with an error; one that has ended already stays as it is."""
        if not self.done:
            self._error = (error.reason, str(error))
            self._wake.set()
            self.ended.set()

    async def delta(self) -> Delta:
        """The text since the last call, as soon as there is any. Raises :class:`RequestFailed`."""
        while not self._pending and not self.done:
            self._wake.clear()
            await self._wake.wait()
        if self._error is not None:
            # A new one each time: one that is kept would hold this frame, and so this request.
            raise RequestFailed(*self._error)
        text = "".join(self._pending)
        self._pending.clear()
        return Delta(text, self.finish_reason)

    def submission(self) -> Submit:
        """What a worker must know to go on from here."""
        return Submit(self.request_id, self.prompt_ids, self.sampling, list(self.output_ids))


class RequestLog:
    """Every request that was admitted and not yet released, oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._running: dict[str, Generation] = {}

    def __len__(self) -> int:
        return len(self._running)

    def admit(self, generation: Generation) -> None:
        """Raises :class:`QueueFull`."""
        if len(self._running) >= self.capacity:
            raise QueueFull(
                f"{len(self._running)} requests wait for an answer, the most (--max-queued)"
            )
        self._running[generation.request_id] = generation

    def get(self, request_id: str) -> Generation | None:
        return self._running.get(request_id)

    def release(self, request_id: str) -> Generation | None:
        """The one end of a request; None where it was released before."""
        return self._running.pop(request_id, None)

    def unfinished(self) -> list[Generation]:
        return [generation for generation in self._running.values() if not generation.done]

    def fail_all(self, reason: str, message: str) -> None:
        for generation in self.unfinished():
            generation.fail(RequestFailed(reason, message))

    def bytes(self) -> int:
        """Memory of the tokens held: a list slot and, above the small integers, an object each."""
        each = 8 + sys.getsizeof(1 << 20)
        return each * sum(len(g.prompt_ids) + len(g.output_ids) for g in self._running.values())
