"""A prompt that is cut to the length that its client allows (vLLM's fields). Pure."""

from __future__ import annotations

from plimsoll_engine.api.protocol import ChatRequest, CompletionRequest

COMPLETION_TOKENS = 16
"""Of output, where a completion names no number: OpenAI's default."""


def cut(
    ids: list[int], body: CompletionRequest | ChatRequest, max_model_len: int | None
) -> list[int]:
    """Return the last ``truncate_prompt_tokens`` of ``ids``, or the first ones where that is asked.

    -1 leaves room in the context for the output: of ``max_tokens``, or of one token for a chat
    that names no number.
    """
    most = body.truncate_prompt_tokens
    if most == -1:
        if max_model_len is None:
            return ids
        most = max(1, max_model_len - output_tokens(body))
    if most is None or len(ids) <= most:
        return ids
    return ids[:most] if body.truncation_side == "right" else ids[len(ids) - most :]


def output_tokens(body: CompletionRequest | ChatRequest) -> int:
    """Return how many tokens of output a body asks for; one of a chat that names no number."""
    # An echo alone needs a token, too, which the answer leaves out.
    if isinstance(body, CompletionRequest):
        return COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    return body.max_completion_tokens or body.max_tokens or 1
