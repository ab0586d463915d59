"""The bodies that the serving API takes, decoded strictly: an unknown field is an error, and so is
a known one whose wish this engine would not fulfil."""

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
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
# OpenAI takes four; clients of other engines send more.
StopTexts = Annotated[list[StopText], msgspec.Meta(max_length=16)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]
Zero = Literal[0]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both APIs. Those typed with a single value are taken only as what they do nothing
    with; the last group says nothing about the text and is let through."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=256)] | None = None
    ignore_eos: bool = False

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None


class CompletionRequest(_Common, kw_only=True):
    # One text, one list of token ids, or a list with one of these.
    prompt: str | list[str | TokenId | list[TokenId]]
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None


class Message(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None


class ChatRequest(_Common, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    service_tier: str | None = None


_Body = TypeVar("_Body", CompletionRequest, ChatRequest)
_FIELD = re.compile(r"unknown field `([^`]*)`|missing required field `([^`]*)`|at `\$\.?([^`]*)`")


def decode(body: bytes, kind: type[_Body]) -> _Body:
    """The request in ``body``. Raises ApiError 400 that names the field."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        match = _FIELD.search(str(error))
        field = next((group for group in match.groups() if group), None) if match else None
        raise invalid(str(error), field) from None
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: {error}", code="invalid_utf8") from None
    _refuse_unsupported(request)
    return request


# Field, the values that ask for nothing.
_NEUTRAL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("n", (None, 1)),
    ("best_of", (None, 1)),
    ("presence_penalty", (None, 0)),
    ("frequency_penalty", (None, 0)),
    ("logit_bias", (None, {})),
    ("echo", (None, False)),
    ("suffix", (None, "")),
    ("logprobs", (None, False)),
    ("top_logprobs", (None, 0)),
    ("tools", (None, [])),
    ("tool_choice", (None, "none", "auto")),
    ("response_format", (None, {"type": "text"})),
)


def _refuse_unsupported(request: _Common) -> None:
    for field, neutral in _NEUTRAL:
        value = getattr(request, field, None)
        if not any(_same(value, one) for one in neutral):
            allowed = " or ".join(msgspec.json.encode(one).decode() for one in neutral[1:])
            raise ApiError(
                400,
                f"{field} is not supported by this engine: leave it out or give {allowed}",
                param=field,
                code="unsupported_value",
            )


def _same(value: Any, neutral: Any) -> bool:
    # In Python 0 == False, but `logprobs: 0` asks for the log probability of the sampled token.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def text_content(message: Message) -> str | None:
    """A message's text; its parts in order where it has several."""
    if message.content is None or isinstance(message.content, str):
        return message.content
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
