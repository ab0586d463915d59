"""Text that an engine's core generates, without a process of its own."""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.messages.worker_ipc import Submit


def generate(engine: EngineCore, submits: Iterable[Submit]) -> dict[str, list[int]]:
    """Run the requests to their end in one batch, and return the tokens of each."""
    found: dict[str, list[int]] = {}
    for submit in submits:
        assert engine.submit(submit) is None
        found[submit.request_id] = []
    while engine.has_work:
        output = engine.step()
        assert not output.dropped, output.dropped
        for token in output.tokens:
            found[token.request_id].append(token.token_id)
    return found
