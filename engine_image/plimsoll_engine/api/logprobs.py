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
TokenBytes = Callable[[int], bytes]

LOWEST = -9999.0
"""Instead of minus infinity, which JSON lacks; OpenAI's own value."""


def name_of(token_id: int) -> str:
    """Return what stands for a token's text where the client wants ids (vLLM's form)."""
    return f"token_id:{token_id}"


def chat(
    tokens: Iterable[TokenLogprobs], text_of: TokenText, bytes_of: TokenBytes | None = None
) -> list[msgspec.Raw]:
    """Entries of a chat's ``logprobs.content``, one a token.

    ``bytes_of`` gives the bytes of a token, which may be part of a character; None for those of its
    text. A token without a text has none, so that the bytes of all are those of the answer.
    """

    def entry(token_id: int, logprob: float, shown: bool = True) -> dict[str, Any]:
        text = text_of(token_id)
        data = text.encode() if bytes_of is None else bytes_of(token_id)
        data = data if shown else b""
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(data)}

    return [
        _encoded(
            entry(token_id, logprobs.chosen, shown)
            | {
                "top_logprobs": [
                    entry(top_id, value)
                    for top_id, value in zip(logprobs.top_ids, logprobs.top, strict=True)
                ]
            }
        )
        for token_id, logprobs, _, shown in tokens
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
    for token_id, logprobs, place, _ in tokens:
        text = text_of(token_id)
        top = zip(logprobs.top_ids, logprobs.top, strict=True)
        # The chosen token is among them, as with OpenAI: there may be one more than asked for. It
        # is the first one, as with vLLM. Of tokens with one text the others go by their numbers.
        named = {text: max(logprobs.chosen, LOWEST)}
        for top_id, value in top:
            if top_id != token_id:
                other = text_of(top_id)
                named[name_of(top_id) if other in named else other] = max(value, LOWEST)
        body["tokens"].append(text)
        body["token_logprobs"].append(max(logprobs.chosen, LOWEST))
        body["top_logprobs"].append(_encoded(named))
        body["text_offset"].append(max(0, offset + place))
    return body


def _encoded(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
