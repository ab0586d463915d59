"""The bodies that the serving API takes, decoded strictly.

An unknown field is an error, and so is a known one whose wish this engine would not fulfil.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from plimsoll_engine.api.errors import ApiError, invalid

Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
MinP = Annotated[float, msgspec.Meta(ge=0, le=1)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=1_000_000)]
MaxTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
MinTokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
# OpenAI's bounds of penalties, bias, n and top_logprobs; vLLM's of repetition_penalty, tightened.
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Repetition = Annotated[float, msgspec.Meta(ge=0.01, le=100)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
LogitBias = Annotated[dict[str, Bias], msgspec.Meta(max_length=1024)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
# OpenAI takes four; clients of other engines send more.
StopTexts = Annotated[list[StopText], msgspec.Meta(max_length=16)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
AdapterName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
# No path of Linux has it.
NO_NUL = r"^[^\x00]*$"
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
# What a client may count up: far above what agents with long histories send.
Part = Annotated[dict[str, Any], msgspec.Meta(max_length=64)]
Parts = Annotated[list[Part], msgspec.Meta(max_length=1024)]
ToolCalls = Annotated[list[Part], msgspec.Meta(max_length=128)]
TemplateVariables = Annotated[dict[str, Any], msgspec.Meta(max_length=64)]
# OpenAI's is 16 pairs.
Metadata = Annotated[dict[str, str], msgspec.Meta(max_length=64)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's ``stream_options``; with vLLM's second one, each chunk has the usage so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's field of this name. One of them is given."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], msgspec.Meta(min_length=1, max_length=4096)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both APIs.

    ``priority``, ``cache_salt``, ``prompt_logprobs`` and the ``return_`` ones are vLLM's,
    ``deadline_s`` is our own; the last group says nothing about the text and is let through.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: LogitBias | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=256)] | None = None
    ignore_eos: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    user: Name | None = None
    priority: Priority = 0
    cache_salt: Name | None = None
    deadline_s: Seconds | None = None

    metadata: Metadata | None = None


class CompletionRequest(_Common, kw_only=True):
    """The body of ``/v1/completions``.

    Unknown fields are refused, so that none is silently without effect.
    """

    # One text or list of token ids, or a list of them.
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: TopLogprobs | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation; ``content`` may hold images where the model sees."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    name: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None


Messages = Annotated[list[Message], msgspec.Meta(min_length=1, max_length=4096)]


class Function(msgspec.Struct, kw_only=True):
    """A function that the model may call; ``parameters`` is its JSON schema."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A[a-zA-Z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """OpenAI's wrapper of a function."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], msgspec.Meta(max_length=128)]


class FunctionName(msgspec.Struct, kw_only=True):
    """The function that ``tool_choice`` names."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """A ``tool_choice`` that forces one function."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(_Common, kw_only=True):
    """The body of ``/v1/chat/completions``; ``include_reasoning`` is vLLM's."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    include_reasoning: bool = True
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    service_tier: str | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's. A prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/detokenize``, as vLLM has it."""

    model: str | None = None
    tokens: list[TokenId]


class LoadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's. ``lora_path`` is a local folder."""

    lora_name: AdapterName
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096, pattern=NO_NUL)]


class UnloadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/v1/unload_lora_adapter``, as vLLM has it."""

    lora_name: AdapterName


_Body = TypeVar("_Body", bound=msgspec.Struct)
# A field's name may be empty: then what holds it is named. A key of a map is "at `key` in `$.map`".
_FIELD = re.compile(
    r"unknown field `([^`]+)`|missing required field `([^`]+)`|(?:at|in) `\$\.?([^`]+)`"
)


def decode(body: bytes | bytearray, kind: type[_Body]) -> _Body:
    """Return the request in ``body``.

    Raises ApiError 400 that names the field, or else the body.
    """
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        match = _FIELD.search(str(error))
        if match is None:
            raise invalid(f"the body: {error}") from None
        raise invalid(str(error), match[match.lastindex or 0]) from None
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: {error}", code="invalid_utf8") from None
    if isinstance(request, CompletionRequest | ChatRequest):
        check(request)
    return request


# Field, the values that ask for nothing.
_NEUTRAL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("best_of", (None, 1)),
    ("suffix", (None, "")),
)


def check(request: CompletionRequest | ChatRequest) -> None:
    """Raise ApiError for what the types cannot say."""
    for field, neutral in _NEUTRAL:
        if getattr(request, field, None) not in neutral:
            allowed = " or ".join(msgspec.json.encode(one).decode() for one in neutral[1:])
            raise ApiError(
                400,
                f"{field} is not supported by this engine: leave it out or give {allowed}",
                param=field,
                code="unsupported_value",
            )
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is for streams: set stream to true", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise invalid("prompt_logprobs is for answers in one piece: no stream", "prompt_logprobs")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs: set it to true", "top_logprobs")
    if isinstance(request, ChatRequest):
        _check_contents(request.messages)
        _check_tools(request)
    elif request.stream and request.echo and request.logprobs is not None:
        raise invalid("echo with logprobs is for answers in one piece: no stream", "echo")


def _check_contents(messages: list[Message]) -> None:
    """Raise ApiError for a message without content: an assistant may have called tools alone."""
    for number, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise invalid(
                f"content of a message of role {message.role} is null: give text",
                f"messages[{number}].content",
            )


def _check_tools(request: ChatRequest) -> None:
    names = [tool.function.name for tool in request.tools or []]
    for name in names:
        if names.count(name) > 1:
            raise invalid(f"two tools have the name {name!r}", "tools")
    choice = request.tool_choice
    if choice not in (None, "none") and not names:
        raise invalid("tool_choice needs tools", "tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid(f"no tool has the name {choice.function.name!r}", "tool_choice")


def text_content(message: Message) -> str:
    """Return a message's text; its parts in order where it has several.

    It is empty where the content is null: many templates would write the word None.
    """
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    texts: list[str] = []
    for part in message.content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(
                f"content of type {part.get('type')!r} is not supported: this engine reads text",
                "messages",
                "unsupported_value",
            )
        texts.append(part["text"])
    return "".join(texts)
