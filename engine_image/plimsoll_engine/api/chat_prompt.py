"""A conversation as its chat template writes it. Pure."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from plimsoll_engine.api import chat_images
from plimsoll_engine.api.errors import invalid
from plimsoll_engine.api.protocol import Message, Tool, text_content
from plimsoll_engine.frontend.requests.tokenizer import TemplateError, Tokenizer

MARK = "\ue000\uf8ff\ue000"
"""Added to the message that the model is to continue: the prompt ends where it is."""


class ChatPrompt:
    """Writes conversations for one checkpoint; ``sees``: its template takes images."""

    def __init__(self, tokenizer: Tokenizer, sees: bool) -> None:
        self._tokenizer = tokenizer
        self._sees = sees

    @staticmethod
    def variables(given: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
        """Return the template's own variables: those ``given``, and vLLM's for an effort.

        An effort other than ``none`` asks for thinking, where a template has the choice.
        """
        if effort is None:
            return dict(given or {})
        thinking = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return thinking | (given or {})

    def render(
        self,
        messages: list[Message],
        tools: list[Tool],
        variables: dict[str, Any],
        most: int | None,
        *,
        begin: bool | None = None,
        resume: bool = False,
    ) -> str:
        """Return the prompt, of at most so many characters.

        ``begin`` opens the assistant's turn, and is the default. ``resume`` leaves the last
        message open instead, so that the model continues it. Raises TemplateError, and ApiError
        for messages of another shape.
        """
        plain = [self._plain(message) for message in messages]
        if resume:
            _mark(plain[-1])
        opens = not resume if begin is None else begin
        functions = [msgspec.to_builtins(tool) for tool in tools] or None
        text = self._tokenizer.render(plain, functions, variables, most, opens)
        if not resume:
            return text
        before, found, _ = text.rpartition(MARK)
        if not found:
            raise TemplateError("the chat template leaves the last message out")
        return before

    def _plain(self, message: Message) -> dict[str, Any]:
        """Return a message as chat templates read it: those of models that see want parts."""
        content = chat_images.parts(message) if self._sees else text_content(message)
        plain: dict[str, Any] = {"role": message.role, "content": content}
        if message.name:
            plain["name"] = message.name
        if message.tool_call_id:
            plain["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
        return plain


def text_of(message: Message) -> str:
    """Return the text of a message; its images have none."""
    if isinstance(message.content, list):
        return "".join(str(part.get("text", "")) for part in message.content)
    return message.content or ""


def _mark(message: dict[str, Any]) -> None:
    """Add the mark to the end of a message's text."""
    if isinstance(message["content"], str):
        message["content"] += MARK
        return
    message["content"] = [*message["content"], {"type": "text", "text": MARK}]


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("a tool call has no function with a name", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as our answers have it; templates write objects
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise invalid("the arguments of a tool call are not JSON", "messages") from None
    return call | {"function": function | {"arguments": arguments or {}}}
