"""From the bytes of a body to its struct; ApiError names the field that is wrong. Pure."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar

import msgspec

from plimsoll_engine.api.errors import ApiError, invalid
from plimsoll_engine.api.protocol import (
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    Function,
    Message,
    NamedTool,
    Tool,
)

_Body = TypeVar("_Body", bound=msgspec.Struct)
# A field's name may be empty: then what holds it is named. A key of a map is "at `key` in `$.map`".
_FIELD = re.compile(
    r"unknown field `([^`]+)`|missing required field `([^`]+)`|(?:at|in) `\$\.?([^`]+)`"
)


def decode(
    body: bytes | bytearray,
    kind: type[_Body],
    strict: bool = False,
    warnings: list[str] | None = None,
) -> _Body:
    """Return the request in ``body``; null stands for a field's default.

    A field that is not known is named in ``warnings``, or refused where ``strict``. Raises
    ApiError 400 that names the field, or else the body.
    """
    try:
        given = msgspec.json.decode(body, type=_FIELDS)
        unknown = _without_unknown(given, kind)
        request = msgspec.json.decode(msgspec.json.encode(given), type=kind)
        for name in ("messages", "tools"):
            if name in given:
                _keep_more(getattr(request, name), msgspec.json.decode(given[name]))
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
    if unknown and strict:
        raise invalid(f"the body: unknown field `{unknown[0]}`", unknown[0].rstrip(".") or None)
    if unknown and warnings is not None:
        named = ", ".join(one.encode("ascii", "replace").decode()[:64] for one in unknown[:8])
        warnings.append(f"unknown fields are without effect: {named}")
    if isinstance(request, CompletionRequest | ChatRequest | BatchChatRequest):
        check(request)
    return request


_FIELDS = dict[str, msgspec.Raw]
HARMLESS = frozenset(
    {
        "client_metadata", "include_obfuscation", "prediction", "prompt_cache_key",
        "prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "store",
        "user", "verbosity",
    }
)  # fmt: skip
"""Fields of clients that ask for nothing of the text: taken in silence."""
UNSUPPORTED = frozenset(
    {
        "audio", "chat_template", "dry_multiplier", "ebnf", "function_call", "functions", "grammar",
        "guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema",
        "kv_transfer_params", "logits_processors", "mirostat", "prompt_embeds", "regex",
        "structural_tag", "thinking", "thinking_token_budget", "top_a", "typical_p",
        "web_search_options",
    }
)  # fmt: skip
"""Fields of other engines, and of OpenAI, that would change the answer."""
LENIENT = ("stream_options", "text", "reasoning")
"""Fields that are objects, and in which unknown fields are of no weight either."""


def _without_unknown(given: dict[str, msgspec.Raw], kind: type[Any], inner: str = "") -> list[str]:
    """Take nulls and unknown fields out of ``given``, and return the names of the latter."""
    fields = _fields(kind)  # type: ignore[arg-type]
    unknown = []
    for name, value in list(given.items()):
        if bytes(memoryview(value)[:8]).strip() == b"null":
            del given[name]
        elif name not in fields:
            if name in UNSUPPORTED or (name == "modalities" and b"audio" in bytes(value)):
                message = f"{name} is not supported by this engine: leave it out"
                raise ApiError(400, message, param=inner + name, code="unsupported_value")
            if name not in HARMLESS and name != "modalities":
                unknown.append(inner + name)
            del given[name]
        elif name in LENIENT and (struct := _struct(fields[name].type)) is not None:
            try:
                parts = msgspec.json.decode(value, type=_FIELDS)
            except msgspec.ValidationError:
                continue  # it is no object: decoding the whole says so
            unknown += _without_unknown(parts, struct, f"{name}.")
            given[name] = msgspec.Raw(msgspec.json.encode(parts))
    return unknown


@cache
def _fields(kind: type[Any]) -> dict[str, Any]:
    """Return the fields of ``kind`` by their names in JSON.

    Once for all bodies: msgspec evaluates each annotation again, which takes a millisecond or two.
    """
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def _struct(annotation: Any) -> type[Any] | None:
    kinds = getattr(annotation, "__args__", ())
    return next((one for one in kinds if isinstance(one, type(msgspec.Struct))), None)


def _keep_more(found: Any, given: Any) -> None:
    """Give messages and tools the fields that only chat templates know, and the order of all."""
    if isinstance(found, list):
        for one, fields in zip(found, given, strict=True):
            _keep_more(one, fields)
    elif isinstance(found, Message | Tool | Function):
        known = found.__struct_encode_fields__
        found.more = {name: None if name in known else value for name, value in given.items()}
        if isinstance(found, Tool):
            _keep_more(found.function, given["function"])


# Field, the values that ask for nothing.
_NEUTRAL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("best_of", (None, 1)),
    ("suffix", (None, "")),
    ("use_beam_search", (None, False)),
    ("length_penalty", (None, 1.0)),
    ("spaces_between_special_tokens", (None, True)),
)
_NEUTRAL_IN_BATCH: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("stream", (None, False)),
    ("n", (None, 1)),
    ("tools", (None, [])),
    ("tool_choice", (None, "none")),
    ("prompt_logprobs", (None,)),
    ("echo", (None, False)),
)


def check(request: CompletionRequest | ChatRequest | BatchChatRequest) -> None:
    """Raise ApiError for what the types cannot say."""
    batch = isinstance(request, BatchChatRequest)
    for field, neutral in _NEUTRAL + (_NEUTRAL_IN_BATCH if batch else ()):
        if field == "spaces_between_special_tokens" and request.skip_special_tokens:
            continue  # there are none to be between
        if getattr(request, field, None) not in neutral:
            where = "in a batch" if (field, neutral) in _NEUTRAL_IN_BATCH else "by this engine"
            named = [msgspec.json.encode(one).decode() for one in neutral[1:]]
            allowed = " or give ".join(["leave it out", *named])
            raise ApiError(
                400,
                f"{field} is not supported {where}: {allowed}",
                param=field,
                code="unsupported_value",
            )
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is for streams: set stream to true", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise invalid("prompt_logprobs is for answers in one piece: no stream", "prompt_logprobs")
    if request.truncation_side is not None and request.truncate_prompt_tokens is None:
        raise invalid("truncation_side needs truncate_prompt_tokens", "truncation_side")
    if isinstance(request, CompletionRequest):
        _check_completion(request)
        return
    for field in ("top_logprobs", "logprob_token_ids"):
        if getattr(request, field) and not request.logprobs:
            raise invalid(f"{field} needs logprobs: set it to true", field)
    check_turn(request.add_generation_prompt, request.continue_final_message)
    if isinstance(request, BatchChatRequest):
        for number, conversation in enumerate(request.messages):
            _check_contents(conversation, f"messages[{number}]")
        return
    _check_contents(request.messages, "messages")
    _check_tools(request)
    if request.echo and request.messages[-1].role != "assistant":
        raise invalid("echo repeats the assistant's message, which must be the last one", "echo")


def check_turn(add_generation_prompt: bool | None, continue_final_message: bool) -> None:
    """Raise ApiError where the assistant is both to begin a message and to continue one."""
    if add_generation_prompt and continue_final_message:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other: set one to false",
            "continue_final_message",
        )


def _check_completion(request: CompletionRequest) -> None:
    if request.max_tokens == 0 and not request.echo:
        raise invalid("0 is for echo alone: give 1 or more, or set echo", "max_tokens")
    if request.logprob_token_ids and request.logprobs is None:
        raise invalid("logprob_token_ids needs logprobs: give a number", "logprob_token_ids")
    if request.stream and request.echo and request.logprobs is not None:
        raise invalid("echo with logprobs is for answers in one piece: no stream", "echo")


def _check_contents(messages: list[Message], param: str) -> None:
    """Raise ApiError for a message without content.

    An assistant may have called tools alone, and a tool may have nothing to say.
    """
    for number, message in enumerate(messages):
        if message.content is None and message.role not in ("assistant", "tool", "function"):
            raise invalid(
                f"content of a message of role {message.role} is null: give text",
                f"{param}[{number}].content",
            )


def _check_tools(request: ChatRequest) -> None:
    names = [tool.function.name for tool in request.tools or []]
    for name in names:
        if names.count(name) > 1:
            raise invalid(f"two tools have the name {name!r}", "tools")
    choice = request.tool_choice
    if choice not in (None, "none", "auto") and not names:
        raise invalid("tool_choice needs tools", "tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid(f"no tool has the name {choice.function.name!r}", "tool_choice")
