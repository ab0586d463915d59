"""From a decoded body to its generations: prompts, tokens and sampling, each checked."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from plimsoll_engine.api import grammar, images
from plimsoll_engine.api.errors import ApiError, invalid
from plimsoll_engine.api.protocol import (
    ChatRequest,
    CompletionRequest,
    Message,
    TokenizeRequest,
    text_content,
)
from plimsoll_engine.api.sampling import SEED_MASK, sampling
from plimsoll_engine.frontend.adapters import Adapter
from plimsoll_engine.frontend.engine import Engine
from plimsoll_engine.frontend.requests import Admission, Generation
from plimsoll_engine.frontend.tokenizer import TemplateError
from plimsoll_engine.ipc import Media

# OpenAI's default of /v1/completions.
COMPLETION_TOKENS = 16
# Tokenizing this many characters takes about a millisecond; more is done off the event loop.
INLINE_CHARACTERS = 4096
# No token of a real vocabulary stands for more characters on average; a text beyond this many for
# each token of the context is too long without tokenizing it.
CHARACTERS_PER_TOKEN = 64


@dataclass(frozen=True, slots=True)
class Asked:
    """The generations of one body, prompt by prompt, ``n`` choices of each; they share ``wake``.
    ``model`` is the name that they were asked of."""

    request_id: str
    n: int
    generations: list[Generation]
    wake: asyncio.Event
    model: str


async def completion(engine: Engine, body: CompletionRequest, tenant: str = "") -> Asked:
    """Raises ApiError."""
    check_model(engine, body.model)
    prompts = _prompts(body.prompt)
    if len(prompts) * (body.n or 1) > engine.settings.max_queued:
        raise _too_many(engine, len(prompts) * (body.n or 1), "prompt")
    ids = []
    for prompt in prompts:
        if not prompt:
            raise invalid("prompt is empty: give text or token ids", "prompt", "empty_prompt")
        await asyncio.sleep(0)  # a thousand prompts must not hold up the streams
        if isinstance(prompt, str):
            ids.append(await encode(engine, prompt, engine.tokenizer.encode, "prompt"))
        else:
            check_ids(engine, prompt, "prompt")
            ids.append(prompt)
    return _asked(engine, body, "cmpl", ids, body.max_tokens or COMPLETION_TOKENS, tenant)


async def chat(engine: Engine, body: ChatRequest, tenant: str = "") -> Asked:
    """Raises ApiError."""
    check_model(engine, body.model)
    if (body.n or 1) > engine.settings.max_queued:
        raise _too_many(engine, body.n or 1, "n")
    ids = await chat_prompt(engine, body)
    media: list[Media] = []
    if (sees := engine.media.processors.image) is not None:
        urls = images.urls(body.messages)
        ids, media = await images.place(engine.media, sees, ids, urls)
    max_tokens = body.max_completion_tokens or body.max_tokens
    return _asked(engine, body, "chatcmpl", [ids], max_tokens, tenant, media)


async def chat_prompt(engine: Engine, body: ChatRequest | TokenizeRequest) -> list[int]:
    """The tokens of a chat, ready for the assistant's turn."""
    tools = body.tools or []
    if isinstance(body, ChatRequest) and body.tool_choice == "none":
        tools = []
    try:
        text = engine.tokenizer.render(
            [_plain(engine, message) for message in body.messages or []],
            [msgspec.to_builtins(tool) for tool in tools] or None,
            body.chat_template_kwargs or {},
        )
    except TemplateError as error:
        raise invalid(str(error), "messages") from None
    return await encode(engine, text, engine.tokenizer.encode_rendered, "messages")


def check_model(engine: Engine, model: str) -> Adapter | None:
    """The adapter of this name, None for the model itself; ApiError where it is neither."""
    served = engine.settings.served_model_name
    if model == served:
        return None
    if (adapter := engine.adapters.find(model)) is not None:
        return adapter
    raise ApiError(
        404,
        f"the model {model!r} does not exist: this engine serves {served!r}",
        param="model",
        code="model_not_found",
    )


def check_ids(engine: Engine, ids: list[int], param: str) -> None:
    """Raises ApiError for a token that the vocabulary lacks."""
    largest = engine.tokenizer.vocab_size - 1
    if ids and max(ids) > largest:
        raise invalid(f"token {max(ids)} does not exist: the largest is {largest}", param)


async def encode(
    engine: Engine, text: str, encoder: Callable[[str], list[int]], param: str
) -> list[int]:
    """Tokens of ``text``. Raises ApiError where it is no text, or too long whatever its tokens."""
    limit = engine.max_model_len
    if limit is not None and len(text) > limit * CHARACTERS_PER_TOKEN:
        raise _too_long(f"a prompt of {len(text)} characters", limit, param)
    try:
        if len(text) <= INLINE_CHARACTERS:
            return encoder(text)
        return await asyncio.to_thread(encoder, text)
    except (TypeError, UnicodeEncodeError):
        raise invalid(f"{param} holds what is no Unicode text", param) from None


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    ids = [token for token in prompt if isinstance(token, int)]
    if len(ids) == len(prompt):
        return [ids]
    if ids:
        raise invalid("prompt mixes token ids with prompts", "prompt")
    return [one for one in prompt if not isinstance(one, int)]


def _plain(engine: Engine, message: Message) -> dict[str, Any]:
    """A message as chat templates read it: those of models that see want parts."""
    sees = engine.media.processors.image is not None
    content = images.parts(message) if sees else text_content(message)
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.name:
        plain["name"] = message.name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("a tool call has no function with a name", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as our answers have it; templates write objects
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise invalid("the arguments of a tool call are not JSON", "messages") from None
    return call | {"function": function | {"arguments": arguments or {}}}


def _asked(
    engine: Engine,
    body: CompletionRequest | ChatRequest,
    prefix: str,
    prompts: list[list[int]],
    max_tokens: int | None,
    tenant: str,
    media: Sequence[Media] = (),
) -> Asked:
    param = "prompt" if prefix == "cmpl" else "messages"
    stops = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
    # A request is of its API key where several tell tenants apart, else of the user it names.
    admission = Admission(
        priority=body.priority,
        tenant=tenant or body.user or "",
        deadline_s=body.deadline_s,
        cache_salt=body.cache_salt or "",
        adapter=check_model(engine, body.model),  # again: it may be gone meanwhile
    )
    name = f"{prefix}-{secrets.token_hex(12)}"
    asked = Asked(name, body.n or 1, [], asyncio.Event(), body.model)
    must_match = grammar.of(body)
    for ids in prompts:
        tokens = room(engine, ids, max_tokens, param)
        tokenizer = engine.tokenizer
        how = sampling(body, tokens, tokenizer.eos_ids, tokenizer.vocab_size, must_match)
        for choice in range(asked.n):
            # The first choice is that of a request for one; as in vLLM the others count on.
            seeded = msgspec.structs.replace(how, seed=(how.seed + choice) & SEED_MASK)
            name = f"{asked.request_id}-{len(asked.generations)}"
            asked.generations.append(
                Generation(name, ids, seeded, tokenizer.decode, stops, admission, asked.wake, media)
            )
    return asked


def room(engine: Engine, ids: list[int], max_tokens: int | None, param: str) -> int:
    """The most tokens of output; ApiError where the prompt leaves less than was asked for."""
    if not ids:
        raise invalid(f"{param} has no token", param, "empty_prompt")
    check_ids(engine, ids, param)
    limit = engine.max_model_len
    if limit is None:
        # The first worker is still loading; it ends the text at the context's end.
        return 1 << 31 if max_tokens is None else max_tokens
    if len(ids) >= limit:
        raise _too_long(f"a prompt of {len(ids)} tokens", limit, param)
    if max_tokens is not None and len(ids) + max_tokens > limit:
        raise _too_long(f"{len(ids)} tokens of prompt and {max_tokens} of output", limit, param)
    return max_tokens or limit - len(ids)


def _too_long(what: str, limit: int, param: str) -> ApiError:
    return invalid(
        f"{what} do not fit: this engine's context is {limit} tokens, prompt and output together",
        param,
        "context_length_exceeded",
    )


def _too_many(engine: Engine, count: int, param: str) -> ApiError:
    return invalid(
        f"{count} choices in one request are more than this engine holds at once "
        f"({engine.settings.max_queued}, --max-queued): send fewer",
        param,
    )
