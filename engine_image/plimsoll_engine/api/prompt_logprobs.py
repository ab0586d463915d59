"""Log probabilities of prompts: ``prompt_logprobs``, and ``logprobs`` of an echoed prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from plimsoll_engine.api import logprobs
from plimsoll_engine.api.batch import Batch
from plimsoll_engine.api.logprobs import TokenText
from plimsoll_engine.api.response_bodies import Choice, CompletionChoice
from plimsoll_engine.frontend.requests.detokenize import Detokenizer
from plimsoll_engine.frontend.requests.prompt_scores import PromptScores
from plimsoll_engine.frontend.requests.request_log import RequestFailedError, TokenLogprobs
from plimsoll_engine.messages.worker_ipc import Logprobs

# Tokens to encode per turn of the event loop: about 2 ms with 20 log probabilities.
TOKENS_PER_SLICE = 32


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Builder of the log probabilities of prompts.

    ``prompt_logprobs`` and ``echo`` are numbers of likeliest tokens; None if not requested.
    """

    prompt_logprobs: int | None
    echo: int | None
    get_token_text: TokenText
    # Creates a detokenizer without skipped tokens.
    create_decoder: Callable[[], Detokenizer]

    async def attach(self, batch: Batch, choices: Sequence[Choice]) -> None:
        """Add the prompt's log probabilities to each choice in ``choices``.

        Raises RequestFailedError if the worker did not report all of them.
        """
        for number in range(0, len(choices), batch.n):
            generation = batch.generations[number]
            if (scores := generation.scores) is None:
                continue
            if not scores.is_complete:
                raise RequestFailedError(
                    "error", "the worker did not report all log probabilities of the prompt"
                )
            prompt_choices = choices[number : number + batch.n]
            first = prompt_choices[0]
            length = len(first.echo) if isinstance(first, CompletionChoice) else 0
            entries, echo = await self._encode(generation.prompt_ids, scores, length)
            for choice in prompt_choices:
                choice.prompt_logprobs = entries
                if isinstance(choice, CompletionChoice) and self.echo is not None:
                    choice.echo_logprobs = echo

    async def _encode(
        self, prompt_ids: list[int], scores: PromptScores, echo_length: int
    ) -> tuple[list[msgspec.Raw] | None, dict[str, list[Any]]]:
        entries: list[msgspec.Raw] = []
        echo: dict[str, list[Any]] = {
            "tokens": [self.get_token_text(prompt_ids[0])], "token_logprobs": [None],
            "top_logprobs": [None], "text_offset": [0],
        }  # fmt: skip
        offsets = (
            await self._compute_offsets(prompt_ids, echo_length) if self.echo is not None else []
        )
        for start in range(0, len(prompt_ids), TOKENS_PER_SLICE):
            positions = range(start, min(start + TOKENS_PER_SLICE, len(prompt_ids)))
            if self.prompt_logprobs is not None:
                num_top = self.prompt_logprobs
                entries += logprobs.make_prompt_entries(
                    prompt_ids, scores, num_top, positions, self.get_token_text
                )
            if self.echo is not None:
                tokens = [
                    _make_token_logprobs(prompt_ids, scores, position, self.echo, offsets[position])
                    for position in positions
                    if position
                ]
                for name, values in logprobs.make_completion_logprobs(
                    tokens, self.get_token_text, 0
                ).items():
                    echo[name] += values
            await asyncio.sleep(0)
        return None if self.prompt_logprobs is None else entries, echo

    async def _compute_offsets(self, prompt_ids: list[int], echo_length: int) -> list[int]:
        # Text and echo are aligned at their ends, because the tokenizer may prepend a token without
        # text.
        decoder, offsets, offset = self.create_decoder(), [], 0
        for number, token in enumerate(prompt_ids):
            offsets.append(offset)
            offset += len(decoder.push(token))
            if number % TOKENS_PER_SLICE == 0:
                await asyncio.sleep(0)
        offset += len(decoder.finish())
        return [max(0, start + echo_length - offset) for start in offsets]


def _make_token_logprobs(
    prompt_ids: list[int], scores: PromptScores, position: int, num_top: int, offset: int
) -> TokenLogprobs:
    score = scores.get_score(position)
    found = Logprobs(score.logprob, score.top_ids[:num_top], score.top[:num_top])
    return TokenLogprobs(prompt_ids[position], found, offset)
