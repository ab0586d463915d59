"""How large an answer may become, before its first token. Pure.

An answer in one piece is in memory until its last token, and a stream until its client reads it.
What it holds is bounded by what was asked for: choices, tokens of each, log probabilities of each
token.
"""

from __future__ import annotations

from plimsoll_engine.api.errors import ApiError

TOKEN_BYTES = 64
"""Of a token of text, its number in the request log included."""
LOGPROB_BYTES = 512
"""Of one log probability: an object with the token's text, its bytes and the number, and its JSON.
425 bytes on CPython 3.11 (tests/unit/engine/http/test_answer_sizes.py)."""
MAX_LOGPROBS = 21
"""Of a token: the 20 likeliest, as OpenAI has them, and its own."""
MIN_ANSWER_BYTES = 64 << 20
ANSWERS_IN_WORK = 4
"""Of the largest size, written to clients at a time: one client has two."""


def largest(max_model_len: int | None) -> int:
    """Return the bytes of the largest answer.

    One choice with all log probabilities may fill the context, or more choices with fewer.
    """
    return max(MIN_ANSWER_BYTES, (max_model_len or 0) * _per_token(MAX_LOGPROBS))


def in_work(max_model_len: int | None) -> int:
    """Return the most bytes that all answers that wait for their clients may hold."""
    return ANSWERS_IN_WORK * largest(max_model_len)


def size(tokens: int, logprobs: int | None) -> int:
    """Bytes of an answer with so many tokens in all choices.

    ``logprobs`` is how many likeliest tokens each comes with, None for no log probabilities at all.
    """
    return tokens * _per_token(0 if logprobs is None else logprobs + 1)


def check(
    choices: int, tokens: int, logprobs: int | None, most: int, fields: str, repeated: int = 0,
    repeated_logprobs: int | None = None,
) -> None:  # fmt: skip
    """Raise ApiError where ``tokens``, those of all ``choices``, come to more than ``most`` bytes.

    ``fields`` names what the client may lower. ``repeated`` is how many tokens of prompts the
    answer has as well, with as many likeliest ones as ``repeated_logprobs`` says.
    """
    wanted = size(tokens, logprobs) + size(repeated, repeated_logprobs)
    if wanted > most:
        with_them = "" if logprobs is None else f" with {logprobs} top log probabilities each"
        raise ApiError(
            400,
            f"{choices} choices of {(tokens + repeated) // choices} tokens{with_them} may take"
            f" {wanted >> 20} MiB, and this engine's context allows {most >> 20} MiB in one"
            f" request: lower {fields}",
            param=fields.replace(" ", ",").partition(",")[0],
            code="answer_too_large",
        )


def _per_token(logprobs: int) -> int:
    return TOKEN_BYTES + logprobs * LOGPROB_BYTES
