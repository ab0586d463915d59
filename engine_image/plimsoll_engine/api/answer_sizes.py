"""Size limits of responses, checked before the first token.

A response stays in memory until its client has read it.
"""

from __future__ import annotations

from plimsoll_engine.api.errors import ApiError

# Memory of a generated token, including its ID in the request log.
BYTES_PER_TOKEN = 64
# Memory of one log probability, as an object and as JSON. CPython 3.11 needs 425 bytes
# (tests/unit/engine/http/test_answer_sizes.py).
BYTES_PER_LOGPROB = 512
# The 20 likeliest tokens (OpenAI) and the token itself.
MAX_LOGPROBS_PER_TOKEN = 21
MIN_RESPONSE_BYTES = 64 << 20
# Responses of maximum size that fit into memory. A client may have two of them.
NUM_BUFFERED_RESPONSES = 4


def compute_max_response_bytes(max_model_len: int | None) -> int:
    """Return the maximum size of a response in bytes.

    It suffices for one choice that fills the context with all log probabilities.
    """
    return max(
        MIN_RESPONSE_BYTES, (max_model_len or 0) * _estimate_bytes_per_token(MAX_LOGPROBS_PER_TOKEN)
    )


def compute_buffer_bytes(max_model_len: int | None) -> int:
    """Return the memory budget in bytes for all responses that their clients have not read yet."""
    return NUM_BUFFERED_RESPONSES * compute_max_response_bytes(max_model_len)


def estimate_response_bytes(num_tokens: int, num_logprobs: int | None) -> int:
    """Return the estimated size in bytes of a response with ``num_tokens`` tokens.

    ``num_logprobs`` is the number of likeliest tokens per token; None without log probabilities.
    """
    return num_tokens * _estimate_bytes_per_token(0 if num_logprobs is None else num_logprobs + 1)


def check_response_size(
    num_choices: int,
    num_tokens: int,
    num_logprobs: int | None,
    max_model_len: int | None,
    adjustable_fields: str,
    num_echoed_tokens: int = 0,
    num_echoed_logprobs: int | None = None,
) -> None:
    """Raise ApiError if a response may exceed the maximum size.

    Args:
        num_choices: Number of choices.
        num_tokens: Number of output tokens in all choices.
        num_logprobs: Number of likeliest tokens per output token; None without log probabilities.
        max_model_len: Maximum number of prompt and output tokens; None while it is unknown.
        adjustable_fields: Names of the request fields that the error tells the client to lower.
        num_echoed_tokens: Number of prompt tokens in the response.
        num_echoed_logprobs: Number of likeliest tokens per prompt token; None without log
            probabilities.

    """
    wanted = estimate_response_bytes(num_tokens, num_logprobs) + estimate_response_bytes(
        num_echoed_tokens, num_echoed_logprobs
    )
    max_bytes = compute_max_response_bytes(max_model_len)
    if wanted <= max_bytes:
        return
    param = adjustable_fields.replace(" ", ",").partition(",")[0]
    if max_model_len is None:
        # Choices that need no more for each token than the largest one fit into any context.
        per_token = num_choices * max(
            estimate_response_bytes(1, num_logprobs),
            estimate_response_bytes(1, num_echoed_logprobs),
        )
        if per_token <= _estimate_bytes_per_token(MAX_LOGPROBS_PER_TOKEN):
            return
        raise ApiError(
            503,
            "the engine is starting and cannot check the size of the answer yet: retry later or "
            f"lower {adjustable_fields}",
            param=param, code="not_serving", should_retry=True,
        )  # fmt: skip
    details = "" if num_logprobs is None else f" with {num_logprobs} top log probabilities"
    raise ApiError(
        400,
        f"{num_choices} choices of {(num_tokens + num_echoed_tokens) // num_choices} "
        f"tokens{details} may take {wanted >> 20} MiB, but the limit is {max_bytes >> 20} MiB "
        f"per request: lower {adjustable_fields}",
        param=param, code="answer_too_large",
    )  # fmt: skip


def _estimate_bytes_per_token(num_logprobs: int) -> int:
    return BYTES_PER_TOKEN + num_logprobs * BYTES_PER_LOGPROB
