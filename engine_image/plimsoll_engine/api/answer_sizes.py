"""Size limits of answers, checked before the first token. Pure.

A whole answer is in memory until its last token, and a stream until its client reads it. The
request's choices, tokens and log probabilities bound its size.
"""

from __future__ import annotations

from plimsoll_engine.api.errors import ApiError

TOKEN_BYTES = 64
"""Memory of a generated token, including its id in the request log."""
LOGPROB_BYTES = 512
"""Memory of one log probability: an object with the token's text, bytes and number, and its JSON.
425 bytes on CPython 3.11 (tests/unit/engine/http/test_answer_sizes.py)."""
MAX_LOGPROBS_PER_TOKEN = 21
"""The 20 likeliest tokens, as in OpenAI's API, and the sampled one."""
MIN_ANSWER_BYTES = 64 << 20
BUFFERED_ANSWERS = 4
"""Answers of maximum size in memory at the same time, two of them for one client."""


def max_answer_bytes(max_model_len: int | None) -> int:
    """Return the maximum size of an answer in bytes.

    One choice with all log probabilities may fill the context, or several choices with fewer.
    """
    return max(MIN_ANSWER_BYTES, (max_model_len or 0) * _bytes_per_token(MAX_LOGPROBS_PER_TOKEN))


def buffer_bytes(max_model_len: int | None) -> int:
    """Return the memory budget of all answers that wait for their clients, in bytes."""
    return BUFFERED_ANSWERS * max_answer_bytes(max_model_len)


def answer_bytes(tokens: int, logprobs: int | None) -> int:
    """Return the bytes of an answer with ``tokens`` tokens in all choices.

    ``logprobs`` is the number of likeliest tokens for each; None means no log probabilities.
    """
    return tokens * _bytes_per_token(0 if logprobs is None else logprobs + 1)


def check_answer_size(
    choices: int, tokens: int, logprobs: int | None, max_bytes: int, fields: str, echoed: int = 0,
    echoed_logprobs: int | None = None,
) -> None:  # fmt: skip
    """Raise ApiError if an answer may exceed ``max_bytes``.

    ``tokens`` counts those of all ``choices``. ``fields`` names what the client may lower.
    ``echoed`` counts prompt tokens in the answer, with ``echoed_logprobs`` likeliest tokens each.
    """
    wanted = answer_bytes(tokens, logprobs) + answer_bytes(echoed, echoed_logprobs)
    if wanted > max_bytes:
        details = "" if logprobs is None else f" with {logprobs} top log probabilities"
        raise ApiError(
            400,
            f"{choices} choices of {(tokens + echoed) // choices} tokens{details} may take"
            f" {wanted >> 20} MiB; the limit is {max_bytes >> 20} MiB per request:"
            f" lower {fields}",
            param=fields.replace(" ", ",").partition(",")[0],
            code="answer_too_large",
        )


def _bytes_per_token(logprobs: int) -> int:
    return TOKEN_BYTES + logprobs * LOGPROB_BYTES
