"""The preparing process may hang or die: its job has an error, the next one has a new process.

Tests ``api/preparer.py``.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from plimsoll_engine.api import preparer
from plimsoll_engine.api.body import Body
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.forms import Form
from plimsoll_engine.api.preparer import MAX_INLINE_BYTES, Preparer
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_engine.http.api_flags import ApiSettings
from plimsoll_faults.models import tiny


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a preparer asks of an engine."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    tiny.write_checkpoint(folder)
    return SimpleNamespace(
        tokenizer=Tokenizer(folder),
        max_model_len=8192,
        settings=SimpleNamespace(max_queued=8, model=folder, api=ApiSettings()),
        media=SimpleNamespace(processors=SimpleNamespace(image=None)),
    )


LARGE = bytearray(json.dumps({"model": "tiny", "prompt": "tide " * 1500}).encode())
assert len(LARGE) > MAX_INLINE_BYTES


async def never() -> None:
    await asyncio.Event().wait()


BODY = Body(LARGE, "a", never)


def _unread_bytes(instance: Preparer) -> int:
    """Of the job that the process has been given, what it has not read."""
    assert instance._socket is not None
    size = fcntl.ioctl(instance._socket.fileno(), termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(size, sys.byteorder)


@pytest.mark.parametrize(
    ("number", "timeout_s", "status", "code"),
    [
        (signal.SIGSTOP, 0.5, 503, "unavailable"),  # it has no CPU time
        (signal.SIGKILL, 60.0, 503, "unavailable"),
    ],
)
def test_a_process_that_hangs_or_dies_is_replaced(
    engine: Any, number: int, timeout_s: float, status: int, code: str
) -> None:
    async def scenario() -> None:
        instance = Preparer(engine, timeout_s=60)
        try:
            first = await instance.prepare_completion(BODY)
            process = instance._process
            assert process is not None
            instance._timeout_s = timeout_s
            os.kill(process.pid, signal.SIGSTOP)
            job = asyncio.create_task(instance.prepare_completion(BODY))
            while not _unread_bytes(instance):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            os.kill(process.pid, number)
            with pytest.raises(ApiError) as told:
                await job
            assert (told.value.status, told.value.code) == (status, code)
            instance._timeout_s = 60
            assert await instance.prepare_completion(BODY) == first
            assert instance._process is not process
        finally:
            instance.close()

    asyncio.run(scenario())


def test_the_loop_turns_between_two_small_bodies(engine: Any) -> None:
    """A client that sends many at once does not delay streams and probes by their sum."""
    small = Body(bytearray(json.dumps({"model": "tiny", "prompt": "tide"}).encode()), "a", never)

    async def scenario() -> int:
        instance = Preparer(engine, timeout_s=60)
        turns = 0
        jobs = [asyncio.create_task(instance.prepare_completion(small)) for _ in range(30)]
        while not all(job.done() for job in jobs):
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(scenario()) >= 30


def test_a_body_that_takes_too_much_cpu_time_is_too_complex(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter([1.0, 1.3])

    async def scenario() -> None:
        instance = Preparer(engine, timeout_s=60)
        try:
            await instance.prepare_completion(BODY)
            assert instance._process is not None
            os.kill(instance._process.pid, signal.SIGSTOP)
            instance._timeout_s = 0.5
            monkeypatch.setattr(preparer, "_read_cpu_s", lambda pid: next(used))
            with pytest.raises(ApiError) as told:
                await instance.prepare_completion(BODY)
            assert (told.value.status, told.value.code) == (413, "body_too_complex")
        finally:
            instance.close()

    asyncio.run(scenario())


def test_a_machine_without_processes_asks_to_send_it_again(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*args: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def scenario() -> None:
        instance = Preparer(engine, timeout_s=60)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(subprocess, "Popen", none_left)
                with pytest.raises(ApiError) as told:
                    await instance.prepare_completion(BODY)
            assert (told.value.status, told.value.code) == (503, "unavailable")
            await instance.prepare_completion(BODY)
        finally:
            instance.close()

    asyncio.run(scenario())


def test_the_body_of_a_client_that_left_is_not_prepared(engine: Any) -> None:
    """It waits for its turn; the one before it hangs."""

    async def scenario() -> None:
        instance, prepared = Preparer(engine, timeout_s=60), []
        call, begun, loop = instance._run_job, asyncio.Event(), asyncio.get_running_loop()

        def counted(job: Any, raw: bytearray) -> Any:
            prepared.append(len(raw))
            loop.call_soon_threadsafe(begun.set)
            return call(job, raw)

        instance._run_job = counted  # type: ignore[method-assign]
        try:
            await instance.prepare_completion(BODY)
            assert instance._process is not None
            os.kill(instance._process.pid, signal.SIGSTOP)
            begun.clear()
            hangs = asyncio.create_task(instance.prepare_completion(BODY))
            await asyncio.wait_for(begun.wait(), 30)
            gone = asyncio.Event()

            async def left() -> None:
                await gone.wait()

            waits = asyncio.create_task(instance.prepare_completion(Body(LARGE, "b", left)))
            await asyncio.sleep(0)
            gone.set()
            with pytest.raises(ClientDisconnect):
                await asyncio.wait_for(waits, 30)
            os.kill(instance._process.pid, signal.SIGCONT)
            await hangs
            await instance.prepare_completion(BODY)
            assert len(prepared) == 3
        finally:
            instance.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prompt", "here"),
    [
        ([97] * 2000, True),
        ([[97] * 900] * 2, False),
        ([97] * 5000, False),
        ("97, " * 2000, False),
    ],
    ids=["ids", "two prompts", "many ids", "text of digits"],
)
def test_a_prompt_of_some_ids_is_prepared_without_the_process(
    engine: Any, prompt: Any, here: bool
) -> None:
    """Both copies to it and back take longer than to decode the ids."""

    async def scenario() -> None:
        instance = Preparer(engine, timeout_s=60)
        try:
            raw = bytearray(json.dumps({"model": "tiny", "prompt": prompt}).encode())
            assert len(raw) > MAX_INLINE_BYTES
            prepared = await instance.prepare_completion(Body(raw, "a", never))
            assert prepared.prompts[0]
            assert (instance._process is None) == here
        finally:
            instance.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("charset", ["utf-7", "undefined", '"utf-7"'])
def test_a_form_is_utf_8_whatever_charset_it_names(engine: Any, charset: str) -> None:
    """A codec of Python's may fail, or make a text of half a character, which ended the process."""
    raw = bytearray(
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nsound\r\n'
        b'--B\r\nContent-Disposition: form-data; name="language"\r\n\r\n+2AA-\r\n--B--\r\n'
    )

    async def parsed(instance: Preparer) -> Form:
        kind = f"multipart/form-data; charset={charset}; boundary=B"
        return await instance.parse_form(Body(raw, "a", never), kind)

    instance = Preparer(engine, 60.0)
    try:
        assert asyncio.run(parsed(instance)) == Form(b"sound", {"language": "+2AA-"})
    finally:
        instance.close()
