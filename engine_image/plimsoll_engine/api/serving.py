"""The OpenAI API, and the probes beside it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from plimsoll_api.version import version
from plimsoll_engine.api import (
    adapter_routes,
    batch,
    decoding,
    forced_calls,
    protocol,
    tokenizer_info,
    tool_families,
    transcription,
)
from plimsoll_engine.api.answer import Answer
from plimsoll_engine.api.auth import TENANT
from plimsoll_engine.api.batch import Batch
from plimsoll_engine.api.body import Body, BodyReader, BodyRefused
from plimsoll_engine.api.body_sizes import BodySizes
from plimsoll_engine.api.chat_choice import ChatChoice
from plimsoll_engine.api.error_response import error_response
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.logprobs import TokenText, token_id_text
from plimsoll_engine.api.prepare import PreparedBody, Text
from plimsoll_engine.api.preparer import Preparer
from plimsoll_engine.api.prompt_logprobs import PromptLogprobs
from plimsoll_engine.api.protocol import ChatRequest, CompletionRequest
from plimsoll_engine.api.reasoning import CLOSE, ReasoningParser
from plimsoll_engine.api.responses import Choice, CompletionChoice
from plimsoll_engine.api.responses_answer import ResponsesAnswer
from plimsoll_engine.api.responses_request import FIELDS
from plimsoll_engine.api.sampling_params import num_prompt_logprobs
from plimsoll_engine.api.tool_calls import ToolCallParser
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.observability.metrics import CONTENT_TYPE
from plimsoll_engine.http.budget import BodyBudget

SMALL_REQUEST_BYTES = 16 << 10
"""A body that names an adapter."""

_Body = TypeVar("_Body", bound=msgspec.Struct)


def app(
    engine: AsyncEngine,
    bodies: BodyReader,
    sizes: BodySizes,
    preparer: Preparer,
    answers: BodyBudget,
) -> FastAPI:
    """Return the application of the serving port.

    ``answers`` is for those that are written in one piece.
    """
    api = FastAPI(title="Plimsoll engine", docs_url=None, redoc_url=None, openapi_url=None)
    api.state.answers = answers
    _generation(api, engine, bodies, sizes, preparer)
    _text(api, engine, bodies, sizes, preparer)
    _models(api, engine)
    _pooling(api)
    if engine.settings.max_loras:
        _adapters(api, engine, bodies)
    _probes(api, engine)
    _errors(api)
    return api


def for_pages(inner: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return ``inner`` with the headers that let web pages of ``origins`` read what it answers."""
    if not origins:
        return inner
    return CORSMiddleware(
        inner, allow_origins=origins, allow_methods=["*"], allow_headers=["*"],
        expose_headers=["retry-after", "x-plimsoll-warning", "x-should-retry"],
    )  # fmt: skip


@asynccontextmanager
async def _read(
    bodies: BodyReader, request: Request, most: int, *, form: bool = False
) -> AsyncIterator[Body]:
    if not form:
        _check_type(request)
    try:
        async with bodies.read(request, most) as body:
            yield body
    except BodyRefused as error:
        retry = error.status in (429, 503)
        raise ApiError(error.status, str(error), code=error.code, retry=retry) from None


def _check_type(request: Request) -> None:
    """Raise ApiError 415 for a body that is not JSON by its type.

    A web page may send forms and plain text to any server without asking it first. curl and
    Python's urllib say that all they send is a form, so that type counts where no page sends it.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    page = "origin" in request.headers or "sec-fetch-site" in request.headers
    if kind in ("", "application/json") or kind.endswith("+json"):
        return
    if kind == "application/x-www-form-urlencoded" and not page:
        return
    raise ApiError(
        415, f"the body's type is {kind[:64]!r}: send content-type application/json",
        code="unsupported_media_type",
    )  # fmt: skip


def _generation(
    api: FastAPI, engine: AsyncEngine, bodies: BodyReader, sizes: BodySizes, preparer: Preparer
) -> None:
    """Add the paths that generate text."""

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        async with _read(bodies, request, sizes.text(engine.max_model_len)) as body:
            prepared = await preparer.completion(body)
        prepared.body.model = prepared.body.model or engine.settings.served_model_name
        made = await batch.completion_batch(engine, prepared, _tenant(request))
        text_of, ids = _token_text(engine, prepared.body), bool(prepared.body.return_token_ids)
        echoes = [echo for echo in prepared.echoes for _ in range(made.n)]
        echoes = echoes or [""] * len(made.generations)
        alone = prepared.body.max_tokens == 0
        choices = [
            CompletionChoice(
                i, text_of, echo, generation.prompt_ids if ids else None,
                _stop_ids(prepared.body), alone,
            )
            for i, (echo, generation) in enumerate(zip(echoes, made.generations, strict=True))
        ]  # fmt: skip
        answer = _answer(engine, made, choices, prepared.body)
        answer.echoes_alone = alone
        answer.warnings = prepared.warnings
        return answer

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        async with _read(bodies, request, sizes.chat(engine.max_model_len)) as body:
            prepared = await preparer.chat(body)
        return await _chats(engine, prepared, _tenant(request))

    @api.post("/v1/chat/completions/batch")
    async def chat_batch(request: Request) -> Response:
        async with _read(bodies, request, sizes.chat(engine.max_model_len)) as body:
            prepared = await preparer.chats(body)
        return await _chats(engine, prepared, _tenant(request))

    @api.post("/v1/responses")
    async def responses(request: Request) -> Response:
        async with _read(bodies, request, sizes.chat(engine.max_model_len)) as body:
            prepared = await preparer.responses(body)
        prepared.body.model = prepared.body.model or engine.settings.served_model_name
        try:
            made = await batch.chat_batch(engine, prepared, _tenant(request), "resp")
        except ApiError as error:
            error.param = FIELDS.get(error.param or "", error.param)
            raise
        stream = bool(prepared.body.stream)
        answer = ResponsesAnswer(
            engine, made, prepared.told, parser=_parser(engine, prepared), stream=stream,
            reasons=bool(prepared.reasons) and engine.settings.reasoning_parser is not None,
        )  # fmt: skip
        answer.warnings = prepared.warnings
        return answer

    @api.post("/v1/audio/transcriptions")
    async def transcriptions(request: Request) -> Response:
        async with _read(bodies, request, sizes.form, form=True) as body:
            kind = request.headers.get("content-type", "")
            form = await preparer.form(body, kind)
        return await transcription.answer(engine, form.file, form.fields, _tenant(request))


async def _chats(engine: AsyncEngine, prepared: PreparedBody[ChatRequest], tenant: str) -> Answer:
    """Return the answer to a chat, or to a batch of them with one choice each."""
    body = prepared.body
    body.model = body.model or engine.settings.served_model_name
    made = await batch.chat_batch(engine, prepared, tenant)
    text_of, ids = _token_text(engine, body), bool(body.return_token_ids)
    parses = engine.settings.reasoning_parser is not None
    choices = [
        ChatChoice(
            i, text_of, _parser(engine, prepared), ids,
            ReasoningParser() if parses and i // made.n in prepared.reasons else None,
            hidden=not body.include_reasoning,
            echo=prepared.echoes[i // made.n] if prepared.echoes else "",
            stop_ids=_stop_ids(body),
            bytes_of=None if text_of is token_id_text else engine.tokenizer.token_bytes,
        )
        for i in range(len(made.generations))
    ]  # fmt: skip
    answer = _answer(engine, made, choices, body)
    answer.warnings = prepared.warnings
    answer.prompt_ids = made.generations[0].prompt_ids if ids else None
    if parses and prepared.reasons:
        answer.reasoning_end = engine.tokenizer.token_id(CLOSE)
    return answer


def _parser(engine: AsyncEngine, prepared: PreparedBody[ChatRequest]) -> ToolCallParser | None:
    """Return a parser of the calls in one text; None where none are looked for."""
    if not prepared.family:
        return None
    parallel = prepared.body.parallel_tool_calls is not False
    if prepared.forced:
        template = engine.tokenizer.template_source(tools=True)
        return forced_calls.parser(
            prepared.family, template, prepared.forced, prepared.texts, parallel
        )
    return tool_families.parser(prepared.family, prepared.texts, parallel)


def _text(
    api: FastAPI, engine: AsyncEngine, bodies: BodyReader, sizes: BodySizes, preparer: Preparer
) -> None:
    """Add the paths between text and tokens, with vLLM's bodies."""

    def answered(text: Text) -> Response:
        if text.model is not None:
            batch.check_model(engine, text.model)
        answer = Response(text.answer, media_type="application/json")
        for warning in text.warnings:
            answer.headers.append("x-plimsoll-warning", warning)
        return answer

    @api.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        async with _read(bodies, request, sizes.chat(engine.max_model_len)) as body:
            return answered(await preparer.tokenize(body))

    if engine.settings.api.tokenizer_info:
        info = tokenizer_info.read_tokenizer_info(
            engine.settings.model, engine.tokenizer.chat_template
        )

        @api.api_route("/tokenizer_info", methods=["GET", "HEAD"])
        async def about_tokenizer() -> Response:
            return Response(info, media_type="application/json")

    @api.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        async with _read(bodies, request, sizes.text(engine.max_model_len)) as body:
            return answered(await preparer.detokenize(body))


def _models(api: FastAPI, engine: AsyncEngine) -> None:
    """Add the list of the model and its adapters."""
    created = int(time.time())

    def card() -> dict[str, Any]:
        return {
            "id": engine.settings.served_model_name,
            "object": "model",
            "created": created,
            "owned_by": "plimsoll",
            "root": engine.settings.served_model_name,
            "parent": None,
            "max_model_len": engine.max_model_len,
            "checkpoint": engine.tokenizer.checkpoint.summary(),
        }

    @api.api_route("/v1/models", methods=["GET", "HEAD"])
    async def models() -> dict[str, Any]:
        base = card()
        loaded = [adapter_routes.model_card(base, adapter) for adapter in engine.adapters.listed()]
        return {"object": "list", "data": [base, *loaded]}

    @api.api_route("/v1/models/{name:path}", methods=["GET", "HEAD"])
    async def model(name: str) -> dict[str, Any]:
        adapter = batch.check_model(engine, name)
        return card() if adapter is None else adapter_routes.model_card(card(), adapter)


def _adapters(api: FastAPI, engine: AsyncEngine, bodies: BodyReader) -> None:
    """Add the paths that load and unload adapters."""

    async def decode(request: Request, kind: type[_Body]) -> _Body:
        async with _read(bodies, request, SMALL_REQUEST_BYTES) as body:
            return decoding.decode(body.raw, kind)

    @api.post("/v1/load_lora_adapter")
    async def load_adapter(request: Request) -> Response:
        body = await decode(request, protocol.LoadAdapterRequest)
        return PlainTextResponse(await adapter_routes.load(engine, body))

    @api.post("/v1/unload_lora_adapter")
    async def unload_adapter(request: Request) -> Response:
        body = await decode(request, protocol.UnloadAdapterRequest)
        return PlainTextResponse(adapter_routes.unload(engine, body))


POOLING = (
    "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/pooling",
    "/classify",
)  # fmt: skip


def _pooling(api: FastAPI) -> None:
    """Say of the paths of pooling models that no model of this engine answers them."""

    async def unsupported(request: Request) -> Response:
        raise ApiError(
            404,
            f"{request.url.path} is for pooling models: this engine serves models that generate",
            param="model",
            code="unsupported_model",
        )

    for path in POOLING:
        api.add_api_route(path, unsupported, methods=["POST"])


def _probes(api: FastAPI, engine: AsyncEngine) -> None:
    """Add the paths for the kubelet and for Prometheus."""

    @api.api_route("/version", methods=["GET", "HEAD"])
    async def engine_version() -> dict[str, str]:
        return {"version": version()}

    @api.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        """Answer 503 until the first worker serves, and 200 whatever becomes of it later.

        So a client that waits for it waits for no kernel, and a liveness probe behind a startup
        probe ends no engine that restarts its worker or drains.
        """
        if engine.lifecycle.is_warming:
            return JSONResponse({"status": "warming", "doing": engine.stage}, 503)
        return JSONResponse({"status": "alive"})

    @api.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> JSONResponse:
        state = str(engine.lifecycle.state)
        return JSONResponse({"state": state}, 200 if engine.lifecycle.is_ready else 503)

    @api.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics() -> Response:
        return Response(engine.metrics.render(), media_type=CONTENT_TYPE)


def _errors(api: FastAPI) -> None:
    """Answer every failure with OpenAI's error object."""

    @api.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @api.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        message = "internal error; see the engine's log"
        return error_response(ApiError(500, message, code="internal_error"))

    @api.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    @api.exception_handler(404)
    async def not_found(request: Request, error: Exception) -> Response:
        return error_response(ApiError(404, f"no such path: {request.url.path}", code="not_found"))

    @api.exception_handler(405)
    async def not_allowed(request: Request, error: Exception) -> Response:
        allowed = getattr(error, "headers", None) or {}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=allowed)
        message = f"{request.method} is not allowed for {request.url.path}"
        response = error_response(ApiError(405, message, code="method_not_allowed"))
        response.headers.update(allowed)
        return response


def _token_text(engine: AsyncEngine, body: CompletionRequest | ChatRequest) -> TokenText:
    wanted = body.return_tokens_as_token_ids
    if wanted is None:
        wanted = engine.settings.api.return_tokens_as_token_ids
    return token_id_text if wanted else engine.tokenizer.token_text


def _stop_ids(body: CompletionRequest | ChatRequest) -> frozenset[int]:
    """Return the tokens that the client named as ends."""
    return frozenset(body.stop_token_ids or ())


def _tenant(request: Request) -> str:
    return str(request.scope.get(TENANT, ""))


def _answer(
    engine: AsyncEngine,
    batch: Batch,
    choices: Sequence[Choice],
    body: CompletionRequest | ChatRequest,
) -> Answer:
    options = body.stream_options
    forced = engine.settings.api.force_include_usage
    usage = forced or (options is not None and options.include_usage)
    answer = Answer(engine, batch, choices, stream=bool(body.stream), usage=usage)
    continuous = options is not None and options.continuous_usage_stats
    answer.continuous = forced or (usage and continuous)
    if num_prompt_logprobs(body) is not None:
        echoes = isinstance(body, CompletionRequest) and body.echo
        echo = body.logprobs if echoes else None
        answer.prompt_logprobs = PromptLogprobs(
            body.prompt_logprobs,
            echo,
            _token_text(engine, body),
            engine.tokenizer.continuations((), skip_special_tokens=False),
        )
    return answer
