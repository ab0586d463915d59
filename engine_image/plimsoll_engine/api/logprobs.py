"""Log probabilities as the two APIs of OpenAI write them. Pure.

What grows with the number of likeliest tokens is encoded as soon as a token is there: an answer in
one piece would otherwise encode all of it at its end, which took seconds and held every stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from plimsoll_engine.frontend.requests.prompt_scores import PromptScores
from plimsoll_engine.frontend.requests.request_log import TokenLogprobs

TokenText = Callable[[int], str]

LOWEST = -9999.0
"""Instead of minus infinity, which JSON lacks; OpenAI's own value."""


def name_of(token_id: int) -> str:
    """Return what stands for a token's text where the client wants ids (vLLM's form)."""
    return f"token_id:{token_id}"


def chat(tokens: Iterable[TokenLogprobs], text_of: TokenText) -> list[msgspec.Raw]:
    """Entries of a chat's ``logprobs.content``, one a token."""
    return [
        _encoded(
            _entry(text_of(token_id), logprobs.chosen)
            | {
                "top_logprobs": [
                    _entry(text_of(top_id), value)
                    for top_id, value in zip(logprobs.top_ids, logprobs.top, strict=True)
                ]
            }
        )
        for token_id, logprobs, _ in tokens
    ]


def prompt(
    ids: Sequence[int], scores: PromptScores, most: int, places: range, text_of: TokenText
) -> list[msgspec.Raw]:
    """Entries of ``prompt_logprobs`` (vLLM's) for the tokens of a prompt ``ids`` at ``places``.

    By token: the prompt's own one and ``most`` of the likeliest. The first place has none.
    """
    found = []
    for place in places:
        if not place:
            found.append(msgspec.Raw(b"null"))
            continue
        score = scores.of(place)
        named = {ids[place]: (score.logprob, score.rank)}
        for number in range(min(most, len(score.top_ids))):
            named.setdefault(score.top_ids[number], (score.top[number], number + 1))
        found.append(
            _encoded(
                {
                    str(token_id): {
                        "logprob": max(logprob, LOWEST),
                        "rank": rank,
                        "decoded_token": text_of(token_id),
                    }
                    for token_id, (logprob, rank) in named.items()
                }
            )
        )
    return found


def around(entries: list[msgspec.Raw]) -> dict[str, Any] | None:
    """``logprobs`` of a chat's choice or chunk."""
    return {"content": entries, "refusal": None} if entries else None


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(text.encode())}


def completion(
    tokens: Sequence[TokenLogprobs], text_of: TokenText, offset: int
) -> dict[str, list[Any]]:
    """Return ``logprobs`` of a completion's chunk.

    The text that the tokens count their offsets in begins ``offset`` characters after the choice's.
    """
    body: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token_id, logprobs, place in tokens:
        text = text_of(token_id)
        top = zip(logprobs.top_ids, logprobs.top, strict=True)
        # The chosen token is among them, as with OpenAI: there may be one more than asked for. It
        # is the first one, as with vLLM.
        chosen = {text: max(logprobs.chosen, LOWEST)}
        named = {text_of(top_id): max(value, LOWEST) for top_id, value in top}
        body["tokens"].append(text)
        body["token_logprobs"].append(max(logprobs.chosen, LOWEST))
        body["top_logprobs"].append(_encoded(chosen | named | chosen))
        body["text_offset"].append(max(0, offset + place))
    return body


def _encoded(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
