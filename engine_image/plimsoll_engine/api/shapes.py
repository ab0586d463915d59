"""The bodies that the serving API answers with. Pure."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from plimsoll_engine.frontend.requests import Generation

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class Shape:
    """The answers to one request, of ``/v1/chat/completions`` or ``/v1/completions``."""

    def __init__(self, model: str, generation: Generation, chat: bool) -> None:
        self._model = model
        self._id = generation.request_id
        self._chat = chat
        self._created = int(time.time())

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def first(self) -> dict[str, Any] | None:
        """What a stream opens with: a chat names the role."""
        if not self._chat:
            return None
        return self._chunk({"role": "assistant", "content": ""}, None)

    def delta(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        if self._chat:
            return self._chunk({"content": text} if text else {}, finish_reason)
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return self._body(self._chunk_kind, [choice])

    def usage_chunk(self, generation: Generation) -> dict[str, Any]:
        return self._body(self._chunk_kind, []) | {"usage": usage(generation)}

    def whole(self, text: str, generation: Generation) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": generation.finish_reason,
        }
        if self._chat:
            kind = "chat.completion"
            choice["message"] = {"role": "assistant", "content": text}
        else:
            kind = "text_completion"
            choice["text"] = text
        return self._body(kind, [choice]) | {"usage": usage(generation)}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._body(self._chunk_kind, [choice])


def usage(generation: Generation) -> dict[str, int]:
    prompt, output = len(generation.prompt_ids), len(generation.output_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }
