"""Size limits of responses, checked before the first token. This module does no I/O.

A response stays in memory until its client has read it, and without streaming until its last token.
Its size depends on the number of choices, tokens and log probabilities.
"""

from __future__ import annotations

from plimsoll_engine.api.errors import ApiError

BYTES_PER_TOKEN = 64
"""Memory of a generated token, including its ID in the request log, in bytes."""
BYTES_PER_LOGPROB = 512
"""Memory of one log probability: an object with the token's text, bytes and number, and its JSON.

CPython 3.11 needs 425 bytes (tests/unit/engine/http/test_answer_sizes.py).
"""
MAX_LOGPROBS_PER_TOKEN = 21
"""Maximum number of log probabilities per token: the 20 likeliest (OpenAI) and its own."""
MIN_ANSWER_BYTES = 64 << 20
NUM_BUFFERED_ANSWERS = 4
"""Number of responses of maximum size that fit into memory. A client may have two of them."""


def compute_max_answer_bytes(max_model_len: int | None) -> int:
    """Return the maximum size of a response in bytes.

    The maximum suffices for one choice that fills the context with all log probabilities, or for
    several choices with fewer log probabilities.
    """
    return max(
        MIN_ANSWER_BYTES, (max_model_len or 0) * _estimate_bytes_per_token(MAX_LOGPROBS_PER_TOKEN)
    )


def compute_buffer_bytes(max_model_len: int | None) -> int:
    """Return the memory budget in bytes for all responses that their clients have not read yet."""
    return NUM_BUFFERED_ANSWERS * compute_max_answer_bytes(max_model_len)


def estimate_answer_bytes(tokens: int, logprobs: int | None) -> int:
    """Return the estimated size in bytes of a response with ``tokens`` tokens in all choices.

    ``logprobs`` is the number of likeliest tokens per token; None means no log probabilities.
    """
    return tokens * _estimate_bytes_per_token(0 if logprobs is None else logprobs + 1)


def check_answer_size(
    choices: int, tokens: int, logprobs: int | None, max_bytes: int, fields: str, echoed: int = 0,
    echoed_logprobs: int | None = None,
) -> None:  # fmt: skip
    """Raise ApiError if a response may exceed ``max_bytes``.

    ``tokens`` is the number of output tokens in all ``choices``, each with ``logprobs`` likeliest
    tokens. ``echoed`` is the number of prompt tokens in the response, each with ``echoed_logprobs``
    likeliest tokens. ``fields`` names the request fields that the client may lower.
    """
    wanted = estimate_answer_bytes(tokens, logprobs) + estimate_answer_bytes(
        echoed, echoed_logprobs
    )
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


def _estimate_bytes_per_token(logprobs: int) -> int:
    return BYTES_PER_TOKEN + logprobs * BYTES_PER_LOGPROB
