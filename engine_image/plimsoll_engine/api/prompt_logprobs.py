"""What an answer says of its prompts' tokens: ``prompt_logprobs``, and ``logprobs`` of an echo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from plimsoll_engine.api import logprobs
from plimsoll_engine.api.batch import Batch
from plimsoll_engine.api.logprobs import TokenText
from plimsoll_engine.api.responses import Choice, CompletionChoice
from plimsoll_engine.frontend.requests.detokenize import Detokenizer
from plimsoll_engine.frontend.requests.prompt_scores import PromptScores
from plimsoll_engine.frontend.requests.request_log import RequestFailed, TokenLogprobs
from plimsoll_engine.messages.worker_ipc import Logprobs

PLACES = 32
"""Written at once: some 2 ms with 20 log probabilities each. Streams go on between them."""


@dataclass(frozen=True, slots=True)
class OfPrompts:
    """How many of the likeliest tokens each of the two says; None where it is not asked for."""

    prompt_logprobs: int | None
    echo: int | None
    text_of: TokenText
    decoder: Callable[[], Detokenizer]
    """Of a text from its beginning on, special tokens included."""

    async def tell(self, batch: Batch, choices: Sequence[Choice]) -> None:
        """Give each of ``choices`` what is said of its prompt.

        Raises RequestFailed where a worker left some of it out.
        """
        for number in range(0, len(choices), batch.n):
            generation = batch.generations[number]
            if (scores := generation.scores) is None:
                continue
            if not scores.complete:
                raise RequestFailed("error", "log probabilities of the prompt are missing")
            mine = choices[number : number + batch.n]
            first = mine[0]
            length = len(first.echo) if isinstance(first, CompletionChoice) else 0
            entries, echo = await self._written(generation.prompt_ids, scores, length)
            for choice in mine:
                choice.prompt_logprobs = entries
                if isinstance(choice, CompletionChoice) and self.echo is not None:
                    choice.before = echo

    async def _written(
        self, ids: list[int], scores: PromptScores, length: int
    ) -> tuple[list[msgspec.Raw] | None, dict[str, list[Any]]]:
        """Return the entries of both; the echo is a text of ``length`` characters."""
        entries: list[msgspec.Raw] = []
        echo: dict[str, list[Any]] = {
            "tokens": [self.text_of(ids[0])], "token_logprobs": [None], "top_logprobs": [None],
            "text_offset": [0],
        }  # fmt: skip
        offsets = await self._offsets(ids, length) if self.echo is not None else []
        for start in range(0, len(ids), PLACES):
            places = range(start, min(start + PLACES, len(ids)))
            if self.prompt_logprobs is not None:
                most = self.prompt_logprobs
                entries += logprobs.prompt(ids, scores, most, places, self.text_of)
            if self.echo is not None:
                tokens = [
                    _token(ids, scores, place, self.echo, offsets[place])
                    for place in places
                    if place
                ]
                for name, values in logprobs.completion(tokens, self.text_of, 0).items():
                    echo[name] += values
            await asyncio.sleep(0)
        return None if self.prompt_logprobs is None else entries, echo

    async def _offsets(self, ids: list[int], length: int) -> list[int]:
        """Return where each token's text begins in the echo of ``length`` characters.

        Both end together: a token that the tokenizer put before a prompt is no text of the echo.
        """
        decoder, offsets, offset = self.decoder(), [], 0
        for number, token in enumerate(ids):
            offsets.append(offset)
            offset += len(decoder.push(token))
            if number % PLACES == 0:
                await asyncio.sleep(0)
        offset += len(decoder.finish())
        return [max(0, one + length - offset) for one in offsets]


def _token(
    ids: list[int], scores: PromptScores, place: int, most: int, offset: int
) -> TokenLogprobs:
    score = scores.of(place)
    found = Logprobs(score.logprob, score.top_ids[:most], score.top[:most])
    return TokenLogprobs(ids[place], found, offset)
