"""Truncate prompts as the request fields of vLLM specify."""

from __future__ import annotations

from plimsoll_engine.api.protocol import ChatRequest, CompletionRequest

# OpenAI's default for max_tokens of completions.
DEFAULT_COMPLETION_TOKENS = 16


def truncate_prompt(
    prompt_ids: list[int], body: CompletionRequest | ChatRequest, max_model_len: int | None
) -> list[int]:
    """Return the prompt, truncated to ``truncate_prompt_tokens`` tokens on its left or right side.

    If the field is -1, the prompt and the requested output must fit into the context.
    """
    limit = body.truncate_prompt_tokens
    if limit == -1:
        if max_model_len is None:
            return prompt_ids
        limit = max(1, max_model_len - get_num_output_tokens(body))
    if limit is None or len(prompt_ids) <= limit:
        return prompt_ids
    return (
        prompt_ids[:limit]
        if body.truncation_side == "right"
        else prompt_ids[len(prompt_ids) - limit :]
    )


def get_num_output_tokens(body: CompletionRequest | ChatRequest) -> int:
    """Return the requested number of output tokens; 1 for a chat without a limit."""
    # max_tokens 0 (echo only) still generates a token, which the answer omits.
    if isinstance(body, CompletionRequest):
        return DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    return body.max_completion_tokens or body.max_tokens or 1
