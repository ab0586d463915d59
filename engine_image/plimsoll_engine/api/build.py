"""From a decoded body to a generation: prompt, tokens and sampling, each checked."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from plimsoll_engine.api.errors import ApiError, invalid
from plimsoll_engine.api.protocol import ChatRequest, CompletionRequest, text_content
from plimsoll_engine.frontend.engine import Engine
from plimsoll_engine.frontend.requests import Generation
from plimsoll_engine.frontend.tokenizer import TemplateError
from plimsoll_engine.ipc import Sampling

# OpenAI's default of /v1/completions.
COMPLETION_TOKENS = 16
# Tokenizing this many characters takes about a millisecond; more is done off the event loop.
INLINE_CHARACTERS = 4096
# No token of a real vocabulary stands for more characters on average; a text beyond this many for
# each token of the context is too long without tokenizing it.
CHARACTERS_PER_TOKEN = 64


async def completion(engine: Engine, body: CompletionRequest) -> Generation:
    """Raises ApiError."""
    _check_model(engine, body.model)
    prompt = _one_prompt(body.prompt)
    if not prompt:
        raise invalid("prompt is empty: give text or token ids", "prompt", "empty_prompt")
    if isinstance(prompt, str):
        ids = await _encode(engine, prompt, engine.tokenizer.encode, "prompt")
    else:
        largest = engine.tokenizer.vocab_size - 1
        if max(prompt) > largest:
            raise invalid(f"token {max(prompt)} does not exist: the largest is {largest}", "prompt")
        ids = prompt
    return _generation(engine, body, "cmpl", ids, body.max_tokens or COMPLETION_TOKENS)


async def chat(engine: Engine, body: ChatRequest) -> Generation:
    """Raises ApiError."""
    _check_model(engine, body.model)
    messages = [
        {"role": message.role, "content": text_content(message)}
        | ({"name": message.name} if message.name else {})
        for message in body.messages
    ]
    try:
        text = engine.tokenizer.render(messages)
    except TemplateError as error:
        raise invalid(str(error), "messages") from None
    ids = await _encode(engine, text, engine.tokenizer.encode_rendered, "messages")
    return _generation(engine, body, "chatcmpl", ids, body.max_completion_tokens or body.max_tokens)


def _check_model(engine: Engine, model: str) -> None:
    served = engine.settings.served_model_name
    if model != served:
        raise ApiError(
            404,
            f"the model {model!r} does not exist: this engine serves {served!r}",
            param="model",
            code="model_not_found",
        )


async def _encode(
    engine: Engine, text: str, encode: Callable[[str], list[int]], param: str
) -> list[int]:
    limit = engine.max_model_len
    if limit is not None and len(text) > limit * CHARACTERS_PER_TOKEN:
        raise _too_long(f"a prompt of {len(text)} characters", limit, param)
    try:
        if len(text) <= INLINE_CHARACTERS:
            return encode(text)
        return await asyncio.to_thread(encode, text)
    except (TypeError, UnicodeEncodeError):
        raise invalid(f"{param} holds what is no Unicode text", param) from None


def _one_prompt(prompt: str | list[str | int | list[int]]) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    ids = [token for token in prompt if isinstance(token, int)]
    if len(ids) == len(prompt):
        return ids
    if ids:
        raise invalid("prompt mixes token ids with prompts", "prompt")
    if len(prompt) > 1:
        raise invalid(
            f"{len(prompt)} prompts in one request are not supported: send one each",
            "prompt",
            "unsupported_value",
        )
    only = prompt[0]
    assert not isinstance(only, int)
    return only


def _generation(
    engine: Engine,
    body: CompletionRequest | ChatRequest,
    prefix: str,
    ids: list[int],
    max_tokens: int | None,
) -> Generation:
    param = "prompt" if prefix == "cmpl" else "messages"
    if not ids:
        raise invalid(f"{param} has no token", param, "empty_prompt")
    limit = engine.max_model_len
    if limit is not None:
        if len(ids) >= limit:
            raise _too_long(f"a prompt of {len(ids)} tokens", limit, param)
        if max_tokens is not None and len(ids) + max_tokens > limit:
            raise _too_long(f"{len(ids)} tokens of prompt and {max_tokens} of output", limit, param)
        max_tokens = max_tokens or limit - len(ids)
    if max_tokens is None:
        # The first worker is still loading; it ends the text at the context's end.
        max_tokens = 1 << 31
    stops = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
    stop_ids = list(body.stop_token_ids or [])
    if not body.ignore_eos:
        stop_ids += [eos for eos in engine.tokenizer.eos_ids if eos not in stop_ids]
    top_k = body.top_k or 0
    sampling = Sampling(
        max_tokens=max_tokens,
        # OpenAI's defaults of temperature and top_p are 1.
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, top_k),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=secrets.randbits(63) if body.seed is None else body.seed & ((1 << 63) - 1),
        stop_token_ids=stop_ids,
    )
    request_id = f"{prefix}-{secrets.token_hex(12)}"
    return Generation(request_id, ids, sampling, engine.tokenizer.decode, stops)


def _too_long(what: str, limit: int, param: str) -> ApiError:
    return invalid(
        f"{what} do not fit: this engine's context is {limit} tokens, prompt and output together",
        param,
        "context_length_exceeded",
    )
