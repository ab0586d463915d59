"""Log probabilities in the formats of OpenAI's two APIs.

They are encoded when their token arrives. Encoding a whole response at its end took seconds and
blocked all streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from plimsoll_engine.frontend.requests.prompt_scores import PromptScores
from plimsoll_engine.frontend.requests.request_log import TokenLogprobs

TokenText = Callable[[int], str]
TokenBytes = Callable[[int], bytes]

# OpenAI's value for minus infinity, which JSON cannot express.
MIN_LOGPROB = -9999.0


def format_token_id(token_id: int) -> str:
    """Return ``token_id:ID``, vLLM's form for clients that request IDs instead of texts."""
    return f"token_id:{token_id}"


def make_chat_entries(
    tokens: Iterable[TokenLogprobs],
    get_token_text: TokenText,
    get_token_bytes: TokenBytes | None = None,
) -> list[msgspec.Raw]:
    """Return the entries of a chat's ``logprobs.content``, one per token.

    Tokens that are not in the text have no bytes, so the joined bytes equal the text.
    """

    def make_entry(token_id: int, logprob: float, is_in_text: bool = True) -> dict[str, Any]:
        text = get_token_text(token_id)
        data = text.encode() if get_token_bytes is None else get_token_bytes(token_id)
        data = data if is_in_text else b""
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(data)}

    return [
        _encode_value(
            make_entry(token_id, logprobs.chosen, is_in_text)
            | {
                "top_logprobs": [
                    make_entry(top_id, value)
                    for top_id, value in zip(logprobs.top_ids, logprobs.top, strict=True)
                ]
            }
        )
        for token_id, logprobs, _, is_in_text in tokens
    ]


def make_prompt_entries(
    prompt_ids: Sequence[int],
    scores: PromptScores,
    num_top: int,
    positions: range,
    get_token_text: TokenText,
) -> list[msgspec.Raw]:
    """Return vLLM's ``prompt_logprobs`` for the prompt tokens at ``positions``.

    The entry of position 0 is null.
    """
    found = []
    for position in positions:
        if not position:
            found.append(msgspec.Raw(b"null"))
            continue
        score = scores.get_score(position)
        by_id = {prompt_ids[position]: (score.logprob, score.rank)}
        for number in range(min(num_top, len(score.top_ids))):
            by_id.setdefault(score.top_ids[number], (score.top[number], number + 1))
        found.append(
            _encode_value(
                {
                    str(token_id): {
                        "logprob": max(logprob, MIN_LOGPROB),
                        "rank": rank,
                        "decoded_token": get_token_text(token_id),
                    }
                    for token_id, (logprob, rank) in by_id.items()
                }
            )
        )
    return found


def make_chat_logprobs(entries: list[msgspec.Raw]) -> dict[str, Any] | None:
    """Return the ``logprobs`` object of a chat's choice or chunk; None without entries."""
    return {"content": entries, "refusal": None} if entries else None


def make_completion_logprobs(
    tokens: Sequence[TokenLogprobs], get_token_text: TokenText, offset: int
) -> dict[str, list[Any]]:
    """Return the ``logprobs`` object of a completion's chunk.

    ``offset`` is added to the text offsets of the tokens.
    """
    body: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token_id, logprobs, position, _ in tokens:
        text = get_token_text(token_id)
        top = zip(logprobs.top_ids, logprobs.top, strict=True)
        # As in OpenAI's API, the sampled token is included even if it is not among the likeliest.
        # As in vLLM, it comes first. If tokens share a text, the later ones are named by their ID.
        by_id = {text: max(logprobs.chosen, MIN_LOGPROB)}
        for top_id, value in top:
            if top_id != token_id:
                other = get_token_text(top_id)
                by_id[format_token_id(top_id) if other in by_id else other] = max(
                    value, MIN_LOGPROB
                )
        body["tokens"].append(text)
        body["token_logprobs"].append(max(logprobs.chosen, MIN_LOGPROB))
        body["top_logprobs"].append(_encode_value(by_id))
        body["text_offset"].append(max(0, offset + position))
    return body


def _encode_value(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
