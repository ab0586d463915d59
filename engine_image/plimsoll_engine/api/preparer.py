"""Prepares bodies without holding up the streams: small ones here, all others in another process.

What is small takes some milliseconds at most, less than the way to the other process and back would
add to it under load.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from plimsoll_engine.api.body import Body
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.forms import Form
from plimsoll_engine.api.prepare import Context, Preparation, PreparedBody, Text
from plimsoll_engine.api.prepare_messages import (
    Job,
    Kind,
    Outcome,
    PreparationRefused,
    receive,
    send,
)
from plimsoll_engine.api.protocol import ChatRequest, CompletionRequest
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.http.turns import Turns

log = logging.getLogger(__name__)

INLINE_BYTES = 4 << 10
"""The costliest bodies of this size take 4 ms (lists of nothing, or as many tokens as bytes)."""
INLINE_IDS_BYTES = 16 << 10
"""A completion of token ids, some 2,000, is decoded in less than a millisecond."""
START_TIMEOUT_S = 60.0
VALUES = 1 << 16
"""Commas and brackets that any body may have, and :data:`VALUES_PER_TOKEN` for the context: a
prompt of token ids has one a token, one of text may have some."""
VALUES_PER_TOKEN = 4

_OUTCOME: msgspec.msgpack.Decoder[Outcome] = msgspec.msgpack.Decoder(Outcome)
_Result = TypeVar("_Result")


class Lost(Exception):
    """The process ended in the middle of a job, or could not be started."""


class Starved(Exception):
    """The machine gave the process too little CPU time to blame its job for a timeout."""


class Preparer:
    """``timeout_s``: of one job, in which the process is killed."""

    def __init__(self, engine: AsyncEngine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        image = engine.media.processors.image
        self._image = None
        if image is not None:
            token = image.placeholder
            self._image = "<image>" if token is None else engine.tokenizer.decode([token])
        self._here = Preparation(engine.tokenizer, self._image)
        self._turns = Turns(1)
        # One thread for one process: it lives as long as the process that dies with it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Have the process ready before it is needed; its memory belongs to the baseline."""
        self._thread.submit(self._begin)

    def close(self) -> None:
        """End the preparing process; requests that it still works on fail."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._end()

    async def completion(self, body: Body) -> PreparedBody[CompletionRequest]:
        """Have a completion's body prepared.

        Raises ApiError; ClientDisconnect where the client left while its body waited.
        """
        if len(body.raw) <= INLINE_BYTES or _of_ids(body.raw):
            return self._here.completion(body.raw, self._context())
        return await self._there(body, "completion", PreparedBody[CompletionRequest])

    async def chat(self, body: Body) -> PreparedBody[ChatRequest]:
        """Have a chat's body prepared; raise ApiError where it is wrong."""
        if len(body.raw) <= INLINE_BYTES:
            return self._here.chat(body.raw, self._context())
        return await self._there(body, "chat", PreparedBody[ChatRequest])

    async def chats(self, body: Body) -> PreparedBody[ChatRequest]:
        """Have several chats of one body prepared; raise ApiError where it is wrong."""
        if len(body.raw) <= INLINE_BYTES:
            return self._here.chats(body.raw, self._context())
        return await self._there(body, "chats", PreparedBody[ChatRequest])

    async def responses(self, body: Body) -> PreparedBody[ChatRequest]:
        """Have a body of ``/v1/responses`` prepared; raise ApiError where it is wrong."""
        if len(body.raw) <= INLINE_BYTES:
            return self._here.responses(body.raw, self._context())
        return await self._there(body, "responses", PreparedBody[ChatRequest])

    async def tokenize(self, body: Body) -> Text:
        """Have a text tokenized; raise ApiError where the body is wrong."""
        if len(body.raw) <= INLINE_BYTES:
            return self._here.tokenize(body.raw, self._context())
        return await self._there(body, "tokenize", Text)

    async def detokenize(self, body: Body) -> Text:
        """Have tokens turned into text; raise ApiError where the body is wrong."""
        if len(body.raw) <= INLINE_BYTES:
            return self._here.detokenize(body.raw, self._context())
        return await self._there(body, "detokenize", Text)

    async def form(self, body: Body, content_type: str) -> Form:
        """Return the file and the other fields of a multipart body. Raises ApiError."""
        return await self._there(body, "form", Form, content_type)

    def _context(self) -> Context:
        limit = self._engine.max_model_len
        settings = self._engine.settings
        api = settings.api
        return Context(
            limit, settings.max_queued, max_values(limit), api.tool_call_parser,
            api.strict_requests, api.skip_hosted_tools,
        )  # fmt: skip

    async def _there(
        self,
        body: Body,
        kind: Kind,
        result: type[_Result],
        content_type: str = "",
    ) -> _Result:
        raw = body.raw
        job = Job(kind, self._context(), content_type)
        loop = asyncio.get_running_loop()
        async with self._turns.turn(body.client, body.left):
            try:
                outcome = await loop.run_in_executor(self._thread, self._call, job, raw)
            except TimeoutError:
                log.warning("a body was given up", extra={"bytes": len(raw), "kind": kind})
                raise ApiError(
                    413,
                    f"the body took longer than {self._timeout_s:g} s to read, template and"
                    " tokenize: send less in one request",
                    code="body_too_complex",
                ) from None
            except Starved:
                raise ApiError(
                    503, f"the machine was too busy to read the body within {self._timeout_s:g} s:"
                    " send it again", code="unavailable", retry=True,
                ) from None  # fmt: skip
            except Lost:
                log.error(
                    "the process that prepares bodies ended",
                    extra={"bytes": len(raw), "kind": kind},
                )
                raise ApiError(
                    503, "the request was lost while it was being read: send it again",
                    code="unavailable", retry=True,
                ) from None  # fmt: skip
        if isinstance(outcome, PreparationRefused):
            raise ApiError(
                outcome.status, outcome.message,
                param=outcome.param, code=outcome.code, retry=outcome.retry,
            )  # fmt: skip
        return msgspec.msgpack.decode(outcome.result, type=result)

    # ---- in the thread

    def _call(self, job: Job, raw: bytearray) -> Outcome:
        if self._process is None or self._process.poll() is not None:
            self._begin()
        assert self._socket is not None
        assert self._process is not None
        begun_s = _cpu_s(self._process.pid)
        self._socket.settimeout(self._timeout_s)
        try:
            send(self._socket, msgspec.msgpack.encode(job))
            send(self._socket, raw)
            return _OUTCOME.decode(receive(self._socket))
        except TimeoutError:
            starved = _cpu_s(self._process.pid) - begun_s < self._timeout_s / 2
            self._restart()
            if starved:
                raise Starved from None
            raise
        except (EOFError, OSError):
            self._restart()
            raise Lost from None

    def _restart(self) -> None:
        self._end()
        if not self._closed:
            self._thread.submit(self._begin)

    def _begin(self) -> None:
        """Start the process; raise :class:`Lost` where it does not come up."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        if self._closed:
            raise Lost
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable, "-m", "plimsoll_engine.api.preparer_process",
                f"--fd={theirs.fileno()}", f"--parent={os.getpid()}",
                f"--model={self._engine.settings.model}",
                f"--generation-config={self._engine.settings.api.generation_config}",
            ]  # fmt: skip
            if self._image is not None:
                command.append(f"--image-token={self._image}")
            if (template := self._engine.settings.api.chat_template) is not None:
                command.append(f"--chat-template={template}")
            try:
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
            except OSError:  # the machine has no process left
                ours.close()
                raise Lost from None
        self._socket = ours
        ours.settimeout(START_TIMEOUT_S)
        try:
            receive(ours)
        except (EOFError, OSError):
            self._end()
            raise Lost from None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


def _cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used; proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _of_ids(raw: bytearray) -> bool:
    """Whether a body has a prompt of at most so many token ids, and little else."""
    if len(raw) > INLINE_IDS_BYTES:
        return False
    rest = raw.translate(None, b"0123456789, \n")
    return b'"prompt":[]' in rest and len(rest) <= INLINE_BYTES


def max_values(max_model_len: int | None) -> int:
    """How many JSON values a body may have: a larger context takes more of them."""
    return VALUES + VALUES_PER_TOKEN * (max_model_len or 0)
