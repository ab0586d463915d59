"""Carry over: the running requests of one epoch, as the next one is to go on with them. Pure."""

from __future__ import annotations

from plimsoll_engine.frontend.requests import Generation, RequestLog


def to_resubmit(log: RequestLog) -> list[Generation]:
    """Every unfinished request with its tokens so far, oldest first; parked ones stay parked.

    What a dead worker had made and not yet said is made again: token i depends on the tokens before
    it and on (seed, i) alone, so the client sees one text.
    """
    return [generation for generation in log.unfinished() if not generation.parked]
