"""The OpenAI API, and the probes beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.requests import ClientDisconnect

from plimsoll_engine.api import adapters, build, protocol, tokens, transcription
from plimsoll_engine.api import body as bodies
from plimsoll_engine.api.answer import Answer, error_response
from plimsoll_engine.api.auth import TENANT
from plimsoll_engine.api.build import Asked
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.shapes import ChatChoice, Choice, CompletionChoice
from plimsoll_engine.api.tool_calls import ToolCallParser
from plimsoll_engine.frontend.engine import Engine
from plimsoll_engine.frontend.metrics import CONTENT_TYPE

MAX_BODY_BYTES = 32 << 20

_Body = TypeVar("_Body", bound=msgspec.Struct)


def app(engine: Engine) -> FastAPI:
    """The application of the serving port."""
    api = FastAPI(title="Plimsoll engine", docs_url=None, redoc_url=None, openapi_url=None)
    created = int(time.time())

    def card() -> dict[str, Any]:
        return {
            "id": engine.settings.served_model_name,
            "object": "model",
            "created": created,
            "owned_by": "plimsoll",
            "max_model_len": engine.max_model_len,
        }

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _decode(request, protocol.CompletionRequest)
        asked = await build.completion(engine, body, _tenant(request))
        text_of = engine.tokenizer.token_text
        choices = [CompletionChoice(i, text_of) for i in range(len(asked.generations))]
        return _answer(engine, asked, choices, body)

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await _decode(request, protocol.ChatRequest)
        asked = await build.chat(engine, body, _tenant(request))
        calls = bool(body.tools) and body.tool_choice != "none"
        text_of = engine.tokenizer.token_text
        choices = [
            ChatChoice(i, text_of, ToolCallParser() if calls else None)
            for i in range(len(asked.generations))
        ]
        return _answer(engine, asked, choices, body)

    @api.post("/v1/audio/transcriptions")
    async def transcriptions(request: Request) -> Response:
        return await transcription.answer(engine, request, _tenant(request))

    @api.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        return await tokens.tokenize(engine, await _decode(request, protocol.TokenizeRequest))

    @api.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        return tokens.detokenize(engine, await _decode(request, protocol.DetokenizeRequest))

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        base = card()
        loaded = [adapters.card(base, adapter) for adapter in engine.adapters.listed()]
        return {"object": "list", "data": [base, *loaded]}

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        adapter = build.check_model(engine, name)
        return card() if adapter is None else adapters.card(card(), adapter)

    if engine.settings.max_loras:

        @api.post("/v1/load_lora_adapter")
        async def load_adapter(request: Request) -> Response:
            body = await _decode(request, protocol.LoadAdapterRequest)
            return PlainTextResponse(await adapters.load(engine, body))

        @api.post("/v1/unload_lora_adapter")
        async def unload_adapter(request: Request) -> Response:
            body = await _decode(request, protocol.UnloadAdapterRequest)
            return PlainTextResponse(adapters.unload(engine, body))

    @api.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @api.get("/ready")
    async def ready() -> JSONResponse:
        state = str(engine.lifecycle.state)
        return JSONResponse({"state": state}, 200 if engine.lifecycle.ready else 503)

    @api.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.metrics.render(), media_type=CONTENT_TYPE)

    @api.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @api.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        message = "an error of the engine's own; its log says more"
        return error_response(ApiError(500, message, code="internal_error"))

    @api.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    @api.exception_handler(404)
    async def not_found(request: Request, error: Exception) -> Response:
        return error_response(ApiError(404, f"no such path: {request.url.path}", code="not_found"))

    @api.exception_handler(405)
    async def not_allowed(request: Request, error: Exception) -> Response:
        message = f"{request.method} is not a method of {request.url.path}"
        return error_response(ApiError(405, message, code="method_not_allowed"))

    return api


async def _decode(request: Request, kind: type[_Body]) -> _Body:
    try:
        raw = await bodies.read(request, MAX_BODY_BYTES)
    except bodies.TooLarge as error:
        raise ApiError(413, str(error), code="body_too_large") from None
    return protocol.decode(raw, kind)


def _tenant(request: Request) -> str:
    return str(request.scope.get(TENANT, ""))


def _answer(
    engine: Engine,
    asked: Asked,
    choices: Sequence[Choice],
    body: protocol.CompletionRequest | protocol.ChatRequest,
) -> Answer:
    options = body.stream_options
    usage = options is not None and options.include_usage
    return Answer(engine, asked, choices, stream=bool(body.stream), usage=usage)
