"""Prepare request bodies: small ones in the frontend, others in a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from plimsoll_engine.api.body import Body
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.forms import Form
from plimsoll_engine.api.prepare import EngineLimits, PreparedBody, RequestPreparer, TextResult
from plimsoll_engine.api.prepare_messages import (
    JobKind,
    Outcome,
    PreparationJob,
    PreparationRefused,
    receive_message,
    send_message,
)
from plimsoll_engine.api.protocol import ChatRequest, CompletionRequest
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.http.fair_semaphore import FairSemaphore

log = logging.getLogger(__name__)

# Larger bodies are prepared in the process. The costliest smaller ones take 4 ms.
MAX_INLINE_BYTES = 4 << 10
# About 2,000 token IDs of a completion, which are decoded within 1 ms.
MAX_INLINE_TOKEN_ID_BYTES = 16 << 10
PROCESS_START_TIMEOUT_S = 60.0
# Number of commas and brackets that every body may have.
BASE_JSON_VALUES = 1 << 16
# Further commas and brackets per token of context. A list of IDs needs only one.
JSON_VALUES_PER_TOKEN = 4

_OUTCOME_DECODER: msgspec.msgpack.Decoder[Outcome] = msgspec.msgpack.Decoder(Outcome)
_Result = TypeVar("_Result")


class PreparerLostError(Exception):
    """The preparer process exited during a job, or could not be started."""


class PreparerStarvedError(Exception):
    """The job timed out, because the preparer process got too little CPU time."""


class Preparer:
    """Client of the preparer process, which is killed if a job exceeds ``timeout_s`` seconds."""

    def __init__(self, engine: AsyncEngine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        image = engine.media.processors.image
        self._image = None
        if image is not None:
            token = image.placeholder
            self._image = "<image>" if token is None else engine.tokenizer.decode([token])
        self._inline = RequestPreparer(engine.tokenizer, self._image)
        self._turn = asyncio.Lock()
        self._slots = FairSemaphore(1)
        # The process dies with the thread that started it (PR_SET_PDEATHSIG), so keep one thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Start the preparer process now, so that the engine's memory baseline includes it."""
        self._thread.submit(self._start_process)

    def close(self) -> None:
        """Stop the preparer process. The requests that it is preparing fail."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._stop_process()

    async def prepare_completion(self, body: Body) -> PreparedBody[CompletionRequest]:
        """Prepare the body of a completion. Raises ApiError or ClientDisconnect."""
        if len(body.raw) <= MAX_INLINE_BYTES or _has_only_token_ids(body.raw):
            return await self._run_inline(self._inline.prepare_completion, body)
        return await self._run_in_process(body, "completion", PreparedBody[CompletionRequest])

    async def prepare_chat(self, body: Body) -> PreparedBody[ChatRequest]:
        """Prepare the body of a chat. Raises ApiError."""
        if len(body.raw) <= MAX_INLINE_BYTES:
            return await self._run_inline(self._inline.prepare_chat, body)
        return await self._run_in_process(body, "chat", PreparedBody[ChatRequest])

    async def prepare_chats(self, body: Body) -> PreparedBody[ChatRequest]:
        """Prepare the body of a batch of chats. Raises ApiError."""
        if len(body.raw) <= MAX_INLINE_BYTES:
            return await self._run_inline(self._inline.prepare_chats, body)
        return await self._run_in_process(body, "chats", PreparedBody[ChatRequest])

    async def prepare_responses(self, body: Body) -> PreparedBody[ChatRequest]:
        """Prepare the body of a ``/v1/responses`` request. Raises ApiError."""
        if len(body.raw) <= MAX_INLINE_BYTES:
            return await self._run_inline(self._inline.prepare_responses, body)
        return await self._run_in_process(body, "responses", PreparedBody[ChatRequest])

    async def tokenize(self, body: Body) -> TextResult:
        """Tokenize the text of a body. Raises ApiError."""
        if len(body.raw) <= MAX_INLINE_BYTES:
            return await self._run_inline(self._inline.tokenize, body)
        return await self._run_in_process(body, "tokenize", TextResult)

    async def detokenize(self, body: Body) -> TextResult:
        """Detokenize the tokens of a body. Raises ApiError."""
        if len(body.raw) <= MAX_INLINE_BYTES:
            return await self._run_inline(self._inline.detokenize, body)
        return await self._run_in_process(body, "detokenize", TextResult)

    async def parse_form(self, body: Body, content_type: str) -> Form:
        """Return the file and the fields of a multipart body. Raises ApiError."""
        return await self._run_in_process(body, "form", Form, content_type)

    def _get_limits(self) -> EngineLimits:
        limit = self._engine.max_model_len
        settings = self._engine.settings
        api = settings.api
        return EngineLimits(
            limit, settings.max_queued, compute_max_json_values(limit), api.tool_call_parser,
            api.strict_requests, api.skip_hosted_tools,
        )  # fmt: skip

    async def _run_inline(
        self, prepare: Callable[[bytearray, EngineLimits], _Result], body: Body
    ) -> _Result:
        # Only one body is prepared per iteration of the loop, so that streams are not delayed.
        async with self._turn:
            await asyncio.sleep(0)
            return prepare(body.raw, self._get_limits())

    async def _run_in_process(
        self,
        body: Body,
        kind: JobKind,
        result_type: type[_Result],
        content_type: str = "",
    ) -> _Result:
        raw = body.raw
        job = PreparationJob(kind, self._get_limits(), content_type)
        loop = asyncio.get_running_loop()
        async with self._slots.hold_slot(body.client, body.wait_for_disconnect):
            try:
                outcome = await loop.run_in_executor(self._thread, self._run_job, job, raw)
            except TimeoutError:
                log.warning(
                    "preparing a request body timed out", extra={"bytes": len(raw), "kind": kind}
                )
                raise ApiError(
                    413,
                    f"preparing the body took longer than {self._timeout_s:g} s"
                    " (--prepare-timeout): send less in one request",
                    code="body_too_complex",
                ) from None
            except PreparerStarvedError:
                raise ApiError(
                    503, "the machine was too busy to prepare the body within"
                    f" {self._timeout_s:g} s: send the request again",
                    code="unavailable", should_retry=True,
                ) from None  # fmt: skip
            except PreparerLostError:
                log.error(
                    "the preparer process exited while it ran a job",
                    extra={"bytes": len(raw), "kind": kind},
                )
                raise ApiError(
                    503, "the process that prepares requests exited: send the request again",
                    code="unavailable", should_retry=True,
                ) from None  # fmt: skip
        if isinstance(outcome, PreparationRefused):
            raise ApiError(
                outcome.status, outcome.message,
                param=outcome.param, code=outcome.code, should_retry=outcome.retry,
            )  # fmt: skip
        return msgspec.msgpack.decode(outcome.result, type=result_type)

    # ---- in the thread

    def _run_job(self, job: PreparationJob, raw: bytearray) -> Outcome:
        if self._process is None or self._process.poll() is not None:
            self._start_process()
        assert self._socket is not None
        assert self._process is not None
        cpu_before_s = _read_cpu_s(self._process.pid)
        self._socket.settimeout(self._timeout_s)
        try:
            send_message(self._socket, msgspec.msgpack.encode(job))
            send_message(self._socket, raw)
            return _OUTCOME_DECODER.decode(receive_message(self._socket))
        except TimeoutError:
            starved = _read_cpu_s(self._process.pid) - cpu_before_s < self._timeout_s / 2
            self._restart()
            if starved:
                raise PreparerStarvedError from None
            raise
        except (EOFError, OSError):
            self._restart()
            raise PreparerLostError from None

    def _restart(self) -> None:
        self._stop_process()
        if not self._closed:
            self._thread.submit(self._start_process)

    def _start_process(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._stop_process()
        if self._closed:
            raise PreparerLostError
        frontend_end, process_end = socket.socketpair()
        with process_end:
            command = [
                sys.executable, "-m", "plimsoll_engine.api.preparer_process",
                f"--fd={process_end.fileno()}", f"--parent={os.getpid()}",
                f"--model={self._engine.settings.model}",
                f"--generation-config={self._engine.settings.api.generation_config}",
            ]  # fmt: skip
            if self._image is not None:
                command.append(f"--image-token={self._image}")
            if (template := self._engine.settings.api.chat_template) is not None:
                command.append(f"--chat-template={template}")
            try:
                self._process = subprocess.Popen(command, pass_fds=[process_end.fileno()])
            except OSError:  # the machine has no process left
                frontend_end.close()
                raise PreparerLostError from None
        self._socket = frontend_end
        frontend_end.settimeout(PROCESS_START_TIMEOUT_S)
        try:
            receive_message(frontend_end)
        except (EOFError, OSError):
            self._stop_process()
            raise PreparerLostError from None

    def _stop_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


def _read_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _has_only_token_ids(raw: bytearray) -> bool:
    if len(raw) > MAX_INLINE_TOKEN_ID_BYTES:
        return False
    rest = raw.translate(None, b"0123456789, \n")
    return b'"prompt":[]' in rest and len(rest) <= MAX_INLINE_BYTES


def compute_max_json_values(max_model_len: int | None) -> int:
    """Return the maximum number of JSON values in a body.

    ``max_model_len`` is None while the context length is unknown.
    """
    return BASE_JSON_VALUES + JSON_VALUES_PER_TOKEN * (max_model_len or 0)
