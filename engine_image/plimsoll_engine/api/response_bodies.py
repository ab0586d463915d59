"""Response bodies of the serving API."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from plimsoll_engine.api import logprobs
from plimsoll_engine.api.chat_choice import ChatChoice, get_stop_reason
from plimsoll_engine.api.logprobs import TokenText
from plimsoll_engine.frontend.requests.request_log import Delta, Generation, TokenLogprobs

DONE_EVENT = b"data: [DONE]\n\n"


def encode_event(body: dict[str, Any]) -> bytes:
    """Return a server-sent event with ``body`` as JSON."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class CompletionChoice:
    """Choice of ``/v1/completions``, as chunks of a stream or as one object.

    The text begins with ``echo``. With ``echo_only``, it has no generated text. With
    ``prompt_ids``, the choice has the token IDs of prompt and output.
    """

    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        index: int,
        get_token_text: TokenText,
        echo: str = "",
        prompt_ids: Sequence[int] | None = None,
        stop_ids: Collection[int] = (),
        echo_only: bool = False,
    ) -> None:
        self.index = index
        self._get_token_text = get_token_text
        self._echo_only = echo_only
        self.echo = echo
        self.prompt_logprobs: list[msgspec.Raw] | None = None
        # Log probabilities of the echo.
        self.echo_logprobs: dict[str, list[Any]] = {}
        self._texts: list[str] = [echo]
        self._logprobs: dict[str, list[Any]] = {}
        self._end: Delta | None = None
        self._stop_ids = stop_ids
        self._prompt_ids = prompt_ids
        self._sent_prompt_ids = False
        self._ids: list[int] = []

    def make_first_chunk(self) -> dict[str, Any] | None:
        """Return the first chunk of a stream, which has the echo; None without an echo."""
        return self._make_chunk(Delta(self.echo, None, []), {}) if self.echo else None

    def make_chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the chunk for ``delta``, if the delta has text or ends the output."""
        delta = self._hide_stop_text(delta)
        if delta.text or delta.finish_reason is not None:
            yield self._make_chunk(delta, self._make_logprobs(delta.logprobs))

    def add(self, delta: Delta) -> None:
        """Add ``delta`` to a response that is not streamed."""
        delta = self._hide_stop_text(delta)
        self._texts.append(delta.text)
        self._ids += delta.token_ids
        for key, values in self._make_logprobs(delta.logprobs).items():
            self._logprobs.setdefault(key, []).extend(values)
        self._end = delta

    def to_object(self) -> dict[str, Any]:
        """Return the choice of a response that is not streamed."""
        wanted = self._prompt_ids is not None
        combined = {
            name: self.echo_logprobs.get(name, []) + self._logprobs.get(name, [])
            for name in self.echo_logprobs or self._logprobs
        }
        choice = self._make_choice("".join(self._texts), combined, self._end)
        return choice | {
            "stop_reason": choice.get("stop_reason"),
            "prompt_logprobs": self.prompt_logprobs,
            "prompt_token_ids": self._prompt_ids,
            "token_ids": self._ids if wanted else None,
        }

    def _hide_stop_text(self, delta: Delta) -> Delta:
        if not self._echo_only:
            return delta
        return Delta("", None if delta.finish_reason is None else "length", [])

    def _make_chunk(self, delta: Delta, entry: dict[str, list[Any]]) -> dict[str, Any]:
        # Only the first chunk has the token IDs of the prompt.
        choice = self._make_choice(delta.text, entry, delta)
        if self._prompt_ids is not None:
            choice["token_ids"] = delta.token_ids
            if not self._sent_prompt_ids:
                choice["prompt_token_ids"], self._sent_prompt_ids = self._prompt_ids, True
        return choice

    def _make_logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        if not tokens:
            return {}
        return logprobs.make_completion_logprobs(tokens, self._get_token_text, len(self.echo))

    def _make_choice(
        self, text: str, entry: dict[str, list[Any]], last_delta: Delta | None
    ) -> dict[str, Any]:
        finish_reason = None if last_delta is None else last_delta.finish_reason
        choice = {
            "index": self.index,
            "text": text,
            "logprobs": entry or None,
            "finish_reason": finish_reason,
        }
        if last_delta is not None and finish_reason is not None:
            choice["stop_reason"] = get_stop_reason(last_delta, self._stop_ids)
        return choice


Choice = CompletionChoice | ChatChoice


class Envelope:
    """Fields that all chunks of a response have in common."""

    def __init__(self, model: str, request_id: str) -> None:
        self._model = model
        self._id = request_id
        self._created = int(time.time())

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an object of OpenAI's type ``kind`` with ``choices`` and the common fields."""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


def make_usage_object(
    generations: Sequence[Generation],
    n: int,
    reasoning_end: int | None = None,
    sent_tokens: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the token counts of a request with ``n`` choices per prompt.

    Args:
        generations: Choices of all prompts.
        n: Number of choices per prompt.
        reasoning_end: Token that ends the reasoning; None if reasoning is not counted.
        sent_tokens: Number of tokens that a stream has sent, by choice; None counts all tokens.

    """
    prompts = generations[::n]
    counts = [len(one.output_ids) for one in generations] if sent_tokens is None else sent_tokens
    prompt = sum(len(generation.prompt_ids) for generation in prompts)
    output = sum(counts)
    cached = sum(g.started.cached_tokens for g in prompts if g.started is not None)
    body = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning_end is None:
        return body
    reasoning = sum(
        min(count, generation.count_tokens_before(reasoning_end))
        for count, generation in zip(counts, generations, strict=True)
    )
    return body | {"completion_tokens_details": {"reasoning_tokens": reasoning}}
