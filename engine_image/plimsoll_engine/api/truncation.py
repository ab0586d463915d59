"""Truncate prompts, with vLLM's fields. Pure."""

from __future__ import annotations

from plimsoll_engine.api.protocol import ChatRequest, CompletionRequest

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for ``max_tokens`` of completions."""


def truncate(
    ids: list[int], body: CompletionRequest | ChatRequest, max_model_len: int | None
) -> list[int]:
    """Return the last ``truncate_prompt_tokens`` of ``ids``, or the first ones for side ``right``.

    -1 leaves space for ``max_tokens`` of output in the context. For a chat without a limit, it
    leaves space for one token.
    """
    limit = body.truncate_prompt_tokens
    if limit == -1:
        if max_model_len is None:
            return ids
        limit = max(1, max_model_len - get_output_tokens(body))
    if limit is None or len(ids) <= limit:
        return ids
    return ids[:limit] if body.truncation_side == "right" else ids[len(ids) - limit :]


def get_output_tokens(body: CompletionRequest | ChatRequest) -> int:
    """Return the requested number of output tokens; 1 for a chat without a limit."""
    # max_tokens 0 (echo only) still generates a token, which the answer omits.
    if isinstance(body, CompletionRequest):
        return DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    return body.max_completion_tokens or body.max_tokens or 1
