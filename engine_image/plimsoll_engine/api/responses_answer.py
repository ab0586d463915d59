"""What ``/v1/responses`` answers: one response object, or the events that build it up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.types import Send

from plimsoll_engine.api import logprobs
from plimsoll_engine.api.answer import UNREAD, Answer, last
from plimsoll_engine.api.batch import Batch
from plimsoll_engine.api.chat_choice import AnswerParts, ChatChoice
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.logprobs import TokenBytes, TokenText
from plimsoll_engine.api.reasoning import CLOSE, ReasoningParser
from plimsoll_engine.api.responses import Choice, usage
from plimsoll_engine.api.tool_calls import ToolCall, ToolCallParser
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.requests.request_log import Delta


class ResponsesAnswer(Answer):
    """The answer to one request; ``told`` is the JSON object of the fields that it repeats.

    With ``reasons`` its text begins with reasoning.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        batch: Batch,
        told: bytes,
        *,
        parser: ToolCallParser | None,
        stream: bool,
        reasons: bool = False,
    ) -> None:
        text_of = engine.tokenizer.token_text
        super().__init__(engine, batch, [ChatChoice(0, text_of, None)], stream=stream, usage=False)
        self._told: dict[str, Any] = msgspec.json.decode(told)
        reasoning = ReasoningParser() if reasons else None
        self.reasoning_end = engine.tokenizer.token_id(CLOSE) if reasons else None
        name = batch.request_id.removeprefix("resp-")
        self._output = Output(name, text_of, parser, reasoning, engine.tokenizer.token_bytes)
        self._created = int(time.time())

    def encoded(self) -> bytes:
        """Return the response in one piece."""
        return msgspec.json.encode(self._response())

    def opening(self) -> Iterator[bytes]:
        """Yield what a stream begins with: the response, still empty."""
        for name in ("response.created", "response.in_progress"):
            yield self._output.event(name, {"response": self._response()})

    def pieces(self, choice: Choice, delta: Delta) -> Iterator[bytes]:
        """Yield the events for what is new."""
        yield from self._output.add(delta)

    async def _end(self, send: Send) -> None:
        """Send the event with the whole response: such a stream has no other mark of its end."""
        whole = self._response()
        event = self._output.event(f"response.{whole['status']}", {"response": whole})
        with self.reserved(len(event)):
            await last(send, event)

    def failed(self, error: ApiError) -> bytes:
        """Return the events that end a response which failed."""
        told = {"code": error.code, "message": str(error), "param": error.param}
        failure = {"code": error.code or "server_error", "message": str(error)}
        response = self._response() | {"status": "failed", "error": failure}
        whole = self._output.event("response.failed", {"response": response})
        return self._output.event("error", told) + whole

    def collect(self, choice: Choice, delta: Delta) -> None:
        """Take in what is new of an answer that is not streamed."""
        for _ in self._output.add(delta):
            pass

    def unread(self) -> list[str]:
        """Return what the client should know of an answer in one piece."""
        return [UNREAD] if self._output.unread else []

    def _response(self) -> dict[str, Any]:
        reason = self._output.finish_reason
        status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
        return self._told | {
            "id": self._batch.request_id,
            "object": "response",
            "created_at": self._created,
            "model": self._batch.model,
            "status": status,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "output": self._output.items,
            "usage": None if reason is None else self._used(),
        }

    def _used(self) -> dict[str, Any]:
        used = usage(self._batch.generations, 1, self.reasoning_end)
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": used["prompt_tokens_details"],
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used.get("completion_tokens_details")
            or {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        }


class Output:
    """The items of a response, and the events that tell of them as they grow."""

    def __init__(
        self,
        name: str,
        text_of: TokenText,
        parser: ToolCallParser | None,
        reasoning: ReasoningParser | None = None,
        bytes_of: TokenBytes | None = None,
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self._name = name
        self._text_of = text_of
        self._bytes_of = bytes_of
        self._parts = AnswerParts(reasoning, parser)
        self._thoughts: list[str] | None = None
        """Of the reasoning that is open."""
        self._events = 0
        self._texts: list[str] | None = None
        """Of the message that is open."""
        self._logprobs: list[msgspec.Raw] = []
        self._arguments: list[str] | None = None
        """Of the call that is open."""

    @property
    def unread(self) -> bool:
        """Whether what began like a tool call stayed text."""
        return self._parts.unread

    def event(self, kind: str, body: dict[str, Any]) -> bytes:
        """Return a typed server-sent event with the next number."""
        told = {"type": kind, "sequence_number": self._events} | body
        self._events += 1
        return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(told) + b"\n\n"

    def add(self, delta: Delta) -> Iterator[bytes]:
        """Take in what is new; yield its events."""
        parsed = self._parts.read(delta)
        if parsed.reasoning:
            yield from self._think(parsed.reasoning)
        answers = self._thoughts is None and self._parts.answers
        answers = answers and self._arguments is None and not parsed.calls
        if parsed.text or (delta.logprobs and answers):
            yield from self._close_thoughts("completed")
            yield from self._write(
                parsed.text, logprobs.chat_entries(delta.logprobs, self._text_of, self._bytes_of)
            )
        for call in parsed.calls:
            yield from self._close_thoughts("completed")
            yield from self._close("completed")
            yield from self._call(call)
        if delta.finish_reason is not None:
            if not self.items:
                yield from self._write("", [])
            status = "incomplete" if delta.finish_reason == "length" else "completed"
            yield from self._close_thoughts(status)
            yield from self._close(status)
            yield from self._close_call("incomplete")
            self.finish_reason = delta.finish_reason

    def _write(self, text: str, tokens: list[msgspec.Raw]) -> Iterator[bytes]:
        if self._texts is None:
            self._texts, self._logprobs = [], []
            item = {
                "type": "message",
                "id": f"msg-{self._name}-{len(self.items)}",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
            self.items.append(item)
            yield self._of_item("response.output_item.added", {"item": item})
            yield self._of_part("response.content_part.added", {"part": _part("", [])})
        self._texts.append(text)
        self._logprobs += tokens
        yield self._of_part("response.output_text.delta", {"delta": text, "logprobs": tokens})

    def _close(self, status: str) -> Iterator[bytes]:
        if self._texts is None:
            return
        text, self._texts = "".join(self._texts), None
        part = _part(text, self._logprobs)
        told = {"text": text, "logprobs": self._logprobs}
        yield self._of_part("response.output_text.done", told)
        yield self._of_part("response.content_part.done", {"part": part})
        self.items[-1] |= {"status": status, "content": [part]}
        yield self._of_item("response.output_item.done", {"item": self.items[-1]})

    def _think(self, text: str) -> Iterator[bytes]:
        if self._thoughts is None:
            self._thoughts = []
            item = {
                "type": "reasoning",
                "id": f"rs-{self._name}-{len(self.items)}",
                "summary": [],
                "status": "in_progress",
                "content": [],
            }
            self.items.append(item)
            yield self._of_item("response.output_item.added", {"item": item})
        self._thoughts.append(text)
        yield self._of_part("response.reasoning_text.delta", {"delta": text})

    def _close_thoughts(self, status: str) -> Iterator[bytes]:
        if self._thoughts is None:
            return
        text, self._thoughts = "".join(self._thoughts), None
        yield self._of_part("response.reasoning_text.done", {"text": text})
        content = [{"type": "reasoning_text", "text": text}]
        self.items[-1] |= {"status": status, "content": content}
        yield self._of_item("response.output_item.done", {"item": self.items[-1]})

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        if call.id:
            item = {
                "type": "function_call",
                "id": f"fc-{self._name}-{len(self.items)}",
                "call_id": call.id,
                "name": call.name,
                "arguments": "",
                "status": "in_progress",
            }
            self.items.append(item)
            self._arguments = []
            yield self._of_item("response.output_item.added", {"item": item})
        item = self.items[-1]
        if self._arguments is not None and call.arguments:
            self._arguments.append(call.arguments)
            told = {"item_id": item["id"], "delta": call.arguments}
            yield self._of_item("response.function_call_arguments.delta", told)
        if not call.more:
            yield from self._close_call("completed")

    def _close_call(self, status: str) -> Iterator[bytes]:
        if self._arguments is None:
            return
        arguments, self._arguments = "".join(self._arguments), None
        item = self.items[-1]
        item |= {"arguments": arguments, "status": status}
        told = {"item_id": item["id"], "name": item["name"], "arguments": arguments}
        yield self._of_item("response.function_call_arguments.done", told)
        yield self._of_item("response.output_item.done", {"item": item})

    def _of_item(self, kind: str, body: dict[str, Any]) -> bytes:
        return self.event(kind, {"output_index": len(self.items) - 1} | body)

    def _of_part(self, kind: str, body: dict[str, Any]) -> bytes:
        place = {"item_id": self.items[-1]["id"], "content_index": 0}
        return self._of_item(kind, place | body)


def _part(text: str, tokens: list[msgspec.Raw]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": tokens}
