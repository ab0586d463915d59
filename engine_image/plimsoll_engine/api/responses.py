"""The bodies that the serving API answers with. Pure."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from plimsoll_engine.api import logprobs
from plimsoll_engine.api.chat_choice import ChatChoice, stop_reason
from plimsoll_engine.api.logprobs import TokenText
from plimsoll_engine.frontend.requests.request_log import Delta, Generation, TokenLogprobs

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class CompletionChoice:
    """One choice of ``/v1/completions``: its chunks, or the whole that they add up to.

    ``echo`` is the prompt, where the text is to begin with it, or to be it ``alone``.
    ``prompt_ids`` are its tokens, where the choice is to name them and its own. ``stop_ids`` are
    the tokens that the client named as ends.
    """

    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        index: int,
        text_of: TokenText,
        echo: str = "",
        prompt_ids: Sequence[int] | None = None,
        stop_ids: Collection[int] = (),
        alone: bool = False,
    ) -> None:
        self.index = index
        self._text_of = text_of
        self._alone = alone
        self.echo = echo
        self.prompt_logprobs: list[msgspec.Raw] | None = None
        self.before: dict[str, list[Any]] = {}
        """Log probabilities of the echo."""
        self._texts: list[str] = [echo]
        self._logprobs: dict[str, list[Any]] = {}
        self._end: Delta | None = None
        self._stop_ids = stop_ids
        self._prompt_ids = prompt_ids
        self._prompt_told = False
        self._ids: list[int] = []

    def first(self) -> dict[str, Any] | None:
        """Return what a stream opens with: the prompt, where it was asked for."""
        return self._piece(Delta(self.echo, None, []), {}) if self.echo else None

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield what a stream sends of ``delta``: one chunk, or none before there is text."""
        delta = self._shown(delta)
        if delta.text or delta.finish_reason is not None:
            yield self._piece(delta, self._told(delta.logprobs))

    def add(self, delta: Delta) -> None:
        """Collect ``delta`` for an answer that is not streamed."""
        delta = self._shown(delta)
        self._texts.append(delta.text)
        self._ids += delta.token_ids
        for key, values in self._told(delta.logprobs).items():
            self._logprobs.setdefault(key, []).extend(values)
        self._end = delta

    def whole(self) -> dict[str, Any]:
        """Return the choice of an answer that is not streamed."""
        wanted = self._prompt_ids is not None
        told = {
            name: self.before.get(name, []) + self._logprobs.get(name, [])
            for name in self.before or self._logprobs
        }
        choice = self._choice("".join(self._texts), told, self._end)
        return choice | {
            "stop_reason": choice.get("stop_reason"),
            "prompt_logprobs": self.prompt_logprobs,
            "prompt_token_ids": self._prompt_ids,
            "token_ids": self._ids if wanted else None,
        }

    def _shown(self, delta: Delta) -> Delta:
        if not self._alone:
            return delta
        return Delta("", None if delta.finish_reason is None else "length", [])

    def _piece(self, delta: Delta, entry: dict[str, list[Any]]) -> dict[str, Any]:
        """Return a chunk of a stream; the first one has the tokens of the prompt."""
        choice = self._choice(delta.text, entry, delta)
        if self._prompt_ids is not None:
            choice["token_ids"] = delta.token_ids
            if not self._prompt_told:
                choice["prompt_token_ids"], self._prompt_told = self._prompt_ids, True
        return choice

    def _told(self, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        if not tokens:
            return {}
        return logprobs.completion_logprobs(tokens, self._text_of, len(self.echo))

    def _choice(self, text: str, entry: dict[str, list[Any]], end: Delta | None) -> dict[str, Any]:
        finish_reason = None if end is None else end.finish_reason
        choice = {
            "index": self.index,
            "text": text,
            "logprobs": entry or None,
            "finish_reason": finish_reason,
        }
        if end is not None and finish_reason is not None:
            choice["stop_reason"] = stop_reason(end, self._stop_ids)
        return choice


Choice = CompletionChoice | ChatChoice


class Envelope:
    """What is around the choices of one answer."""

    def __init__(self, model: str, request_id: str) -> None:
        self._model = model
        self._id = request_id
        self._created = int(time.time())

    def around(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the object of OpenAI's ``kind`` with the id, time and model of this answer."""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


def usage(
    generations: Sequence[Generation],
    n: int,
    reasoning_end: int | None = None,
    sent: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Tokens of a request with ``n`` choices of each prompt: a prompt counts once.

    ``reasoning_end`` is the token that ends the reasoning, where the texts begin with it and one
    token is its tag. ``sent`` is how many tokens of each choice a stream has sent; all of them by
    default.
    """
    firsts = generations[::n]
    counts = [len(one.output_ids) for one in generations] if sent is None else sent
    prompt = sum(len(generation.prompt_ids) for generation in firsts)
    output = sum(counts)
    cached = sum(g.started.cached_tokens for g in firsts if g.started is not None)
    told = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning_end is None:
        return told
    thought = sum(
        min(count, generation.tokens_before(reasoning_end))
        for count, generation in zip(counts, generations, strict=True)
    )
    return told | {"completion_tokens_details": {"reasoning_tokens": thought}}
