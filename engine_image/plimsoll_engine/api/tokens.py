"""``/tokenize`` and ``/detokenize``, with vLLM's bodies."""

from __future__ import annotations

from typing import Any

from plimsoll_engine.api.build import chat_prompt, check_ids, check_model, encode
from plimsoll_engine.api.errors import invalid
from plimsoll_engine.api.protocol import DetokenizeRequest, TokenizeRequest
from plimsoll_engine.frontend.engine import Engine


async def tokenize(engine: Engine, body: TokenizeRequest) -> dict[str, Any]:
    """Raises ApiError."""
    if body.model is not None:
        check_model(engine, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give a prompt or messages, one of both", "prompt")
    tokenizer = engine.tokenizer
    if body.prompt is None:
        ids = await chat_prompt(engine, body)
    else:
        encoder = tokenizer.encode if body.add_special_tokens else tokenizer.encode_rendered
        ids = await encode(engine, body.prompt, encoder, "prompt")
    return {
        "count": len(ids),
        "max_model_len": engine.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.token_text(i) for i in ids] if body.return_token_strs else None,
    }


def detokenize(engine: Engine, body: DetokenizeRequest) -> dict[str, Any]:
    """Raises ApiError."""
    if body.model is not None:
        check_model(engine, body.model)
    check_ids(engine, body.tokens, "tokens")
    return {"prompt": engine.tokenizer.decode(body.tokens)}
