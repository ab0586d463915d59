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
MIN_RESPONSE_BYTES = 64 << 20
NUM_BUFFERED_RESPONSES = 4
"""Number of responses of maximum size that fit into memory. A client may have two of them."""


def compute_max_response_bytes(max_model_len: int | None) -> int:
    """Return the maximum size of a response in bytes.

    The maximum suffices for one choice that fills the context with all log probabilities, or for
    several choices with fewer log probabilities.
    """
    return max(
        MIN_RESPONSE_BYTES, (max_model_len or 0) * _estimate_bytes_per_token(MAX_LOGPROBS_PER_TOKEN)
    )


def compute_buffer_bytes(max_model_len: int | None) -> int:
    """Return the memory budget in bytes for all responses that their clients have not read yet."""
    return NUM_BUFFERED_RESPONSES * compute_max_response_bytes(max_model_len)


def estimate_response_bytes(num_tokens: int, num_logprobs: int | None) -> int:
    """Return the estimated size in bytes of a response with ``num_tokens`` tokens in all choices.

    ``num_logprobs`` is the number of likeliest tokens per token; None means no log probabilities.
    """
    return num_tokens * _estimate_bytes_per_token(0 if num_logprobs is None else num_logprobs + 1)


def check_response_size(
    num_choices: int,
    num_tokens: int,
    num_logprobs: int | None,
    max_bytes: int,
    adjustable_fields: str,
    num_echoed_tokens: int = 0,
    num_echoed_logprobs: int | None = None,
) -> None:
    """Raise ApiError if a response may exceed ``max_bytes``.

    ``num_tokens`` is the number of output tokens in all ``num_choices``, each with ``num_logprobs``
    likeliest tokens. ``num_echoed_tokens`` is the number of prompt tokens in the response, each
    with ``num_echoed_logprobs`` likeliest tokens. ``adjustable_fields`` names the request fields
    that the client may lower.
    """
    wanted = estimate_response_bytes(num_tokens, num_logprobs) + estimate_response_bytes(
        num_echoed_tokens, num_echoed_logprobs
    )
    if wanted > max_bytes:
        details = "" if num_logprobs is None else f" with {num_logprobs} top log probabilities"
        raise ApiError(
            400,
            f"{num_choices} choices of {(num_tokens + num_echoed_tokens) // num_choices} "
            f"tokens{details} may take {wanted >> 20} MiB, but the limit is {max_bytes >> 20} MiB "
            f"per request: lower {adjustable_fields}",
            param=adjustable_fields.replace(" ", ",").partition(",")[0],
            code="answer_too_large",
        )


def _estimate_bytes_per_token(num_logprobs: int) -> int:
    return BYTES_PER_TOKEN + num_logprobs * BYTES_PER_LOGPROB
