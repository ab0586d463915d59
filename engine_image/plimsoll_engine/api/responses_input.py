"""Convert ``/v1/responses`` input to chat messages."""

from __future__ import annotations

from typing import Any

import msgspec

from plimsoll_engine.api.errors import ApiError, make_invalid_error
from plimsoll_engine.api.protocol import TEXT_PARTS, Message

# Type of the chat part for each part type of /v1/responses.
_CHAT_PART_TYPES = dict.fromkeys(TEXT_PARTS, "text") | {"input_image": "image_url"}
# Fields of each item type, in addition to _COMMON_FIELDS.
_FIELDS_BY_ITEM_TYPE = {
    "message": ("role", "content", "phase"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("summary", "content"),
}
_COMMON_FIELDS = ("type", "id", "status")
_PART_FIELDS = ("type", "text", "refusal", "image_url", "annotations", "logprobs")
_CALL_ITEM, _OUTPUT_ITEM = "an item of type function_call", "an item of type function_call_output"
_REASONING_ITEM = "an item of type reasoning"
# Fields of chat messages that this conversion would lose, with their replacements.
_REPLACEMENTS_OF_CHAT_FIELDS = {
    "tool_calls": _CALL_ITEM,
    "function_call": _CALL_ITEM,
    "tool_call_id": _OUTPUT_ITEM,
    "reasoning": _REASONING_ITEM,
    "reasoning_content": _REASONING_ITEM,
    "refusal": "a part of type refusal in content",
}


def convert_to_messages(
    instructions: str | None,
    text_or_items: str | list[dict[str, Any]],
    unknown_fields: list[str],
    origins: dict[str, str],
) -> list[Message]:
    """Return the messages of a conversation. Raises ApiError for an invalid item.

    Adds ignored fields to ``unknown_fields``, and the input field of each message to ``origins``.
    """
    found: list[Message] = []
    if instructions is not None:
        found.append(Message(role="system", content=instructions))
        origins["messages[0]"] = origins["messages[0].content"] = "instructions"
    items = (
        [{"role": "user", "content": text_or_items}]
        if isinstance(text_or_items, str)
        else text_or_items
    )
    for number, item in enumerate(items):
        field = f"input[{number}]"
        _append_item(found, item, field, unknown_fields)
        if isinstance(text_or_items, list) and found:
            _add_origin(origins, item.get("type"), f"messages[{len(found) - 1}]", found[-1], field)
    if not found:
        raise make_invalid_error(
            "input has no message, tool call or tool output: send at least one", "input"
        )
    return found


def _add_origin(
    origins: dict[str, str], kind: str | None, name: str, message: Message, field: str
) -> None:
    # ``name`` is that of the message, and ``kind`` is the type of the item in ``field``.
    match kind:
        case "function_call":
            origins.setdefault(name, field)
            origins[f"{name}.tool_calls[{len(message.tool_calls or []) - 1}]"] = field
        case "function_call_output":
            origins[name], origins[f"{name}.content"] = field, f"{field}.output"
        case "reasoning":
            origins.setdefault(name, field)
        case _:
            origins[name] = field


def list_unknown_fields(
    fields: dict[str, Any], known_names: tuple[str, ...], object_name: str
) -> list[str]:
    """Return the names of the ``fields`` that are neither known nor null, after ``object_name``."""
    return [
        f"{object_name}.{name}"
        for name in fields
        if name not in known_names and fields[name] is not None
    ]


def _append_item(
    messages: list[Message], item: dict[str, Any], field: str, unknown_fields: list[str]
) -> None:
    # A tool call is appended to the preceding assistant message.
    kind = "message" if item.get("type") is None else item["type"]
    last = messages[-1] if messages else None
    if kind == "message":
        message = _make_message(item, field, unknown_fields)
        if (
            last is not None
            and message.role == last.role == "assistant"
            and _is_only_reasoning(last)
        ):
            last.content = message.content
        else:
            messages.append(message)
    elif kind == "function_call":
        call = _make_call(item, field)
        if last is not None and last.role == "assistant":
            last.tool_calls = [*(last.tool_calls or []), call]
        else:
            messages.append(Message(role="assistant", tool_calls=[call]))
    elif kind == "function_call_output":
        name = _get_text(item, "call_id", field)
        content = _make_content(item.get("output"), f"{field}.output", unknown_fields)
        messages.append(Message(role="tool", tool_call_id=name, content=content))
    elif kind == "reasoning":
        if text := _join_reasoning_text(item, field):
            if last is not None and _is_only_reasoning(last):
                text = f"{messages.pop().extra['reasoning_content']}\n{text}"
            extra = {"reasoning_content": text}
            messages.append(Message(role="assistant", extra=extra))
    else:
        raise _make_unsupported_error(
            f"items of type {str(kind)[:64]!r} are not supported: use message, reasoning,"
            " function_call or function_call_output",
            f"{field}.type",
        )
    unknown_fields += list_unknown_fields(item, _COMMON_FIELDS + _FIELDS_BY_ITEM_TYPE[kind], field)


def _is_only_reasoning(message: Message) -> bool:
    return bool(message.extra) and message.content is None and not message.tool_calls


def _join_reasoning_text(item: dict[str, Any], field: str) -> str:
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise make_invalid_error(
                f"{name} is not a list: send a list of parts", f"{field}.{name}"
            )
        texts = [one.get("text") for one in parts if isinstance(one, dict)]
        if found := "\n".join(text for text in texts if isinstance(text, str)):
            return found
    return ""


def _make_message(item: dict[str, Any], field: str, unknown_fields: list[str]) -> Message:
    for name, instead in _REPLACEMENTS_OF_CHAT_FIELDS.items():
        if item.get(name):
            raise _make_unsupported_error(
                f"{name} is a field of chat completions: send {instead} instead", f"{field}.{name}"
            )
    role = _get_text(item, "role", field)
    if role in ("tool", "function"):
        raise _make_unsupported_error(
            f"messages of role {role} belong to chat completions: send {_OUTPUT_ITEM} instead",
            f"{field}.role",
        )
    content = _make_content(item.get("content"), f"{field}.content", unknown_fields)
    try:
        return msgspec.convert({"role": role, "content": content}, Message)
    except msgspec.ValidationError as error:
        raise make_invalid_error(f"{field}: {error}", field) from None


def _make_call(item: dict[str, Any], field: str) -> dict[str, Any]:
    call, name, arguments = (
        _get_text(item, key, field) for key in _FIELDS_BY_ITEM_TYPE["function_call"]
    )
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _get_text(fields: dict[str, Any], name: str, object_name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        problem = "is missing or null" if value is None else "is not a string"
        raise make_invalid_error(f"{name} {problem}: send a string", f"{object_name}.{name}")
    return value


def _make_content(value: Any, field: str, unknown_fields: list[str]) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        problem = "is missing or null" if value is None else "has the wrong type"
        raise make_invalid_error(f"{field} {problem}: send a string or a list of parts", field)
    return [
        _make_part(part, f"{field}[{number}]", unknown_fields) for number, part in enumerate(value)
    ]


def _make_part(part: Any, field: str, unknown_fields: list[str]) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise make_invalid_error(f"{field} is not an object: send a part with a type", field)
    given = part.get("type")
    kind = _CHAT_PART_TYPES.get(given) if isinstance(given, str) else None
    if kind is None:
        raise _make_unsupported_error(
            f"parts of type {str(given)[:64]!r} are not supported: use input_text, output_text,"
            " refusal or input_image",
            f"{field}.type",
        )
    known = _PART_FIELDS + (("detail",) if part.get("detail") == "auto" else ())
    unknown_fields += list_unknown_fields(part, known, field)
    if kind == "image_url":
        return {"type": kind, kind: {"url": _get_text(part, "image_url", field)}}
    return {"type": kind, kind: _get_text(part, "refusal" if given == "refusal" else "text", field)}


def _make_unsupported_error(message: str, field: str) -> ApiError:
    return make_invalid_error(message, field, "unsupported_value")
