"""Requests that may be what ends the workers: each of them is computed again alone.

A request that ends its worker is carried over and ends the next one, until the engine gives up with
all the others. What was running when two workers in a row ended, without a token between, is
suspected: only one of the suspects is with a worker at a time, until its next token clears it. The
one that a third worker ends with has an error, and the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from plimsoll_engine.frontend.requests.request_log import Generation, RequestFailed

SUSPECTED = 2
"""So many workers ended while a request made no token."""


class Quarantine:
    """The suspects of one engine, oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[Generation] = deque()
        self._tried: Generation | None = None

    def worker_lost(self, unfinished: Sequence[Generation]) -> None:
        """Count the loss of a worker for what it computed; end the suspect that was with it."""
        tried, self._tried = self._tried, None
        for generation in unfinished:
            if not generation.with_worker:
                continue
            generation.losses += 1
            if generation is tried:
                generation.fail(
                    RequestFailed("error", f"{generation.losses} workers ended while computing it")
                )

    def release(self, generation: Generation) -> None:
        """Forget a request that is over."""
        if generation in self._waiting:
            self._waiting.remove(generation)
        if generation is self._tried:
            self._tried = None

    def admit(self, carried: Sequence[Generation]) -> list[Generation]:
        """Return those of ``carried`` that are not suspected. The others wait for :meth:`next`."""
        suspects = [generation for generation in carried if generation.losses >= SUSPECTED]
        self._waiting = deque(suspects)
        return [generation for generation in carried if generation.losses < SUSPECTED]

    def next(self) -> Generation | None:
        """Return the suspect that is to be computed now; None while another one is."""
        tried = self._tried
        if tried is not None and tried.with_worker and tried.losses and not tried.done:
            return None
        self._tried = None
        while self._waiting:
            generation = self._waiting.popleft()
            if not (generation.done or generation.parked or generation.with_worker):
                self._tried = generation
                return generation
        return None
