"""Application of the serving port: OpenAI's API, probes and metrics."""

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

from plimsoll_api.version import get_version
from plimsoll_engine.api import (
    adapter_routes,
    batch,
    forced_calls,
    protocol,
    tokenizer_info,
    tool_families,
    transcription,
    validation,
)
from plimsoll_engine.api.answer import GenerationResponse, make_warning_headers
from plimsoll_engine.api.auth import TENANT_SCOPE_KEY
from plimsoll_engine.api.batch import Batch
from plimsoll_engine.api.body import Body, BodyReader, BodyRefusedError
from plimsoll_engine.api.body_sizes import BodySizes
from plimsoll_engine.api.chat_choice import ChatChoice
from plimsoll_engine.api.error_response import make_error_response
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.logprobs import TokenText, format_token_id
from plimsoll_engine.api.prepare import PreparedBody, TextResult
from plimsoll_engine.api.preparer import Preparer
from plimsoll_engine.api.prompt_logprobs import PromptLogprobs
from plimsoll_engine.api.protocol import ChatRequest, CompletionRequest
from plimsoll_engine.api.reasoning import CLOSE_TAG, ReasoningParser
from plimsoll_engine.api.response_bodies import Choice, CompletionChoice
from plimsoll_engine.api.responses_answer import ResponsesResponse
from plimsoll_engine.api.responses_request import rename_field
from plimsoll_engine.api.sampling_params import get_num_prompt_logprobs
from plimsoll_engine.api.tool_calls import ToolCallParser
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.observability.metrics import CONTENT_TYPE
from plimsoll_engine.http.budget import BodyBudget

# For bodies that load or unload an adapter.
MAX_ADAPTER_BODY_BYTES = 16 << 10

_Body = TypeVar("_Body", bound=msgspec.Struct)


def create_app(
    engine: AsyncEngine,
    bodies: BodyReader,
    sizes: BodySizes,
    preparer: Preparer,
    answer_budget: BodyBudget,
) -> FastAPI:
    """Return the application of the serving port.

    ``answer_budget`` limits the memory of responses that their clients have not read yet.
    """
    api = FastAPI(title="Plimsoll engine", docs_url=None, redoc_url=None, openapi_url=None)
    api.state.answers = answer_budget
    _add_generation_routes(api, engine, bodies, sizes, preparer)
    _add_tokenization_routes(api, engine, bodies, sizes, preparer)
    _add_model_routes(api, engine)
    _add_pooling_routes(api)
    if engine.settings.worker.max_loras:
        _add_adapter_routes(api, engine, bodies)
    _add_probe_routes(api, engine)
    _add_error_handlers(api)
    return api


def add_cors(inner: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return ``inner`` with CORS headers for web pages from ``origins``."""
    if not origins:
        return inner
    return CORSMiddleware(
        inner, allow_origins=origins, allow_methods=["*"], allow_headers=["*"],
        expose_headers=["retry-after", "x-plimsoll-warning", "x-should-retry"],
    )  # fmt: skip


@asynccontextmanager
async def _read_body(
    bodies: BodyReader, request: Request, max_bytes: int, *, is_form: bool = False
) -> AsyncIterator[Body]:
    if not is_form:
        _check_content_type(request)
    try:
        async with bodies.read(request, max_bytes) as body:
            yield body
    except BodyRefusedError as error:
        retry = error.status in (429, 503)
        raise ApiError(error.status, str(error), code=error.code, should_retry=retry) from None


def _check_content_type(request: Request) -> None:
    # This protects against CSRF: web pages may send forms and text to any server without a
    # preflight request. curl and urllib send JSON with the content type of a form by default, which
    # is accepted without the headers of a browser.
    coding = request.headers.get("content-encoding", "")
    if coding.strip().lower() not in ("", "identity"):
        raise ApiError(
            415, f"content-encoding {coding[:64]!r} is not supported: send the body as it is",
            code="unsupported_media_type",
        )  # fmt: skip
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    from_browser = "origin" in request.headers or "sec-fetch-site" in request.headers
    if kind in ("", "application/json") or kind.endswith("+json"):
        return
    if kind == "application/x-www-form-urlencoded" and not from_browser:
        return
    raise ApiError(
        415, f"content-type {kind[:64]!r} is not supported: send application/json",
        code="unsupported_media_type",
    )  # fmt: skip


def _add_generation_routes(
    api: FastAPI, engine: AsyncEngine, bodies: BodyReader, sizes: BodySizes, preparer: Preparer
) -> None:
    @api.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        async with _read_body(
            bodies, request, sizes.compute_text_limit(engine.max_model_len)
        ) as body:
            prepared = await preparer.prepare_completion(body)
        prepared.body.model = prepared.body.model or engine.settings.served_model_name
        request_batch = await batch.create_completion_batch(engine, prepared, _get_tenant(request))
        get_token_text, ids = (
            _choose_token_text(engine, prepared.body),
            bool(prepared.body.return_token_ids),
        )
        echoes = [echo for echo in prepared.echoes for _ in range(request_batch.n)]
        echoes = echoes or [""] * len(request_batch.generations)
        echo_only = prepared.body.max_tokens == 0
        choices = [
            CompletionChoice(
                i, get_token_text, echo, generation.prompt_ids if ids else None,
                _get_stop_ids(prepared.body), echo_only,
            )
            for i, (echo, generation) in enumerate(
                zip(echoes, request_batch.generations, strict=True)
            )
        ]  # fmt: skip
        answer = _build_response(engine, request_batch, choices, prepared.body)
        answer.echo_only = echo_only
        answer.warnings = prepared.warnings
        return answer

    @api.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        async with _read_body(
            bodies, request, sizes.compute_chat_limit(engine.max_model_len)
        ) as body:
            prepared = await preparer.prepare_chat(body)
        return await _respond_to_chats(engine, prepared, _get_tenant(request))

    @api.post("/v1/chat/completions/batch")
    async def create_chat_batch_response(request: Request) -> Response:
        async with _read_body(
            bodies, request, sizes.compute_chat_limit(engine.max_model_len)
        ) as body:
            prepared = await preparer.prepare_chats(body)
        return await _respond_to_chats(engine, prepared, _get_tenant(request))

    @api.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        async with _read_body(
            bodies, request, sizes.compute_chat_limit(engine.max_model_len)
        ) as body:
            prepared = await preparer.prepare_responses(body)
        prepared.body.model = prepared.body.model or engine.settings.served_model_name
        try:
            request_batch = await batch.create_chat_batch(
                engine, prepared, _get_tenant(request), "resp"
            )
        except ApiError as error:
            rename_field(error)
            raise
        stream = bool(prepared.body.stream)
        answer = ResponsesResponse(
            engine, request_batch, prepared.response_fields,
            parser=_create_tool_call_parser(engine, prepared), stream=stream,
            has_reasoning=(
                bool(prepared.reasoning_prompts) and engine.settings.reasoning_parser is not None
            ),
        )  # fmt: skip
        answer.warnings = prepared.warnings
        return answer

    @api.post("/v1/audio/transcriptions")
    async def create_transcription(request: Request) -> Response:
        async with _read_body(bodies, request, sizes.form_limit, is_form=True) as body:
            kind = request.headers.get("content-type", "")
            form = await preparer.parse_form(body, kind)
        return await transcription.transcribe(engine, form.file, form.fields, _get_tenant(request))


async def _respond_to_chats(
    engine: AsyncEngine, prepared: PreparedBody[ChatRequest], tenant: str
) -> GenerationResponse:
    body = prepared.body
    body.model = body.model or engine.settings.served_model_name
    request_batch = await batch.create_chat_batch(engine, prepared, tenant)
    get_token_text, ids = _choose_token_text(engine, body), bool(body.return_token_ids)
    parses = engine.settings.reasoning_parser is not None
    reasoning_prompts = prepared.reasoning_prompts if parses else []
    choices = [
        ChatChoice(
            i, get_token_text, _create_tool_call_parser(engine, prepared), ids,
            ReasoningParser() if i // request_batch.n in reasoning_prompts else None,
            hide_reasoning=not body.include_reasoning,
            echo=prepared.echoes[i // request_batch.n] if prepared.echoes else "",
            stop_ids=_get_stop_ids(body),
            get_token_bytes=(
                None if get_token_text is format_token_id else engine.tokenizer.decode_token_bytes
            ),
        )
        for i in range(len(request_batch.generations))
    ]  # fmt: skip
    answer = _build_response(engine, request_batch, choices, body)
    answer.warnings = prepared.warnings
    answer.prompt_ids = request_batch.generations[0].prompt_ids if ids else None
    if reasoning_prompts:
        answer.reasoning_end = engine.tokenizer.get_token_id(CLOSE_TAG)
    return answer


def _create_tool_call_parser(
    engine: AsyncEngine, prepared: PreparedBody[ChatRequest]
) -> ToolCallParser | None:
    if not prepared.family:
        return None
    parallel = prepared.body.parallel_tool_calls is not False
    if prepared.forced_tools:
        template = engine.tokenizer.get_template_source(has_tools=True)
        return forced_calls.create_forced_call_parser(
            prepared.family, template, prepared.forced_tools, prepared.string_arguments, parallel
        )
    return tool_families.create_parser(prepared.family, prepared.string_arguments, parallel)


def _add_tokenization_routes(
    api: FastAPI, engine: AsyncEngine, bodies: BodyReader, sizes: BodySizes, preparer: Preparer
) -> None:
    def make_text_response(result: TextResult) -> Response:
        if result.model is not None:
            batch.find_requested_adapter(engine, result.model)
        answer = Response(result.answer, media_type="application/json")
        answer.raw_headers += make_warning_headers(result.warnings)
        return answer

    @api.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        async with _read_body(
            bodies, request, sizes.compute_chat_limit(engine.max_model_len)
        ) as body:
            return make_text_response(await preparer.tokenize(body))

    if engine.settings.api.tokenizer_info:
        info = tokenizer_info.read_tokenizer_info(
            engine.settings.model, engine.tokenizer.chat_template
        )

        @api.api_route("/tokenizer_info", methods=["GET", "HEAD"])
        async def get_tokenizer_info() -> Response:
            return Response(info, media_type="application/json")

    @api.post("/detokenize")
    async def detokenize_tokens(request: Request) -> Response:
        async with _read_body(
            bodies, request, sizes.compute_text_limit(engine.max_model_len)
        ) as body:
            return make_text_response(await preparer.detokenize(body))


def _add_model_routes(api: FastAPI, engine: AsyncEngine) -> None:
    created = int(time.time())

    def make_model_card() -> dict[str, Any]:
        return {
            "id": engine.settings.served_model_name,
            "object": "model",
            "created": created,
            "owned_by": "plimsoll",
            "root": engine.settings.served_model_name,
            "parent": None,
            "max_model_len": engine.max_model_len,
            "checkpoint": engine.tokenizer.checkpoint.make_summary(),
        }

    @api.api_route("/v1/models", methods=["GET", "HEAD"])
    async def list_models() -> dict[str, Any]:
        base = make_model_card()
        loaded = [
            adapter_routes.make_model_card(base, adapter)
            for adapter in engine.adapters.list_visible()
        ]
        return {"object": "list", "data": [base, *loaded]}

    @api.api_route("/v1/models/{name:path}", methods=["GET", "HEAD"])
    async def get_model(name: str) -> dict[str, Any]:
        adapter = batch.find_requested_adapter(engine, name)
        return (
            make_model_card()
            if adapter is None
            else adapter_routes.make_model_card(make_model_card(), adapter)
        )


def _add_adapter_routes(api: FastAPI, engine: AsyncEngine, bodies: BodyReader) -> None:
    async def read_request(request: Request, body_type: type[_Body]) -> _Body:
        async with _read_body(bodies, request, MAX_ADAPTER_BODY_BYTES) as body:
            return validation.decode_body(body.raw, body_type)

    @api.post("/v1/load_lora_adapter")
    async def load_adapter(request: Request) -> Response:
        body = await read_request(request, protocol.LoadAdapterRequest)
        return PlainTextResponse(await adapter_routes.load_adapter(engine, body))

    @api.post("/v1/unload_lora_adapter")
    async def unload_adapter(request: Request) -> Response:
        body = await read_request(request, protocol.UnloadAdapterRequest)
        return PlainTextResponse(adapter_routes.unload_adapter(engine, body))


POOLING_PATHS = (
    "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/pooling",
    "/classify",
)  # fmt: skip


def _add_pooling_routes(api: FastAPI) -> None:
    # They answer status 404 to vLLM's paths of pooling models.
    async def refuse_pooling(request: Request) -> Response:
        raise ApiError(
            404,
            f"{request.url.path} requires a pooling model: this engine only generates text",
            param="model",
            code="unsupported_model",
        )

    for path in POOLING_PATHS:
        api.add_api_route(path, refuse_pooling, methods=["POST"])


def _add_probe_routes(api: FastAPI, engine: AsyncEngine) -> None:
    @api.api_route("/version", methods=["GET", "HEAD"])
    async def get_engine_version() -> dict[str, str]:
        return {"version": get_version()}

    @api.api_route("/health", methods=["GET", "HEAD"])
    async def check_health() -> JSONResponse:
        # Status 503 until the first worker serves, and 200 from then on, so that clients get a warm
        # engine. As a liveness probe after a startup probe, this path does not kill an engine that
        # restarts its worker or drains.
        if engine.lifecycle.is_warming:
            return JSONResponse({"status": "warming", "doing": engine.stage}, 503)
        return JSONResponse({"status": "alive"})

    @api.api_route("/ready", methods=["GET", "HEAD"])
    async def check_readiness() -> JSONResponse:
        state = str(engine.lifecycle.state)
        return JSONResponse({"state": state}, 200 if engine.lifecycle.is_ready else 503)

    @api.api_route("/metrics", methods=["GET", "HEAD"])
    async def render_metrics() -> Response:
        return Response(engine.metrics.render(), media_type=CONTENT_TYPE)


def _add_error_handlers(api: FastAPI) -> None:
    @api.exception_handler(ApiError)
    async def respond_to_api_error(request: Request, error: ApiError) -> Response:
        return make_error_response(error)

    @api.exception_handler(Exception)
    async def respond_to_bug(request: Request, error: Exception) -> Response:
        message = "internal error: see the engine's log"
        return make_error_response(ApiError(500, message, code="internal_error"))

    @api.exception_handler(ClientDisconnect)
    async def ignore_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # the client has disconnected

    @api.exception_handler(404)
    async def respond_not_found(request: Request, error: Exception) -> Response:
        return make_error_response(
            ApiError(404, f"the path {request.url.path} does not exist", code="not_found")
        )

    @api.exception_handler(405)
    async def respond_not_allowed(request: Request, error: Exception) -> Response:
        allowed = getattr(error, "headers", None) or {}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=allowed)
        message = f"the method {request.method} is not allowed for {request.url.path}"
        response = make_error_response(ApiError(405, message, code="method_not_allowed"))
        response.headers.update(allowed)
        return response


def _choose_token_text(engine: AsyncEngine, body: CompletionRequest | ChatRequest) -> TokenText:
    wanted = body.return_tokens_as_token_ids
    if wanted is None:
        wanted = engine.settings.api.return_tokens_as_token_ids
    return format_token_id if wanted else engine.tokenizer.decode_token


def _get_stop_ids(body: CompletionRequest | ChatRequest) -> frozenset[int]:
    return frozenset(body.stop_token_ids or ())


def _get_tenant(request: Request) -> str:
    return str(request.scope.get(TENANT_SCOPE_KEY, ""))


def _build_response(
    engine: AsyncEngine,
    batch: Batch,
    choices: Sequence[Choice],
    body: CompletionRequest | ChatRequest,
) -> GenerationResponse:
    options = body.stream_options
    forced = engine.settings.api.force_include_usage
    usage = forced or (options is not None and options.include_usage)
    answer = GenerationResponse(
        engine, batch, choices, stream=bool(body.stream), include_usage=usage
    )
    usage_in_chunks = options is not None and options.continuous_usage_stats
    answer.usage_in_chunks = forced or (usage and usage_in_chunks)
    if get_num_prompt_logprobs(body) is not None:
        echoes = isinstance(body, CompletionRequest) and body.echo
        echo = body.logprobs if echoes else None
        answer.prompt_logprobs = PromptLogprobs(
            body.prompt_logprobs,
            echo,
            _choose_token_text(engine, body),
            engine.tokenizer.create_detokenizer_factory((), skip_special_tokens=False),
        )
    return answer
