"""A request that no message can carry ends alone; those after it reach the worker.

Tests ``frontend/workers/worker_link.py``.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from plimsoll_engine.frontend.workers.worker_link import WorkerLink, WorkerSocket
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.framing import read_body
from plimsoll_engine.messages.worker_ipc import Grammar, RequestFailure, Sampling, Submit


def test_a_request_that_cannot_be_encoded_ends_alone(tmp_path: Path) -> None:
    heard: list[worker_ipc.FromWorker] = []
    broken = Sampling(max_tokens=1, grammar=Grammar("regex", "\ud800", "structured_outputs.regex"))
    prompt = [3]

    async def run() -> worker_ipc.ToWorker:
        link = WorkerLink(1, 1 << 20, heard.append, lambda: None)
        server = WorkerSocket(tmp_path / "s")
        await server.listen()
        server.expect(link)
        for number in range(2):  # choices of one prompt, which are sent together
            link.send(Submit(f"broken-{number}", prompt, broken, attempt=4))
        link.send(Submit("whole", prompt, Sampling(max_tokens=1)))
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(worker_ipc.encode_frame(worker_ipc.Hello(1, os.getpid())))
        async with asyncio.timeout(10):
            body = await read_body(reader)
        writer.close()
        await server.close()
        assert body is not None
        received: worker_ipc.ToWorker = worker_ipc.to_worker_decoder.decode(body)
        return received

    received = asyncio.run(run())
    assert isinstance(received, Submit)
    assert received.request_id == "whole"
    failures = [one for one in heard if isinstance(one, RequestFailure)]
    assert [(one.request_id, one.attempt, one.reason) for one in failures] == [
        ("broken-0", 4, "error"), ("broken-1", 4, "error"),
    ]  # fmt: skip
