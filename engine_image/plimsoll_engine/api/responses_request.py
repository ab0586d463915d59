"""Request body of ``/v1/responses``, and its conversion to a chat.

The engine stores no earlier requests, so ``input`` must contain the whole conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from plimsoll_engine.api.errors import ApiError, make_invalid_error
from plimsoll_engine.api.protocol import (
    AllowedTools,
    AllowedToolsChoice,
    ChatRequest,
    Effort,
    Function,
    FunctionName,
    MaxTokens,
    Metadata,
    MinP,
    Name,
    NamedTool,
    Part,
    Priority,
    RepetitionPenalty,
    Salt,
    Seconds,
    Seed,
    StopText,
    StopTexts,
    Temperature,
    TemplateVariables,
    Tool,
    ToolChoice,
    TopK,
    TopLogprobs,
    TopP,
)
from plimsoll_engine.api.responses_input import convert_to_messages, list_unknown_fields
from plimsoll_engine.api.sampling_params import get_value_or_default
from plimsoll_engine.api.validation import check_values, report_unknown_fields

MAX_INPUT_ITEMS = 4096
INCLUDE_VALUE_FOR_LOGPROBS = "message.output_text.logprobs"
Tools = Annotated[list[Part], msgspec.Meta(max_length=128)]


class FunctionTool(msgspec.Struct, kw_only=True):
    """Function that the model may call. Unlike in a chat, there is no wrapper object."""

    type: Literal["function"]
    name: Annotated[str, msgspec.Meta(pattern=r"\A[a-zA-Z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """Value of ``tool_choice`` that forces one function."""

    name: str


class AllowedFunctions(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Value of ``tool_choice`` that restricts the tools of one request."""

    mode: Literal["auto", "required"]
    tools: Tools


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Format of the output. ``schema`` is set only for the type ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's ``text``. ``verbosity`` is ignored."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's ``reasoning``. The response has the whole reasoning instead of a summary."""

    effort: Effort | None = None
    summary: Name | None = None
    generate_summary: Name | None = None


Items = Annotated[list[Part], msgspec.Meta(min_length=1, max_length=MAX_INPUT_ITEMS)]
# Only the first value has an effect: the engine never produces the others.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
Include = Annotated[list[Included], msgspec.Meta(max_length=16)]


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/responses``.

    Fields of the third group must have a value without effect. The fields of the fourth group are
    vLLM's, except for ``deadline_s``.
    """

    model: str | None = None
    input: str | Items
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: TopLogprobs | None = None
    include: Include | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = (
        None
    )
    parallel_tool_calls: bool | None = None

    metadata: Metadata | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    service_tier: str | None = None

    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    store: bool | None = None
    truncation: str | None = None

    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: StopText | StopTexts | None = None
    ignore_eos: bool = False
    chat_template_kwargs: TemplateVariables | None = None
    priority: Priority = 0
    cache_salt: Salt | None = None
    deadline_s: Seconds | None = None


# Fields, and the values with which they have no effect.
_NEUTRAL_VALUES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("background", (None, False)),
    ("conversation", (None,)),
    ("max_tool_calls", (None,)),
    ("previous_response_id", (None,)),
    ("prompt", (None,)),
    ("store", (None, False)),
    ("truncation", (None, "disabled")),
)


def convert_to_chat(
    body: ResponsesRequest,
    strict: bool = False,
    warnings: list[str] | None = None,
    origins: dict[str, str] | None = None,
) -> ChatRequest:
    """Return the equivalent chat request. Raises ApiError for an unsupported field.

    Adds unknown fields to ``warnings``, or refuses them if ``strict``. Adds the origin of each
    message to ``origins``, for :func:`rename_field`.
    """
    for field, neutral in _NEUTRAL_VALUES:
        if getattr(body, field) not in neutral:
            raise ApiError(
                400,
                f"{field} is not supported with this value, because the engine stores no responses"
                f" and runs no tools: omit {field}",
                param=field,
                code="unsupported_value",
            )
    wants_logprobs = INCLUDE_VALUE_FOR_LOGPROBS in (body.include or ())
    if body.top_logprobs is not None and not wants_logprobs:
        raise make_invalid_error(
            f"top_logprobs requires include: [{INCLUDE_VALUE_FOR_LOGPROBS!r}]", "top_logprobs"
        )
    unknown: list[str] = []
    chat = ChatRequest(
        model=body.model or "",
        messages=convert_to_messages(
            body.instructions, body.input, unknown, {} if origins is None else origins
        ),
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        repetition_penalty=body.repetition_penalty,
        stop=body.stop,
        ignore_eos=body.ignore_eos,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
        logprobs=wants_logprobs or None,
        top_logprobs=body.top_logprobs,
        stream=body.stream,
        response_format=_make_response_format(body.text),
        tools=[
            _convert_tool(tool, f"tools[{number}]", unknown)
            for number, tool in enumerate(body.tools or [])
        ]
        or None,
        tool_choice=_convert_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        user=body.user,
        priority=body.priority,
        cache_salt=body.cache_salt,
        deadline_s=body.deadline_s,
    )
    check_values(chat)
    report_unknown_fields(unknown, strict, warnings)
    return chat


_ECHOED_FIELDS = ("instructions", "max_output_tokens", "metadata", "tools", "user")


def get_echoed_fields(body: ResponsesRequest, defaults: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of ``body`` that a response repeats, by name.

    ``defaults`` are the checkpoint's values for missing fields.
    """
    fields = {name: msgspec.to_builtins(getattr(body, name)) for name in _ECHOED_FIELDS}
    return fields | {
        "tools": fields["tools"] or [],
        "tool_choice": msgspec.to_builtins(body.tool_choice) or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": get_value_or_default(body.temperature, defaults, "temperature", 1.0),
        "top_p": get_value_or_default(body.top_p, defaults, "top_p", 1.0),
        "text": {"format": _make_echoed_format(body.text)},
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "service_tier": "default",
    }


# Fields whose names differ, for error messages.
RESPONSES_FIELD_BY_CHAT_FIELD = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "tool_choice.allowed_tools.tools": "tool_choice.tools",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.schema": "text.format.schema",
}


def rename_field(error: ApiError, origins: Mapping[str, str] = MappingProxyType({})) -> None:
    """Replace the chat field that ``error`` names by the field of ``/v1/responses``.

    ``origins`` has the origin of each message.
    """
    if error.param is None:
        return
    field = error.param.replace(".function.", ".")
    name = RESPONSES_FIELD_BY_CHAT_FIELD.get(
        field.partition("[")[0]
    ) or RESPONSES_FIELD_BY_CHAT_FIELD.get(field, field)
    for place in sorted(origins, key=len, reverse=True):
        if field == place or field.startswith((f"{place}.", f"{place}[")):
            name = origins[place] + field.removeprefix(place)
            break
    message = str(error)
    if message.startswith(f"{error.param}: "):
        error.args = (name + message.removeprefix(error.param),)
    error.param = name


def _make_echoed_format(text: TextOptions | None) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins((text and text.format) or TextFormat())
    return {name: value for name, value in found.items() if value is not None}


def _make_response_format(text: TextOptions | None) -> dict[str, Any] | None:
    text_format = text.format if text is not None else None
    if text_format is None:
        return None
    if text_format.type == "json_schema":
        return {"type": text_format.type, "json_schema": {"schema": text_format.schema}}
    if text_format.type == "json_object" and text_format.schema is not None:
        return {"type": text_format.type, "schema": text_format.schema}
    return {"type": text_format.type}


def drop_hosted_tools(body: ResponsesRequest, may_drop: bool, warnings: list[str]) -> None:
    """Remove the tools that only OpenAI runs, and add a warning.

    Raises ApiError for such a tool if ``may_drop`` is False.
    """
    tools = body.tools or []
    hosted = [str(tool.get("type"))[:64] for tool in tools if not _is_function(tool)]
    if not hosted:
        return
    named = ", ".join(repr(one) for one in hosted)
    if not may_drop:
        raise ApiError(
            400,
            f"tools of type {named} are not supported: use only functions, or start the engine"
            " with --skip-hosted-tools",
            param=f"tools[{next(n for n, one in enumerate(tools) if not _is_function(one))}].type",
            code="unsupported_value",
        )
    body.tools = [tool for tool in tools if _is_function(tool)]
    choice = body.tool_choice
    if isinstance(choice, AllowedFunctions):
        choice.tools = [tool for tool in choice.tools if _is_function(tool)]
        if not choice.tools:
            body.tool_choice = "none"
    if not body.tools:
        body.tools, body.tool_choice = None, None
    warnings.append(ascii(f"tools of these types are ignored: {', '.join(hosted)}")[1:-1])


def _is_function(tool: dict[str, Any]) -> bool:
    return tool.get("type") == "function"


def _convert_tool_choice(body: ResponsesRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        return NamedTool(function=FunctionName(name=choice.name))
    if not isinstance(choice, AllowedFunctions):
        return choice
    allowed = []
    for number, tool in enumerate(choice.tools):
        if not (_is_function(tool) and isinstance(tool.get("name"), str)):
            raise make_invalid_error(
                "an allowed tool must have the type function and a name: add them",
                f"tool_choice.tools[{number}]",
            )
        allowed.append(NamedTool(function=FunctionName(name=tool["name"])))
    return AllowedToolsChoice(allowed_tools=AllowedTools(mode=choice.mode, tools=allowed))


def _convert_tool(tool: dict[str, Any], field: str, unknown_fields: list[str]) -> Tool:
    if "name" not in tool and isinstance(tool.get("function"), dict):
        raise make_invalid_error(
            "tools of /v1/responses have no function object: move its fields into the tool",
            f"{field}.function",
        )
    try:
        converted = msgspec.convert(
            {name: value for name, value in tool.items() if value is not None}, FunctionTool
        )
    except msgspec.ValidationError as error:
        raise make_invalid_error(f"{field}: {error}", field) from None
    unknown_fields += list_unknown_fields(tool, FunctionTool.__struct_fields__, field)
    function = Function(
        name=converted.name,
        description=converted.description,
        parameters=converted.parameters,
        strict=converted.strict,
    )
    return Tool(type="function", function=function)
