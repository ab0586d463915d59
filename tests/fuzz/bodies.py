"""The engine's HTTP APIs, from the bytes of a body to the answer.

The applications and the frontend behind them are the real ones. No worker was started, so that a
request that is right in itself is answered 503.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from plimsoll_engine.api import admin, serving
from plimsoll_engine.api.body import BodyReader
from plimsoll_engine.api.body_sizes import BodySizes
from plimsoll_engine.api.preparer import Preparer
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_engine.http.budget import BodyBudget
from plimsoll_engine.http.limits import HttpLimits
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.settings import Settings
from tests.fuzz.targets import make_models
from tests.fuzz.watched import Target

TOKEN = b"token"
BOUNDARY = "boundary"
LARGE = 1 << 20
ADDRESS = re.compile(rb"0x[0-9a-f]{6,}|Traceback|File \"/| object at ")
JSON_WORDS = (
    "{", "}", "[", "]", "[]", "{}", ":", ",", "null", "true", "false", "-1", "1e999", "1e308",
    "18446744073709551616", "-0", "0.5", '"\\ud800"', '"\\u0000"', '"user"', '"assistant"',
    '"system"', '"tool"', '"role"', '"content"', '"type"', '"text"', '"function"', '"name"',
)  # fmt: skip
ADMIN_VERBS = ("trim", "drain", "resume", "restart", "shutdown")

Answer = tuple[int, bytes]
App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


class Http:
    """One ASGI application, asked from outside of its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, app: Any) -> None:
        self._loop, self._app = loop, app

    def post(self, path: str, body: bytes, *headers: tuple[bytes, bytes]) -> Answer:
        return self._loop.run_until_complete(self._post(path, body, headers))

    async def _post(
        self, path: str, body: bytes, headers: tuple[tuple[bytes, bytes], ...]
    ) -> Answer:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": [(b"host", b"x"), *headers],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }  # fmt: skip
        incoming = [{"type": "http.request", "body": body, "more_body": False}]
        status, pieces = 0, []

        async def receive() -> dict[str, Any]:
            if not incoming:
                await asyncio.Event().wait()  # the client stays until it has its answer
            return incoming.pop()

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            pieces.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, b"".join(pieces)


def check(answer: Answer) -> None:
    """A refusal is in its API's shape, says something, and shows nothing of the inside."""
    status, body = answer
    assert status in (200, 202) or 400 <= status < 500 or status == 503, answer
    if status >= 400:
        error = json.loads(body)
        error = error.get("error", error)
        assert error["message"], answer
        assert error["code"], answer
    # What the client itself wrote comes back in messages: such an answer proves nothing.
    assert status == 200 or not ADDRESS.search(body), answer


def make(name: str, folder: Path) -> Target:
    make_models(folder)
    loop = asyncio.new_event_loop()
    model = {"chat-images": "llava", "transcriptions": "whisper"}.get(name, "tiny")
    public, private = loop.run_until_complete(_apps(folder, model))
    http = Http(loop, private if name == "admin" else public)
    match name:
        case "admin":
            return Target(
                _admin(http), (*JSON_WORDS, *ADMIN_FIELDS), lambda: _nested(b'{"mode":', b"}")
            )
        case "transcriptions":
            return Target(_form(http), FORM_WORDS, _large_forms)
    path, fields = PATHS[name]

    def run(body: bytes) -> None:
        # The client's own words would be taken for ours.
        if not ADDRESS.search(body):
            check(http.post(path, body, (b"content-type", b"application/json")))

    return Target(run, (*JSON_WORDS, *(f'"{field}":' for field in fields)), lambda: _large(name))


async def _apps(folder: Path, model: str) -> tuple[Any, Any]:
    run_dir = folder / "run"
    run_dir.mkdir(exist_ok=True)
    worker = WorkerConfig(
        str(folder / model), str(run_dir), str(run_dir / "w.sock"), device="cpu",
        max_model_len=512, max_loras=2, max_lora_rank=8,
    )  # fmt: skip
    settings = Settings(worker=worker, served_model_name="m")
    engine = AsyncEngine(settings, Tokenizer(settings.model))
    sizes = BodySizes(
        accepts_images=engine.media.processors.image is not None,
        accepts_audio=engine.media.processors.audio is not None,
        max_bytes=None,
    )
    limits = HttpLimits(max_connections=8)
    bodies = BodyReader(limits, BodyBudget(lambda: 1 << 30, 8))
    preparer = Preparer(engine, settings.http.prepare_timeout_s)
    public = serving.create_app(engine, bodies, sizes, preparer, BodyBudget(lambda: 1 << 30, 8))
    return public, admin.create_app(engine, TOKEN.decode(), bodies)


COMMON = (
    "model", "stream", "stream_options", "include_usage", "max_tokens", "min_tokens", "n",
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "response_format",
    "json_schema", "schema", "structured_outputs", "json", "regex", "choice", "grammar",
    "json_object", "user", "priority", "cache_salt", "deadline_s", "metadata", "logprobs",
    "allowed_token_ids", "bad_words", "logprob_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "add_special_tokens", "truncate_prompt_tokens", "truncation_side",
)  # fmt: skip
CHAT = (
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parameters",
    "chat_template_kwargs", "parallel_tool_calls", "tool_calls", "tool_call_id", "arguments",
    "image_url", "url", "reasoning_effort", "add_generation_prompt", "continue_final_message",
    "echo",
)  # fmt: skip
RESPONSES = (
    "input", "instructions", "max_output_tokens", "include", "text", "format", "strict", "call_id",
    "output", "input_text", "output_text", "input_image", "function_call", "function_call_output",
    "store", "previous_response_id", "reasoning", "truncation",
)  # fmt: skip
PATHS = {
    "chat": ("/v1/chat/completions", COMMON + CHAT),
    "chat-images": ("/v1/chat/completions", COMMON + CHAT),
    "chat-batch": ("/v1/chat/completions/batch", COMMON + CHAT),
    "completions": ("/v1/completions", (*COMMON, "prompt", "best_of", "echo", "suffix")),
    "responses": ("/v1/responses", (*COMMON, *CHAT, *RESPONSES)),
    "tokenize": (
        "/tokenize", (*CHAT, "model", "prompt", "add_special_tokens", "return_token_strs")
    ),
    "detokenize": ("/detokenize", ("model", "tokens")),
    "lora-adapters": ("/v1/load_lora_adapter", ("lora_name", "lora_path")),
}  # fmt: skip
ADMIN_FIELDS = (
    '"operation_id"', '"expected_epoch"', '"deadline_s"', '"scope"', '"engine"', '"worker"',
    '"carry"', '"keep_weights"', '"finish"', '"abort"',
)  # fmt: skip
FORM_WORDS = (
    f"--{BOUNDARY}\r\n", f"--{BOUNDARY}--\r\n", "\r\n\r\n", "Content-Disposition: form-data; ",
    'name="file"', 'filename="a.wav"', 'name="model"', 'name="language"', 'name="temperature"',
    'name="response_format"', "Content-Type: audio/wav", "charset=", "filename*=UTF-8''",
    'name="_charset_"', "Content-Transfer-Encoding: ",
)  # fmt: skip


def _admin(http: Http) -> Callable[[bytes], None]:
    """The first byte chooses the verb. No epoch of the engine's can be guessed, so that nothing is
    done."""

    def run(data: bytes) -> None:
        verb = ADMIN_VERBS[data[0] % len(ADMIN_VERBS)] if data else "trim"
        if not ADDRESS.search(data):
            check(http.post(f"/admin/v1/{verb}", data[1:], (b"authorization", b"Bearer " + TOKEN)))

    return run


def _form(http: Http) -> Callable[[bytes], None]:
    kind = f"multipart/form-data; boundary={BOUNDARY}".encode()

    def run(body: bytes) -> None:
        if not ADDRESS.search(body):
            check(http.post("/v1/audio/transcriptions", body, (b"content-type", kind)))

    return run


def _nested(before: bytes, after: bytes) -> tuple[bytes, ...]:
    half = (LARGE - len(before) - len(after)) // 2
    return (
        before + b"[" * half + b"]" * half + after,
        before + b"[" + b"[]," * (2 * half // 3 - 1) + b"[]]" + after,
        before + b'"' + b"a" * (2 * half - 2) + b'"' + after,
        before + b"1" * (2 * half) + after,
        before + b'{"a":' * (half // 3) + b"1" + b"}" * (half // 3) + after,
    )


def _large(name: str) -> list[bytes]:
    if name == "detokenize":
        return [b'{"tokens":[' + b"1," * ((LARGE - 20) // 2) + b"1]}"]
    if name == "lora-adapters":
        return list(_nested(b'{"lora_name":', b"}"))
    if name == "responses":
        item = b'{"type":"function_call","name":"a","call_id":"b","arguments":"{}"},'
        start = b'{"model":"m","input":'
        return [*_nested(start, b"}"), start + b"[" + item * (LARGE // len(item)) + b"{}]}"]
    prompt = b'{"model":"m","prompt":'
    if name == "completions":
        return [*_nested(prompt, b"}"), prompt + b"[" + b'"a",' * (LARGE // 5) + b'"a"]}']
    if name == "chat-batch":
        one = b'[{"role":"user","content":"a"}],'
        start = b'{"model":"m","messages":['
        return [*_nested(start, b"]}"), start + one * (LARGE // len(one)) + one[:-1] + b"]}"]
    messages = b'{"model":"m","messages":[{"role":"user","content":'
    found = [*_nested(messages, b"}]}")]
    found += _nested(
        b'{"model":"m","chat_template_kwargs":{"a":', b'},"messages":[{"role":"user"}]}'
    )
    found.append(
        b'{"model":"m","messages":['
        + b'{"role":"user","content":"a"},' * (LARGE // 32)
        + b'{"role":"user","content":"a"}]}'
    )
    return found


def _large_forms() -> list[bytes]:
    mark = f"--{BOUNDARY}\r\n".encode()
    field = b'Content-Disposition: form-data; name="a"\r\n\r\n'
    return [
        mark * (LARGE // len(mark)),
        (mark + field + b"\r\n") * (LARGE // (len(mark) + len(field) + 2)),
        mark + b"A: " + b"a" * LARGE,
        mark + b"A: b\r\n" * (LARGE // 6),
        mark + b'Content-Disposition: form-data; name="' + b"\\" * LARGE,
        mark + field + b"\r\n--" * (LARGE // 4),
    ]
