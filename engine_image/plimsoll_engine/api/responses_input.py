"""Convert ``/v1/responses`` input to chat messages. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from plimsoll_engine.api.errors import invalid
from plimsoll_engine.api.protocol import TEXT_PARTS, Message

_PARTS = dict.fromkeys(TEXT_PARTS, "text") | {"input_image": "image_url"}
"""Type of a chat part for each part type of ``/v1/responses``."""
_CHAT_FIELDS = {"tool_calls": "function_call", "tool_call_id": "function_call_output"}
"""Fields of a chat's messages that would be lost here, and the items that replace them."""


def to_messages(instructions: str | None, given: str | list[dict[str, Any]]) -> list[Message]:
    """Return the messages of a conversation. Raises ApiError for an invalid item."""
    found: list[Message] = []
    if instructions is not None:
        found.append(Message(role="system", content=instructions))
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for number, item in enumerate(items):
        _append_item(found, item, f"input[{number}]")
    if not found:
        raise invalid("input has no message, tool call or tool output", "input")
    return found


def _append_item(messages: list[Message], item: dict[str, Any], field: str) -> None:
    """Append an item to ``messages``. A tool call joins the preceding assistant's message."""
    kind = item.get("type", "message")
    last = messages[-1] if messages else None
    if kind == "message":
        message = _make_message(item, field)
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
        name, output = item.get("call_id"), item.get("output")
        if not isinstance(name, str) or not isinstance(output, str | list):
            raise invalid("function_call_output requires call_id and output", field)
        content = output if isinstance(output, str) else _make_parts(output, field)
        messages.append(Message(role="tool", tool_call_id=name, content=content))
    elif kind == "reasoning":
        if text := _join_reasoning_text(item):
            if last is not None and _is_only_reasoning(last):
                text = f"{messages.pop().extra['reasoning_content']}\n{text}"
            extra = {"reasoning_content": text}
            messages.append(Message(role="assistant", extra=extra))
    else:
        raise invalid(
            f"items of type {str(kind)[:64]!r} are not supported: use message, reasoning,"
            " function_call or function_call_output",
            f"{field}.type",
            "unsupported_value",
        )


def _is_only_reasoning(message: Message) -> bool:
    return bool(message.extra) and message.content is None and not message.tool_calls


def _join_reasoning_text(item: dict[str, Any]) -> str:
    for name in ("content", "summary"):
        parts = item.get(name)
        parts = parts if isinstance(parts, list) else []
        texts = [one.get("text") for one in parts if isinstance(one, dict)]
        if found := "\n".join(text for text in texts if isinstance(text, str)):
            return found
    return ""


def _make_message(item: dict[str, Any], field: str) -> Message:
    content = item.get("content")
    for name, kind in _CHAT_FIELDS.items():
        if item.get(name):
            raise invalid(
                f"{name} is a field of chat completions: send an item of type {kind} instead",
                f"{field}.{name}",
                "unsupported_value",
            )
    if content is None and item.get("role") != "assistant":
        raise invalid("content is missing or null: send a text", f"{field}.content")
    try:
        return msgspec.convert(
            {
                "role": item.get("role"),
                "content": _make_parts(content, field) if isinstance(content, list) else content,
            },
            Message,
        )
    except msgspec.ValidationError as error:
        raise invalid(f"{field}: {error}", field) from None


def _make_call(item: dict[str, Any], field: str) -> dict[str, Any]:
    name, call, arguments = (item.get(key) for key in ("name", "call_id", "arguments"))
    if not (isinstance(name, str) and isinstance(call, str) and isinstance(arguments, str)):
        raise invalid("function_call requires name, call_id and arguments as strings", field)
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _make_parts(given: list[Any], field: str) -> list[dict[str, Any]]:
    found = []
    for one in given:
        part = one if isinstance(one, dict) else {}
        kind = _PARTS.get(str(part.get("type")))
        named = "refusal" if part.get("type") == "refusal" else "text"
        value = part.get("image_url" if kind == "image_url" else named) if kind else None
        if not isinstance(value, str):
            raise invalid(
                "content must be a string or a list of input_text, output_text and input_image"
                " parts, each with text or image_url",
                f"{field}.content",
                "unsupported_value",
            )
        assert kind is not None
        found.append({"type": kind, kind: {"url": value} if kind == "image_url" else value})
    return found
