"""What a worker says of a submission that was taken back says nothing of the next one.

Tests ``frontend/async_engine.py``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.requests.request_log import Generation, RequestFailedError
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_engine.messages.worker_ipc import (
    FromWorker,
    MissingMedia,
    Ready,
    RequestFailure,
    Sampling,
    Token,
    Tokens,
)
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.settings import Settings
from plimsoll_faults.models import tiny
from tests.byte_text import bytes_text


def resubmitted(folder: Path, *answers: FromWorker) -> Generation:
    """Return a request that was parked and submitted again, after the worker's ``answers``."""
    tiny.write_checkpoint(folder)
    (folder / "run").mkdir()
    worker = WorkerConfig(str(folder), str(folder / "run"), str(folder / "w.sock"), device="cpu")
    settings = Settings(worker=worker, served_model_name="m")
    request = Generation("a", [1, 2], Sampling(max_tokens=9), bytes_text())

    async def answered() -> None:
        engine = AsyncEngine(settings, Tokenizer(folder))
        engine.requests.admit(request)
        engine.ready = Ready(epoch=1, max_model_len=512, num_blocks=8, block_size=4, load_s=1.0)
        assert engine.resubmit() == 1
        engine.abort_in_worker(request)
        assert engine.resubmit() == 1
        assert (request.attempt, request.with_worker) == (2, True)
        for answer in answers:
            engine._handle_message(answer)

    asyncio.run(answered())
    return request


@pytest.mark.parametrize(
    "late",
    [
        RequestFailure("a", 1, "error", "of the submission that was taken back"),
        MissingMedia("a", 1, [b"key"]),
        Tokens(1, [Token("a", 65, "stop", attempt=1)]),
    ],
    ids=lambda late: type(late).__name__,
)
def test_a_late_answer_leaves_the_next_submission_alone(late: FromWorker, tmp_path: Path) -> None:
    request = resubmitted(tmp_path, late)
    assert request.attempt == 2, "it is not submitted a third time beside the second"
    assert (request.is_done, request.with_worker) == (False, True)


def test_the_answer_to_the_newest_submission_counts(tmp_path: Path) -> None:
    missing, dropped = (
        MissingMedia("a", 2, [b"key"]),
        RequestFailure("a", 3, "invalid", "why", "prompt"),
    )
    request = resubmitted(tmp_path, missing, dropped)
    assert request.attempt == 3, "what it lacked is sent"
    with pytest.raises(RequestFailedError, match="why") as caught:
        request.take()
    assert (caught.value.reason, caught.value.param) == ("invalid", "prompt")
