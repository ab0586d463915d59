"""Log probabilities as the two APIs of OpenAI write them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from plimsoll_engine.frontend.requests import TokenLogprobs

TokenText = Callable[[int], str]

LOWEST = -9999.0
"""Instead of minus infinity, which JSON lacks; OpenAI's own value."""


def chat(tokens: Sequence[TokenLogprobs], text_of: TokenText) -> dict[str, Any]:
    """``logprobs`` of a chat's choice or chunk."""
    return {
        "content": [
            _entry(text_of(token_id), logprobs.chosen)
            | {
                "top_logprobs": [
                    _entry(text_of(top_id), value)
                    for top_id, value in zip(logprobs.top_ids, logprobs.top, strict=True)
                ]
            }
            for token_id, logprobs in tokens
        ],
        "refusal": None,
    }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(text.encode())}


def completion(
    tokens: Sequence[TokenLogprobs], text_of: TokenText, offset: int
) -> tuple[dict[str, Any], int]:
    """``logprobs`` of a completion's choice or chunk whose text begins ``offset`` characters after
    the choice's; and the offset of what follows."""
    body: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token_id, logprobs in tokens:
        text = text_of(token_id)
        top = zip(logprobs.top_ids, logprobs.top, strict=True)
        # The chosen token is among them, as with OpenAI: there may be one more than asked for.
        named = {text_of(top_id): max(value, LOWEST) for top_id, value in top}
        body["tokens"].append(text)
        body["token_logprobs"].append(max(logprobs.chosen, LOWEST))
        body["top_logprobs"].append(named | {text: max(logprobs.chosen, LOWEST)})
        body["text_offset"].append(offset)
        offset += len(text)
    return body, offset
