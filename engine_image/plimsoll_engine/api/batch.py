"""Create the generations of a prepared request, and check its model, context and response size."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from plimsoll_engine.api import answer_sizes, chat_images, priority, reasoning, tool_families
from plimsoll_engine.api.errors import ApiError, make_invalid_error
from plimsoll_engine.api.prepare import PreparedBody, make_too_long_error
from plimsoll_engine.api.protocol import ChatRequest, CompletionRequest
from plimsoll_engine.api.sampling_params import (
    SEED_MASK,
    create_sampling_params,
    get_num_logprobs,
    get_num_prompt_logprobs,
)
from plimsoll_engine.api.truncation import get_num_output_tokens
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.requests.adapter_registry import RegisteredAdapter
from plimsoll_engine.frontend.requests.request_log import Admission, Generation, StopRules
from plimsoll_engine.messages.worker_ipc import Media

# Request field with the prompt, by prefix of the request ID.
PROMPT_FIELD_BY_ID_PREFIX = {"cmpl": "prompt", "chatcmpl": "messages", "resp": "input"}


@dataclass(frozen=True, slots=True)
class Batch:
    """Generations of one request: ``n`` choices per prompt.

    All generations set the event ``wake`` when they have output.
    """

    request_id: str
    n: int
    generations: list[Generation]
    wake: asyncio.Event
    model: str


async def create_completion_batch(
    engine: AsyncEngine, prepared: PreparedBody[CompletionRequest], tenant: str = ""
) -> Batch:
    """Return the generations of a completion. Raises ApiError."""
    body = prepared.body
    find_requested_adapter(engine, body.model)
    max_tokens = get_num_output_tokens(body)
    return await _build_batch(engine, prepared, "cmpl", prepared.prompts, max_tokens, tenant)


async def create_chat_batch(
    engine: AsyncEngine,
    prepared: PreparedBody[ChatRequest],
    tenant: str = "",
    prefix: str = "chatcmpl",
) -> Batch:
    """Return the generations of one chat or of several chats. Raises ApiError.

    ``prefix`` is the beginning of the request ID, such as ``resp`` for ``/v1/responses``.
    """
    body = prepared.body
    find_requested_adapter(engine, body.model)
    prompts, media = prepared.prompts, list[Media]()
    if (processor := engine.media.processors.image) is not None:
        # Only a single chat may have images; without them, prompts must have no placeholder.
        placed = [
            await chat_images.expand_placeholders(engine.media, processor, ids, prepared.images)
            for ids in prompts
        ]
        prompts = [ids for ids, _ in placed]
        media = placed[0][1]
    max_tokens = body.max_completion_tokens or body.max_tokens
    return await _build_batch(engine, prepared, prefix, prompts, max_tokens, tenant, media)


def list_parser_tags(prepared: PreparedBody[Any], parses_reasoning: bool) -> list[str]:
    """Return the tags that the output parsers search for."""
    tags = list(tool_families.TAGS if prepared.family else ())
    if parses_reasoning and prepared.reasoning_prompts:
        tags += (reasoning.OPEN_TAG, reasoning.CLOSE_TAG)
    return tags


def find_requested_adapter(engine: AsyncEngine, model: str) -> RegisteredAdapter | None:
    """Return the adapter ``model``; None if ``model`` is the served model. Raises ApiError."""
    served = engine.settings.served_model_name
    if model in ("", served):
        return None
    if (adapter := engine.adapters.find(model)) is not None:
        return adapter
    raise ApiError(
        404,
        f"the model {model!r} does not exist: use {served!r} or a name in /v1/models",
        param="model",
        code="model_not_found",
    )


def check_token_ids(engine: AsyncEngine, token_ids: list[int], param: str) -> None:
    """Raise ApiError if one of ``token_ids`` is not in the vocabulary."""
    largest = engine.tokenizer.vocab_size - 1
    if token_ids and max(token_ids) > largest:
        raise make_invalid_error(
            f"token ID {max(token_ids)} is not in the vocabulary: the maximum is {largest}", param
        )


async def _build_batch(
    engine: AsyncEngine,
    prepared: PreparedBody[CompletionRequest] | PreparedBody[ChatRequest],
    prefix: str,
    prompts: list[list[int]],
    max_tokens: int | None,
    tenant: str,
    media: Sequence[Media] = (),
) -> Batch:
    body = prepared.body
    param = PROMPT_FIELD_BY_ID_PREFIX[prefix]
    stops = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
    text = StopRules(stops, body.include_stop_str_in_output)
    # The tenant is the API key if there are several, else the user that the request names.
    admission = Admission(
        priority=priority.check_priority(engine.settings, body.priority, tenant),
        tenant=tenant or body.user or "",
        deadline_s=body.deadline_s,
        cache_salt=body.cache_salt or "",
        adapter=find_requested_adapter(
            engine, body.model
        ),  # checked again: it may have been unloaded
    )
    name = f"{prefix}-{secrets.token_hex(12)}"
    batch = Batch(name, body.n or 1, [], asyncio.Event(), body.model)
    limits = [compute_output_limit(engine, ids, max_tokens, param) for ids in prompts]
    repeats = prepared.echoes or body.return_token_ids or body.prompt_logprobs is not None
    echoed = sum(map(len, prompts)) if repeats else 0
    _check_response_size(engine, body, limits, batch.n, echoed, param)
    tags = list_parser_tags(prepared, engine.settings.reasoning_parser is not None)
    for ids, tokens in zip(prompts, limits, strict=True):
        tokenizer = engine.tokenizer
        params = create_sampling_params(
            body, tokens, tokenizer.eos_ids, tokenizer.vocab_size, prepared.grammar,
            prepared.bad_words, tokenizer.checkpoint.sampling_defaults,
        )  # fmt: skip
        detokenizer = tokenizer.create_detokenizer_factory(ids, body.skip_special_tokens, tags)
        await asyncio.sleep(0)  # yield, because a thousand prompts would block the streams
        for choice in range(batch.n):
            # As in vLLM, each further choice increments the seed. Only the first choice scores the
            # prompt, for all choices.
            seeded = msgspec.structs.replace(
                params,
                seed=(params.seed + choice) & SEED_MASK,
                prompt_logprobs=None if choice else params.prompt_logprobs,
            )
            name = f"{batch.request_id}-{len(batch.generations)}"
            batch.generations.append(
                Generation(name, ids, seeded, detokenizer(), text, admission, batch.wake, media)
            )
    return batch


def _check_response_size(
    engine: AsyncEngine,
    body: CompletionRequest | ChatRequest,
    output_limits: list[int],
    n: int,
    num_echoed_tokens: int,
    param: str,
) -> None:
    # ``output_limits`` is by prompt, and ``num_echoed_tokens`` is the number in each choice.
    logprobs = get_num_logprobs(body)
    if isinstance(body, ChatRequest):
        field = "max_output_tokens" if param == "input" else "n, max_completion_tokens"
        fields = f"{field} or top_logprobs"
    else:
        fields = "n, max_tokens, logprobs or the number of prompts"
    choices, tokens = n * len(output_limits), n * sum(output_limits)
    scores = get_num_prompt_logprobs(body)
    answer_sizes.check_response_size(
        choices, tokens, logprobs, engine.max_model_len, fields, n * num_echoed_tokens, scores
    )


def compute_output_limit(
    engine: AsyncEngine, prompt_ids: list[int], max_tokens: int | None, param: str
) -> int:
    """Return the maximum number of output tokens. Raises ApiError if the prompt is too long."""
    if not prompt_ids:
        raise make_invalid_error(
            f"{param} has no tokens: send text or token IDs", param, "empty_prompt"
        )
    check_token_ids(engine, prompt_ids, param)
    default = int(engine.tokenizer.checkpoint.sampling_defaults.get("max_new_tokens", 1 << 31))
    limit = engine.max_model_len
    if limit is None:
        # The first worker is still loading; it enforces its own context limit.
        return default if max_tokens is None else max_tokens
    if len(prompt_ids) >= limit:
        raise make_too_long_error(f"the prompt has {len(prompt_ids)} tokens", limit, param)
    if max_tokens is not None and len(prompt_ids) + max_tokens > limit:
        raise make_too_long_error(
            f"the request has {len(prompt_ids)} prompt tokens and {max_tokens} output tokens",
            limit,
            param,
            "shorten the prompt or request fewer output tokens",
        )
    return max_tokens or min(default, limit - len(prompt_ids))
