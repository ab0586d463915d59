"""Whatever ends an answer, nothing of it is left behind. Tests ``api/answer.py``."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll_engine.api.answer import GenerationResponse


class Unexpected(Exception):
    """No error that an answer knows."""


@pytest.mark.parametrize("stream", [True, False])
def test_an_unexpected_error_leaves_neither_a_task_nor_a_cycle(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_self: GenerationResponse, _open: set[int]) -> Any:
        raise Unexpected

    async def receive() -> Any:
        await asyncio.Event().wait()  # the client neither sends nor leaves

    async def send(_message: Any) -> None:
        raise AssertionError("a response was sent to the client")

    async def run() -> weakref.ref[GenerationResponse]:
        engine: Any = SimpleNamespace(track_running=lambda *_: nullcontext())
        batch: Any = SimpleNamespace(model="m", request_id="r", generations=[object()])
        one: Any = SimpleNamespace(index=0)
        answer = GenerationResponse(engine, batch, [one], stream=stream, include_usage=False)
        app = SimpleNamespace(state=SimpleNamespace(answers=None))
        scope = {"type": "http", "app": app, "headers": [], "client": ("a", 1)}
        with pytest.raises(Unexpected):
            await answer(scope, receive, send)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return weakref.ref(answer)

    monkeypatch.setattr(GenerationResponse, "_get_next_deltas", fails)
    gc.collect()
    gc.disable()
    try:
        answer = asyncio.run(run())
        assert answer() is None
    finally:
        gc.enable()
