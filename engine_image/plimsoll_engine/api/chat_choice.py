"""Choice of a chat, as chunks of a stream or as one message."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from plimsoll_engine.api import logprobs
from plimsoll_engine.api.logprobs import TokenBytes, TokenText
from plimsoll_engine.api.reasoning import ParsedText, ReasoningParser
from plimsoll_engine.api.tool_calls import ParsedOutput, ToolCall, ToolCallParser
from plimsoll_engine.frontend.requests.request_log import Delta, TokenLogprobs


class ChatChoice:
    """Choice of ``/v1/chat/completions``, whose text begins with ``echo``.

    ``stop_ids`` are the client's stop tokens. ``hide_reasoning`` omits the reasoning.
    """

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        index: int,
        get_token_text: TokenText,
        parser: ToolCallParser | None,
        include_token_ids: bool = False,
        reasoning: ReasoningParser | None = None,
        hide_reasoning: bool = False,
        echo: str = "",
        stop_ids: Collection[int] = (),
        get_token_bytes: TokenBytes | None = None,
    ) -> None:
        self.index = index
        self.prompt_logprobs: list[msgspec.Raw] | None = None
        self._ids: list[int] | None = [] if include_token_ids else None
        self._get_token_text = get_token_text
        self._get_token_bytes = get_token_bytes
        self._parts = OutputParser(reasoning, parser)
        self._reasons = reasoning is not None
        self._hidden = hide_reasoning
        self._reasoning: list[str] = []
        # Tool calls without their arguments.
        self._calls: list[ToolCall] = []
        # Pieces of the arguments of each call, if the response is not streamed.
        self._arguments: list[list[str]] = []
        self._echo = echo
        self._stop_ids = stop_ids
        self._texts: list[str] = [echo]
        self._logprobs: list[msgspec.Raw] = []
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None

    def make_first_chunk(self) -> dict[str, Any] | None:
        """Return the first chunk of a stream, with the role and the echo."""
        return self._make_chunk({"role": "assistant", "content": self._echo}, ())

    def make_chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the chunks for ``delta``. Text and tool calls have separate chunks.

        The first chunk has the log probabilities, and the last one the finish reason, as in vLLM.
        """
        parsed = self._parse(delta)
        pieces: list[dict[str, Any]] = []
        if parsed.reasoning:
            pieces.append(_make_reasoning_fields(parsed.reasoning))
        if parsed.text:
            pieces.append({"content": parsed.text})
        for call in parsed.calls:
            self._record_call(call)
            told = (
                _make_call_object(call) if call.id else {"function": {"arguments": call.arguments}}
            )
            pieces.append({"tool_calls": [{"index": len(self._calls) - 1} | told]})
        tokens, ids, ends = delta.logprobs, delta.token_ids, delta.finish_reason is not None
        if not pieces and (ends or tokens or (ids and self._ids is not None)):
            pieces.append({} if ends else {"content": ""})
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            yield self._make_chunk(piece, tokens, ids, delta if ends and last else None)
            tokens, ids = [], ()

    def add(self, delta: Delta) -> None:
        """Add ``delta`` to a response that is not streamed."""
        parsed = self._parse(delta)
        self._texts.append(parsed.text)
        self._reasoning.append(parsed.reasoning)
        for call in parsed.calls:
            self._record_call(call)
            if call.id:
                self._arguments.append([])
            self._arguments[-1].append(call.arguments)
        if self._ids is not None:
            self._ids += delta.token_ids
        self._logprobs += logprobs.make_chat_entries(
            delta.logprobs, self._get_token_text, self._get_token_bytes
        )
        self._finish_reason = delta.finish_reason
        self._stop_reason = get_stop_reason(delta, self._stop_ids)

    def to_object(self) -> dict[str, Any]:
        """Return the choice of a response that is not streamed.

        ``content`` is None if the choice has only tool calls.
        """
        content: str | None = "".join(self._texts)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        thoughts = "".join(self._reasoning)
        if self._reasons or thoughts:
            message |= _make_reasoning_fields(thoughts or None) | {"content": content or None}
        if self._calls:
            message["content"] = content if content and content.strip() else None
            message["tool_calls"] = [
                _make_call_object(call._replace(arguments="".join(given)))
                for call, given in zip(self._calls, self._arguments, strict=True)
            ]
        return {
            "index": self.index,
            "message": message,
            "logprobs": logprobs.make_chat_logprobs(self._logprobs),
            "finish_reason": self._map_finish_reason(self._finish_reason),
            "stop_reason": self._stop_reason,
            "token_ids": self._ids,
        }

    @property
    def has_unparsed_call(self) -> bool:
        """Whether text after a tool call tag could not be parsed and is returned as text."""
        return self._parts.has_unparsed_call

    def _parse(self, delta: Delta) -> ParsedOutput:
        parsed = self._parts.parse(delta)
        if self._hidden:
            parsed.reasoning = ""
        return parsed

    def _record_call(self, call: ToolCall) -> None:
        if call.id:
            self._calls.append(call._replace(arguments=""))
        else:
            self._calls[-1] = self._calls[-1]._replace(more=call.more)

    def _map_finish_reason(self, finish_reason: str | None) -> str | None:
        # The reason is ``tool_calls`` if the output ended normally with a complete call.
        is_complete = bool(self._calls) and not self._calls[-1].more
        return "tool_calls" if finish_reason == "stop" and is_complete else finish_reason

    def _make_chunk(
        self,
        delta: dict[str, Any],
        tokens: Sequence[TokenLogprobs],
        ids: Sequence[int] = (),
        last_delta: Delta | None = None,
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "index": self.index,
            "delta": delta,
            "logprobs": logprobs.make_chat_logprobs(
                logprobs.make_chat_entries(tokens, self._get_token_text, self._get_token_bytes)
            ),
            "finish_reason": None
            if last_delta is None
            else self._map_finish_reason(last_delta.finish_reason),
        }
        if last_delta is not None:
            chunk["stop_reason"] = get_stop_reason(last_delta, self._stop_ids)
        return chunk if self._ids is None else chunk | {"token_ids": ids}


def get_stop_reason(delta: Delta, stop_ids: Collection[int]) -> str | int | None:
    """Return the stop string or token that ended the output; None if neither did, as in vLLM."""
    reason = delta.stop_reason
    return None if isinstance(reason, int) and reason not in stop_ids else reason


class OutputParser:
    """Streaming parser that splits an output into reasoning, content and tool calls."""

    def __init__(
        self, reasoning_parser: ReasoningParser | None, call_parser: ToolCallParser | None
    ) -> None:
        self._reasoning = reasoning_parser
        self._calls = call_parser
        # Pieces of the reasoning, until content or a tool call follows.
        self._reasoning_pieces: list[str] = []
        self._has_answer = reasoning_parser is None

    @property
    def has_reasoning_ended(self) -> bool:
        """Whether the reasoning has ended; True for an output without reasoning."""
        return self._reasoning is None or self._reasoning.has_ended

    @property
    def has_unparsed_call(self) -> bool:
        """Whether text after a tool call tag could not be parsed and is returned as text."""
        return self._calls is not None and self._calls.has_unparsed_call

    def parse(self, delta: Delta) -> ParsedOutput:
        """Parse ``delta``. Return the reasoning, content and tool calls that can be sent now."""
        last = delta.finish_reason is not None
        found = ParsedText(content=delta.text)
        if self._reasoning is not None:
            found = self._reasoning.push(delta.text)
            if last:
                rest = self._reasoning.finish()
                found = found._replace(reasoning=found.reasoning + rest.reasoning)
        if self._calls is None:
            return ParsedOutput(found.content, reasoning=found.reasoning)
        # A stop string truncates the output; otherwise the model ended it.
        finished = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str)
        parsed = self._calls.push(found.content, last, finished)
        if not self._has_answer:
            self._has_answer = bool(parsed.text.strip() or parsed.calls)
            self._reasoning_pieces.append(found.reasoning)
            if self._has_answer:
                self._reasoning_pieces.clear()
            elif delta.finish_reason == "stop":
                # The model stopped without an answer, so a call in its reasoning counts as a call.
                text = "".join(self._reasoning_pieces)
                parsed.calls += self._calls.copy().push(text, True, finished).calls
        parsed.reasoning = found.reasoning + parsed.reasoning
        return parsed


def _make_reasoning_fields(text: str | None) -> dict[str, Any]:
    return {"reasoning_content": text, "reasoning": text}


def _make_call_object(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
