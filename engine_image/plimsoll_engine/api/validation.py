"""Decode request bodies, and refuse invalid ones with status 400.

The bounds of single fields are with their types in :mod:`plimsoll_engine.api.protocol`.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, TypeVar

import msgspec

from plimsoll_engine.api.errors import ApiError, make_invalid_error
from plimsoll_engine.api.protocol import (
    AllowedTools,
    AllowedToolsChoice,
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    Function,
    Message,
    NamedTool,
    Tool,
)

_Body = TypeVar("_Body", bound=msgspec.Struct)
# Match the field in msgspec's messages. For a map key ("at `key` in `$.map`"), match the map.
_FIELD_NAME_PATTERN = re.compile(r"(?:unknown|missing required) field `([^`]+)`")
_TOOL_TYPE_PATTERN = re.compile(r"(?:tools|tool_choice)\b.*\btype")
_FIELD_PATH_PATTERN = re.compile(r"(?:at|in) `\$\.?([^`]*)`")
_ESCAPE_PATTERN = re.compile(
    rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL
)


def decode_body(
    body: bytes | bytearray,
    body_type: type[_Body],
    strict: bool = False,
    warnings: list[str] | None = None,
) -> _Body:
    """Return the request in ``body``. A null field gets its default. Raises ApiError.

    Adds unknown fields to ``warnings``, or refuses them if ``strict`` is True.
    """
    encoding = json.detect_encoding(body)
    if encoding == "utf-8-sig":  # a reader may ignore the byte order mark (RFC 8259, section 8.1)
        body = body[3:]
    elif encoding != "utf-8":
        raise make_invalid_error(f"the body is {encoding}: send UTF-8", code="invalid_utf8")
    try:
        given = msgspec.json.decode(body, type=_RawFields)
        unknown = _remove_unknown_fields(given, body_type)
        request = msgspec.json.decode(msgspec.json.encode(given), type=body_type)
        for name in ("messages", "tools"):
            if name in given:
                _restore_extra_fields(getattr(request, name), msgspec.json.decode(given[name]))
    except msgspec.ValidationError as error:
        found = [
            match[1]
            for one in (_FIELD_PATH_PATTERN, _FIELD_NAME_PATTERN)
            if (match := one.search(str(error)))
        ]
        if not found:
            raise make_invalid_error(f"the body is invalid: {error}") from None
        place = ".".join(filter(None, found))
        raise make_invalid_error(
            f"{error}{_ONLY_FUNCTIONS_ADVICE if _TOOL_TYPE_PATTERN.fullmatch(place) else ''}", place
        ) from None
    except msgspec.DecodeError as error:
        # JavaScript and Python may escape half of a surrogate pair, which is not valid text.
        whole = _ESCAPE_PATTERN.sub(lambda found: rb"\ufffd" if found[1] else found[0], bytes(body))
        if whole != body:
            return decode_body(whole, body_type, strict, warnings)
        raise make_invalid_error(
            f"the body is not valid JSON: {error}", code="invalid_json"
        ) from None
    except RecursionError:
        raise make_invalid_error(
            "the body is nested too deeply: use fewer levels", code="invalid_json"
        ) from None
    except UnicodeDecodeError as error:
        raise make_invalid_error(f"the body is not UTF-8: {error}", code="invalid_utf8") from None
    report_unknown_fields(unknown, strict, warnings)
    if isinstance(request, CompletionRequest | ChatRequest | BatchChatRequest):
        check_values(request)
    return request


def report_unknown_fields(
    unknown_fields: list[str], strict: bool, warnings: list[str] | None
) -> None:
    """Add the names in ``unknown_fields`` to ``warnings``; raise ApiError if ``strict``."""
    if unknown_fields and strict:
        raise make_invalid_error(
            f"the body has the unknown field `{unknown_fields[0]}`",
            unknown_fields[0].rstrip(".") or None,
        )
    if unknown_fields and warnings is not None:
        named = ", ".join(
            one.encode("ascii", "replace").decode()[:64] for one in unknown_fields[:8]
        )
        warnings.append(f"unknown fields are ignored: {named}")


_RawFields = dict[str, msgspec.Raw]
_ONLY_FUNCTIONS_ADVICE = (
    ": only functions can be called; give a custom tool as a function of one string"
)
# Fields of other APIs that do not affect the text. They are ignored without a warning.
IGNORED_FIELDS = frozenset(
    {
        "client_metadata", "include_obfuscation", "prediction", "prompt_cache_key",
        "prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "store",
        "user", "verbosity",
    }
)  # fmt: skip
_REFUSED_FIELDS_BY_ADVICE = {
    "omit it": (
        "audio", "chat_template", "custom_logit_processor", "custom_params", "dry_multiplier",
        "dynatemp_range", "early_stopping", "ec_transfer_params", "enable_search",
        "guided_whitespace_pattern", "input_embeds", "kv_transfer_params", "logit_bias_type",
        "logits_processors", "max_dynamic_patch", "media_io_kwargs", "min_dynamic_patch",
        "mirostat", "mirostat_mode", "mm_payload", "mm_processor_kwargs", "num_beams", "options",
        "parse_tool_calls", "plugins", "prompt_embeds", "prompt_mode", "reasoning_format",
        "repetition_detection", "safe_prompt", "samplers", "separate_reasoning", "session_params",
        "stop_regex", "structural_tag", "tfs_z", "thinking_budget", "thinking_token_budget",
        "tool_prompt", "top_a", "top_n_sigma", "transforms", "typical_p", "vllm_xargs",
        "watermark", "watermarking", "web_search_options", "xtc_probability",
    ),
    "put it into chat_template_kwargs": ("enable_thinking",),
    "put its fields into the body": ("extra_body",),
    "send a message of role system": ("system",),
    "send a text as the prompt": ("input_ids",),
    "use an adapter's name as the model": ("lora_path",),
    "use include_stop_str_in_output": ("no_stop_trim",),
    "use max_tokens": ("max_new_tokens", "max_tokens_to_sample", "n_predict", "num_predict"),
    "use reasoning_effort": ("think", "thinking"),
    "use repetition_penalty": ("repeat_penalty",),
    "use response_format": ("format", "json_schema"),
    "use seed": ("random_seed",),
    "use stop": ("stop_sequences",),
    "use structured_outputs": (
        "ebnf", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
        "regex",
    ),
    "use temperature": ("do_sample",),
    "use tool_choice": ("function_call",),
    "use tools": ("functions",),
    "use top_logprobs": ("top_n_tokens",),
}  # fmt: skip
# Fields of other engines and of OpenAI that would change the answer, with advice for clients.
REFUSED_FIELDS = {
    name: advice for advice, names in _REFUSED_FIELDS_BY_ADVICE.items() for name in names
}
_FIELDS_OF_OTHER_PATHS_BY_ADVICE = {
    "use /v1/chat/completions": ("messages", "tools"),
    "use /v1/completions or /v1/chat/completions": (
        "allowed_token_ids", "bad_words", "best_of", "frequency_penalty", "logit_bias",
        "min_tokens", "n", "presence_penalty", "prompt", "stop_token_ids", "structured_outputs",
        "suffix",
    ),
    "use /v1/responses": (
        "background", "conversation", "input", "instructions", "max_tool_calls",
        "previous_response_id", "truncation",
    ),
    "use max_tokens, or max_output_tokens in /v1/responses": (
        "max_completion_tokens", "max_output_tokens", "max_tokens",
    ),
    "use reasoning_effort in a chat, or reasoning in /v1/responses": (
        "reasoning", "reasoning_effort",
    ),
    "use response_format, or text in /v1/responses": ("response_format", "text"),
}  # fmt: skip
# Fields that would change the answer of another generation path, with advice for clients.
FIELDS_OF_OTHER_PATHS = {
    name: advice for advice, names in _FIELDS_OF_OTHER_PATHS_BY_ADVICE.items() for name in names
}
# With these values, most refused fields have no effect.
_OFF_JSON_VALUES = (b"false", b"0", b"0.0", b'""', b"[]")
# With these values, the other refused fields have no effect.
_VALUES_WITHOUT_EFFECT = {
    **dict.fromkeys(("best_of", "n", "num_beams", "repeat_penalty"), (b"1", b"1.0")),
    **dict.fromkeys(("tfs_z", "typical_p"), (b"1", b"1.0")),
    **dict.fromkeys(("do_sample", "parse_tool_calls", "separate_reasoning"), (b"true",)),
    **dict.fromkeys(("enable_thinking", "think"), ()),
    "function_call": (b'"none"',),
}
# Some clients write whole numbers like this, as JSON allows.
_WHOLE_NUMBER_PATTERN = re.compile(rb"\s*(-?\d{1,20})\.0{1,20}\s*")
# Unknown fields in these objects are ignored as well.
OBJECTS_WITH_IGNORED_FIELDS = ("stream_options", "text", "reasoning")


def _remove_unknown_fields(
    raw_fields: dict[str, msgspec.Raw], struct_type: type[Any], name_prefix: str = ""
) -> list[str]:
    # Also removes null fields. Returns the names of the unknown ones.
    fields = _list_fields(struct_type)  # type: ignore[arg-type]
    unknown = []
    for name, value in list(raw_fields.items()):
        if bytes(memoryview(value)[:8]).strip() == b"null":
            del raw_fields[name]
        elif name not in fields:
            if name == "modalities" and b"audio" in bytes(value):
                raise _make_unsupported_error(name_prefix + name, "omit it")
            instead = REFUSED_FIELDS.get(name)
            if instead is None and "stream" in fields:
                instead = FIELDS_OF_OTHER_PATHS.get(name)
            if instead is not None and not name_prefix:
                if bytes(memoryview(value)[:8]).strip() not in _VALUES_WITHOUT_EFFECT.get(
                    name, _OFF_JSON_VALUES
                ):
                    raise _make_unsupported_error(name, instead)
            elif name not in IGNORED_FIELDS and name != "modalities":
                unknown.append(name_prefix + name)
            del raw_fields[name]
        elif (
            name in OBJECTS_WITH_IGNORED_FIELDS
            and (struct := _find_struct_type(fields[name].type)) is not None
        ):
            try:
                parts = msgspec.json.decode(value, type=_RawFields)
            except msgspec.ValidationError:
                continue  # not an object: decoding the request reports it
            unknown += _remove_unknown_fields(parts, struct, f"{name}.")
            raw_fields[name] = msgspec.Raw(msgspec.json.encode(parts))
        elif (whole := _WHOLE_NUMBER_PATTERN.fullmatch(memoryview(value))) is not None:
            raw_fields[name] = msgspec.Raw(whole[1])
    return unknown


def _make_unsupported_error(name: str, advice: str) -> ApiError:
    message = f"this path does not support the field {name}: {advice}"
    return ApiError(400, message, param=name, code="unsupported_value")


@cache
def _list_fields(struct_type: type[Any]) -> dict[str, Any]:
    # By JSON name. The result is cached, because msgspec takes 1 to 2 ms to evaluate the
    # annotations.
    return {field.encode_name: field for field in msgspec.structs.fields(struct_type)}


def _find_struct_type(annotation: Any) -> type[Any] | None:
    kinds = getattr(annotation, "__args__", ())
    return next((one for one in kinds if isinstance(one, type(msgspec.Struct))), None)


def _restore_extra_fields(decoded: Any, sent_fields: Any) -> None:
    # Decoding drops the fields that the types do not define, but a chat template may read them.
    if isinstance(decoded, list):
        for one, fields in zip(decoded, sent_fields, strict=True):
            _restore_extra_fields(one, fields)
    elif isinstance(decoded, Message | Tool | Function):
        known = decoded.__struct_encode_fields__
        decoded.extra = {
            name: None if name in known else value for name, value in sent_fields.items()
        }
        if isinstance(decoded, Tool):
            _restore_extra_fields(decoded.function, sent_fields["function"])


# Fields, and the values with which they have no effect.
_NEUTRAL_VALUES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("best_of", (None, 1)),
    ("suffix", (None, "")),
    ("use_beam_search", (None, False)),
    ("length_penalty", (None, 1.0)),
    ("spaces_between_special_tokens", (None, True)),
)
_NEUTRAL_VALUES_IN_BATCH: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("stream", (None, False)),
    ("n", (None, 1)),
    ("tools", (None, [])),
    ("tool_choice", (None, "none")),
    ("prompt_logprobs", (None,)),
    ("echo", (None, False)),
)


def check_values(request: CompletionRequest | ChatRequest | BatchChatRequest) -> None:
    """Raise ApiError for invalid values that the types cannot express."""
    batch = isinstance(request, BatchChatRequest)
    for field, neutral in _NEUTRAL_VALUES + (_NEUTRAL_VALUES_IN_BATCH if batch else ()):
        if field == "spaces_between_special_tokens" and request.skip_special_tokens:
            continue  # no special tokens, so no spaces between them
        if getattr(request, field, None) not in neutral:
            where = (
                "in a batch" if (field, neutral) in _NEUTRAL_VALUES_IN_BATCH else "by this engine"
            )
            named = [msgspec.json.encode(one).decode() for one in neutral[1:]]
            allowed = " or give ".join(["omit it", *named])
            raise ApiError(
                400,
                f"{field} is not supported {where}: {allowed}",
                param=field,
                code="unsupported_value",
            )
    if request.stream_options is not None and not request.stream:
        raise make_invalid_error(
            "stream_options requires stream: set stream to true", "stream_options"
        )
    if request.stream and request.prompt_logprobs is not None:
        raise make_invalid_error(
            "prompt_logprobs is not supported with stream: set stream to false", "prompt_logprobs"
        )
    if request.truncate_prompt_tokens == 0:
        raise make_invalid_error(
            "truncate_prompt_tokens is 0, which leaves no prompt: set it to 1 or more, or to "
            "-1 for the whole context",
            "truncate_prompt_tokens",
        )
    if request.truncation_side is not None and request.truncate_prompt_tokens is None:
        raise make_invalid_error(
            "truncation_side requires truncate_prompt_tokens: set both or none", "truncation_side"
        )
    if isinstance(request, CompletionRequest):
        _check_completion(request)
        return
    for field in ("top_logprobs", "logprob_token_ids"):
        if getattr(request, field) and not request.logprobs:
            raise make_invalid_error(f"{field} requires logprobs: set logprobs to true", field)
    check_turn_fields(request.add_generation_prompt, request.continue_final_message)
    if isinstance(request, BatchChatRequest):
        for number, conversation in enumerate(request.messages):
            _check_contents(conversation, f"messages[{number}]")
        return
    _check_contents(request.messages, "messages")
    _check_tools(request)
    if request.echo and request.messages[-1].role != "assistant":
        raise make_invalid_error(
            "echo requires that the last message has the role assistant: omit echo", "echo"
        )


def check_turn_fields(add_generation_prompt: bool | None, continue_final_message: bool) -> None:
    """Raise ApiError if both fields are True, because a new message cannot continue another."""
    if add_generation_prompt and continue_final_message:
        raise make_invalid_error(
            "continue_final_message and add_generation_prompt cannot be combined: set one to false",
            "continue_final_message",
        )


def _check_completion(request: CompletionRequest) -> None:
    if request.max_tokens == 0 and not request.echo:
        raise make_invalid_error(
            "max_tokens 0 requires echo: set max_tokens to 1 or more, or set echo", "max_tokens"
        )
    if request.logprob_token_ids and request.logprobs is None:
        raise make_invalid_error(
            "logprob_token_ids requires logprobs: set logprobs to a number", "logprob_token_ids"
        )
    if request.stream and request.echo and request.logprobs is not None:
        raise make_invalid_error(
            "echo with logprobs is not supported with stream: set stream to false", "echo"
        )


def _check_contents(messages: list[Message], param: str) -> None:
    # Some roles allow a message without content.
    for number, message in enumerate(messages):
        if message.content is None and message.role not in ("assistant", "tool", "function"):
            raise make_invalid_error(
                f"the content of a message of role {message.role} is null: send text",
                f"{param}[{number}].content",
            )


def _check_tools(request: ChatRequest) -> None:
    names = [tool.function.name for tool in request.tools or []]
    for name in names:
        if names.count(name) > 1:
            raise make_invalid_error(f"two tools have the name {name!r}: rename one", "tools")
    choice = request.tool_choice
    if choice not in (None, "none", "auto") and not names:
        raise make_invalid_error(
            "tool_choice requires tools: add them or omit tool_choice", "tool_choice"
        )
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise make_invalid_error(
            f"no tool has the name {choice.function.name!r}: use a name in tools", "tool_choice"
        )
    if isinstance(choice, AllowedToolsChoice):
        _check_allowed_tools(choice.allowed_tools, names)


def _check_allowed_tools(choice: AllowedTools, names: list[str]) -> None:
    field = "tool_choice.allowed_tools.tools"
    for number, tool in enumerate(choice.tools):
        if tool.function.name not in names:
            place = f"{field}[{number}].function.name"
            raise make_invalid_error(
                f"no tool has the name {tool.function.name!r}: use a name in tools", place
            )
    if choice.mode == "required" and not choice.tools:
        raise make_invalid_error(
            "mode 'required' requires at least one allowed tool: add one", field
        )
