"""Response of ``/v1/responses``, as one object or as the events that build it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.types import Send

from plimsoll_engine.api import logprobs
from plimsoll_engine.api.answer import UNPARSED_CALL_WARNING, GenerationResponse, send_last_part
from plimsoll_engine.api.batch import Batch
from plimsoll_engine.api.chat_choice import ChatChoice, OutputParser
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.logprobs import TokenBytes, TokenText
from plimsoll_engine.api.reasoning import CLOSE_TAG, ReasoningParser
from plimsoll_engine.api.response_bodies import Choice, make_usage_object
from plimsoll_engine.api.tool_calls import ToolCall, ToolCallParser
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.requests.request_log import Delta


class ResponsesResponse(GenerationResponse):
    """Response to a ``/v1/responses`` request.

    ``echoed_fields`` is a JSON object with the request fields that the response repeats.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        batch: Batch,
        echoed_fields: bytes,
        *,
        parser: ToolCallParser | None,
        stream: bool,
        has_reasoning: bool = False,
    ) -> None:
        get_token_text = engine.tokenizer.decode_token
        super().__init__(
            engine, batch, [ChatChoice(0, get_token_text, None)], stream=stream, include_usage=False
        )
        self._echoed: dict[str, Any] = msgspec.json.decode(echoed_fields)
        reasoning = ReasoningParser() if has_reasoning else None
        self.reasoning_end = engine.tokenizer.get_token_id(CLOSE_TAG) if has_reasoning else None
        name = batch.request_id.removeprefix("resp-")
        self._output = ResponseOutput(
            name, get_token_text, parser, reasoning, engine.tokenizer.decode_token_bytes
        )
        self._created = int(time.time())

    def encode_whole_response(self) -> bytes:
        """Return the response object as JSON."""
        return msgspec.json.encode(self._make_response())

    def make_first_events(self) -> Iterator[bytes]:
        """Yield the first events of a stream, which contain the empty response."""
        for name in ("response.created", "response.in_progress"):
            yield self._output.encode_event(name, {"response": self._make_response()})

    def make_delta_events(self, choice: Choice, delta: Delta) -> Iterator[bytes]:
        """Yield the events for ``delta``."""
        yield from self._output.stream(delta)

    async def _send_end_of_stream(self, send: Send) -> None:
        # The last event has the whole response, and is the API's only end marker.
        whole = self._make_response()
        event = self._output.encode_event(f"response.{whole['status']}", {"response": whole})
        with self.reserve(len(event)):
            await send_last_part(send, event)

    def make_error_events(self, error: ApiError) -> bytes:
        """Return the events that end a failed stream."""
        fields = {"code": error.code, "message": str(error), "param": error.param}
        failure = {"code": error.code or "server_error", "message": str(error)}
        closed = b"".join(self._output.close_items("incomplete"))
        response = self._make_response() | {"status": "failed", "error": failure}
        failed = self._output.encode_event("error", fields)
        return (
            closed + failed + self._output.encode_event("response.failed", {"response": response})
        )

    def collect(self, choice: Choice, delta: Delta) -> None:
        """Add ``delta`` to a response that is not streamed."""
        for _ in self._output.stream(delta):
            pass

    def list_output_warnings(self) -> list[str]:
        """Return the warnings about the output of a response that is not streamed."""
        return [UNPARSED_CALL_WARNING] if self._output.has_unparsed_call else []

    def _make_response(self) -> dict[str, Any]:
        reason = self._output.finish_reason
        status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
        return self._echoed | {
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
            "usage": None if reason is None else self._make_usage_object(),
        }

    def _make_usage_object(self) -> dict[str, Any]:
        used = make_usage_object(self._batch.generations, 1, self.reasoning_end)
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": used["prompt_tokens_details"],
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used.get("completion_tokens_details")
            or {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        }


class ResponseOutput:
    """Output items of a response, and the events that stream them."""

    def __init__(
        self,
        name: str,
        get_token_text: TokenText,
        parser: ToolCallParser | None,
        reasoning: ReasoningParser | None = None,
        get_token_bytes: TokenBytes | None = None,
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self._name = name
        self._get_token_text = get_token_text
        self._get_token_bytes = get_token_bytes
        self._parts = OutputParser(reasoning, parser)
        # Pieces of the open reasoning item; None without an open one.
        self._open_reasoning: list[str] | None = None
        self._events = 0
        # Pieces of the open message item; None without an open one.
        self._open_text: list[str] | None = None
        self._logprobs: list[msgspec.Raw] = []
        # Pieces of the arguments of the open tool call; None without an open one.
        self._open_arguments: list[str] | None = None

    @property
    def has_unparsed_call(self) -> bool:
        """Whether text after a tool call tag could not be parsed and is returned as text."""
        return self._parts.has_unparsed_call

    def encode_event(self, event_type: str, body: dict[str, Any]) -> bytes:
        """Return a typed server-sent event with the next sequence number."""
        fields = {"type": event_type, "sequence_number": self._events} | body
        self._events += 1
        return f"event: {event_type}\ndata: ".encode() + msgspec.json.encode(fields) + b"\n\n"

    def stream(self, delta: Delta) -> Iterator[bytes]:
        """Yield the events that stream ``delta``, and add it to the output items.

        The caller must consume all events.
        """
        parsed = self._parts.parse(delta)
        calls = list(parsed.calls)
        while calls and not calls[0].id:  # the rest of the open call, which text may follow
            yield from self._stream_call(calls.pop(0))
        if parsed.reasoning:
            yield from self._close_message("completed")
            yield from self._close_call("incomplete")
            yield from self._stream_reasoning(parsed.reasoning)
        is_content = self._open_reasoning is None and self._parts.has_reasoning_ended
        is_content = is_content and self._open_arguments is None and not parsed.calls
        if parsed.text or (delta.logprobs and is_content):
            yield from self._close_reasoning("completed")
            yield from self._close_call("incomplete")
            yield from self._stream_text(
                parsed.text,
                logprobs.make_chat_entries(
                    delta.logprobs, self._get_token_text, self._get_token_bytes
                ),
            )
        for call in calls:
            if call.id:
                yield from self._close_reasoning("completed")
                yield from self._close_message("completed")
                yield from self._close_call("incomplete")
            yield from self._stream_call(call)
        if delta.finish_reason is not None:
            if not self.items:
                yield from self._stream_text("", [])
            status = "incomplete" if delta.finish_reason == "length" else "completed"
            yield from self.close_items(status)
            self.finish_reason = delta.finish_reason

    def close_items(self, status: str) -> Iterator[bytes]:
        """Close the open item, if there is one. Yield the events that end it."""
        yield from self._close_reasoning(status)
        yield from self._close_message(status)
        yield from self._close_call("incomplete")

    def _stream_text(self, text: str, tokens: list[msgspec.Raw]) -> Iterator[bytes]:
        if self._open_text is None:
            self._open_text, self._logprobs = [], []
            item = {
                "type": "message",
                "id": f"msg-{self._name}-{len(self.items)}",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
            self.items.append(item)
            yield self._make_item_event("response.output_item.added", {"item": item})
            yield self._make_part_event(
                "response.content_part.added", {"part": _make_text_part("", [])}
            )
        self._open_text.append(text)
        self._logprobs += tokens
        yield self._make_part_event(
            "response.output_text.delta", {"delta": text, "logprobs": tokens}
        )

    def _close_message(self, status: str) -> Iterator[bytes]:
        if self._open_text is None:
            return
        text, self._open_text = "".join(self._open_text), None
        part = _make_text_part(text, self._logprobs)
        fields = {"text": text, "logprobs": self._logprobs}
        yield self._make_part_event("response.output_text.done", fields)
        yield self._make_part_event("response.content_part.done", {"part": part})
        self.items[-1] |= {"status": status, "content": [part]}
        yield self._make_item_event("response.output_item.done", {"item": self.items[-1]})

    def _stream_reasoning(self, text: str) -> Iterator[bytes]:
        if self._open_reasoning is None:
            self._open_reasoning = []
            item = {
                "type": "reasoning",
                "id": f"rs-{self._name}-{len(self.items)}",
                "summary": [],
                "status": "in_progress",
                "content": [],
            }
            self.items.append(item)
            yield self._make_item_event("response.output_item.added", {"item": item})
        self._open_reasoning.append(text)
        yield self._make_part_event("response.reasoning_text.delta", {"delta": text})

    def _close_reasoning(self, status: str) -> Iterator[bytes]:
        if self._open_reasoning is None:
            return
        text, self._open_reasoning = "".join(self._open_reasoning), None
        yield self._make_part_event("response.reasoning_text.done", {"text": text})
        content = [{"type": "reasoning_text", "text": text}]
        self.items[-1] |= {"status": status, "content": content}
        yield self._make_item_event("response.output_item.done", {"item": self.items[-1]})

    def _stream_call(self, call: ToolCall) -> Iterator[bytes]:
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
            self._open_arguments = []
            yield self._make_item_event("response.output_item.added", {"item": item})
        item = self.items[-1]
        if self._open_arguments is not None and call.arguments:
            self._open_arguments.append(call.arguments)
            fields = {"item_id": item["id"], "delta": call.arguments}
            yield self._make_item_event("response.function_call_arguments.delta", fields)
        if not call.more:
            yield from self._close_call("completed")

    def _close_call(self, status: str) -> Iterator[bytes]:
        if self._open_arguments is None:
            return
        arguments, self._open_arguments = "".join(self._open_arguments), None
        item = self.items[-1]
        item |= {"arguments": arguments, "status": status}
        fields = {"item_id": item["id"], "name": item["name"], "arguments": arguments}
        yield self._make_item_event("response.function_call_arguments.done", fields)
        yield self._make_item_event("response.output_item.done", {"item": item})

    def _make_item_event(self, event_type: str, body: dict[str, Any]) -> bytes:
        return self.encode_event(event_type, {"output_index": len(self.items) - 1} | body)

    def _make_part_event(self, event_type: str, body: dict[str, Any]) -> bytes:
        place = {"item_id": self.items[-1]["id"], "content_index": 0}
        return self._make_item_event(event_type, place | body)


def _make_text_part(text: str, tokens: list[msgspec.Raw]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": tokens}
