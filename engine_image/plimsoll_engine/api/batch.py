"""From a prepared body to its generations: model, room and sampling, each checked."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from plimsoll_engine.api import answer_sizes, chat_images, priority, reasoning, tool_families
from plimsoll_engine.api.errors import ApiError, invalid
from plimsoll_engine.api.prepare import PreparedBody, too_long
from plimsoll_engine.api.protocol import ChatRequest, CompletionRequest
from plimsoll_engine.api.sampling_params import SEED_MASK, prompt_logprobs, sampling, told_logprobs
from plimsoll_engine.api.truncation import output_tokens
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.requests.adapter_registry import RegisteredAdapter
from plimsoll_engine.frontend.requests.request_log import Admission, Generation, TextRules
from plimsoll_engine.messages.worker_ipc import Media

PARAMS = {"cmpl": "prompt", "chatcmpl": "messages", "resp": "input"}
"""The field that has the prompt, by the prefix of the request's id."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The generations of one body, prompt by prompt, ``n`` choices of each; they share ``wake``.

    ``model`` is the name that they were asked of.
    """

    request_id: str
    n: int
    generations: list[Generation]
    wake: asyncio.Event
    model: str


async def completion(
    engine: AsyncEngine, prepared: PreparedBody[CompletionRequest], tenant: str = ""
) -> Batch:
    """Read the body of ``/v1/completions`` into a batch; raise ApiError where it is wrong."""
    body = prepared.body
    check_model(engine, body.model)
    most = output_tokens(body)
    return await _asked(engine, prepared, "cmpl", prepared.prompts, most, tenant)


async def chat(
    engine: AsyncEngine,
    prepared: PreparedBody[ChatRequest],
    tenant: str = "",
    prefix: str = "chatcmpl",
) -> Batch:
    """Read the body of one chat, or of several, into a batch; raise ApiError where it is wrong.

    ``prefix`` is that of its id: ``resp`` for ``/v1/responses``.
    """
    body = prepared.body
    check_model(engine, body.model)
    prompts, media = prepared.prompts, list[Media]()
    if (sees := engine.media.processors.image) is not None:
        # Only a chat alone has images; the others must have no placeholder.
        placed = [
            await chat_images.place(engine.media, sees, ids, prepared.images) for ids in prompts
        ]
        prompts = [ids for ids, _ in placed]
        media = placed[0][1]
    max_tokens = body.max_completion_tokens or body.max_tokens
    return await _asked(engine, prepared, prefix, prompts, max_tokens, tenant, media)


def tags(prepared: PreparedBody[Any], parses_reasoning: bool) -> list[str]:
    """Return the tags that the parsers of a text must see, although they may be special tokens."""
    found = list(tool_families.MARKS if prepared.family else ())
    if parses_reasoning and prepared.reasons:
        found += (reasoning.OPEN, reasoning.CLOSE)
    return found


def check_model(engine: AsyncEngine, model: str) -> RegisteredAdapter | None:
    """Return the adapter of this name, None for the model itself; ApiError where it is neither."""
    served = engine.settings.served_model_name
    if model in ("", served):
        return None
    if (adapter := engine.adapters.find(model)) is not None:
        return adapter
    raise ApiError(
        404,
        f"the model {model!r} does not exist; this engine serves {served!r}",
        param="model",
        code="model_not_found",
    )


def check_ids(engine: AsyncEngine, ids: list[int], param: str) -> None:
    """Raise ApiError for a token that the vocabulary lacks."""
    largest = engine.tokenizer.vocab_size - 1
    if ids and max(ids) > largest:
        raise invalid(f"token {max(ids)} does not exist; the largest is {largest}", param)


async def _asked(
    engine: AsyncEngine,
    prepared: PreparedBody[CompletionRequest] | PreparedBody[ChatRequest],
    prefix: str,
    prompts: list[list[int]],
    max_tokens: int | None,
    tenant: str,
    media: Sequence[Media] = (),
) -> Batch:
    body = prepared.body
    param = PARAMS[prefix]
    stops = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
    text = TextRules(stops, body.include_stop_str_in_output)
    # A request is of its API key where several tell tenants apart, else of the user it names.
    admission = Admission(
        priority=priority.allowed(engine.settings, body.priority, tenant),
        tenant=tenant or body.user or "",
        deadline_s=body.deadline_s,
        cache_salt=body.cache_salt or "",
        adapter=check_model(engine, body.model),  # again: it may be gone meanwhile
    )
    name = f"{prefix}-{secrets.token_hex(12)}"
    batch = Batch(name, body.n or 1, [], asyncio.Event(), body.model)
    rooms = [room(engine, ids, max_tokens, param) for ids in prompts]
    told = prepared.echoes or body.return_token_ids or body.prompt_logprobs is not None
    echoed = sum(map(len, prompts)) if told else 0
    _check_size(engine, body, rooms, batch.n, echoed, param)
    shown = tags(prepared, engine.settings.reasoning_parser is not None)
    for ids, tokens in zip(prompts, rooms, strict=True):
        tokenizer = engine.tokenizer
        how = sampling(
            body, tokens, tokenizer.eos_ids, tokenizer.vocab_size, prepared.grammar,
            prepared.bad_words, tokenizer.checkpoint.defaults,
        )  # fmt: skip
        detokenizer = tokenizer.continuations(ids, body.skip_special_tokens, shown)
        await asyncio.sleep(0)  # a thousand prompts must not hold up the streams
        for choice in range(batch.n):
            # The first choice is that of a request for one; as in vLLM the others count on. What
            # is said of the prompt is the same for all.
            seeded = msgspec.structs.replace(
                how,
                seed=(how.seed + choice) & SEED_MASK,
                prompt_logprobs=None if choice else how.prompt_logprobs,
            )
            name = f"{batch.request_id}-{len(batch.generations)}"
            batch.generations.append(
                Generation(name, ids, seeded, detokenizer(), text, admission, batch.wake, media)
            )
    return batch


def _check_size(
    engine: AsyncEngine,
    body: CompletionRequest | ChatRequest,
    rooms: list[int],
    n: int,
    echoed: int,
    param: str,
) -> None:
    """Raise ApiError where the answer to all prompts, ``rooms`` tokens each, is too large.

    ``echoed`` is the tokens of all prompts where each choice repeats its own, as text or by number,
    else 0.
    """
    limit = engine.max_model_len
    if limit is None:
        return  # nothing is served before the first worker says its context
    logprobs = told_logprobs(body)
    if isinstance(body, ChatRequest):
        lower = "max_output_tokens" if param == "input" else "n, max_completion_tokens"
        fields = f"{lower} or top_logprobs"
    else:
        fields = "n, max_tokens, logprobs or the number of prompts"
    choices, tokens = n * len(rooms), n * sum(rooms)
    most = answer_sizes.largest(limit)
    scores = prompt_logprobs(body)
    answer_sizes.check(choices, tokens, logprobs, most, fields, n * echoed, scores)


def room(engine: AsyncEngine, ids: list[int], max_tokens: int | None, param: str) -> int:
    """Return the most tokens of output.

    ApiError where the prompt leaves less than was asked for.
    """
    if not ids:
        raise invalid(f"{param} has no token", param, "empty_prompt")
    check_ids(engine, ids, param)
    limit = engine.max_model_len
    if limit is None:
        # The first worker is still loading; it ends the text at the context's end.
        return 1 << 31 if max_tokens is None else max_tokens
    if len(ids) >= limit:
        raise too_long(f"a prompt of {len(ids)} tokens", limit, param)
    if max_tokens is not None and len(ids) + max_tokens > limit:
        raise too_long(f"{len(ids)} tokens of prompt and {max_tokens} of output", limit, param)
    return max_tokens or limit - len(ids)
