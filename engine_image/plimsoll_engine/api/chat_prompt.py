"""A conversation as its chat template writes it. Pure.

A message reaches the template as it was sent, without its nulls. What a template does not take is
written in a form that it does take where one says the same:

- a developer's message is one of the system where the template knows no developer;
- instructions that it drops, or refuses where they stand, go to the front, as one message;
- a message without content has an empty one, and arguments that are no JSON are an object with
  them as a text, where the template would fail otherwise.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import msgspec

from plimsoll_engine.api import chat_images
from plimsoll_engine.api.errors import ApiError, invalid
from plimsoll_engine.api.protocol import Message, Tool, text_content
from plimsoll_engine.api.tool_calls import NoCall, load
from plimsoll_engine.frontend.requests.tokenizer import TemplateError, Tokenizer, TooLong

MARK = "\ue000\uf8ff\ue000"
"""Added to the message that the model is to continue: the prompt ends where it is."""
INSTRUCTS = ("system", "developer")

Plain = dict[str, Any]
"""A message as chat templates read it."""


class ChatPrompt:
    """Writes conversations for one checkpoint; ``image`` is the token of images, where it sees."""

    def __init__(self, tokenizer: Tokenizer, image: str | None) -> None:
        self._tokenizer = tokenizer
        self._image = image
        self._parts = image is not None and _takes_parts(tokenizer)

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
        warnings: list[str] | None = None,
    ) -> str:
        """Return the prompt, of at most so many characters.

        ``begin`` opens the assistant's turn, and is the default. ``resume`` leaves the last
        message open instead, so that the model continues it. What the client should know of the
        prompt is added to ``warnings``. Raises TemplateError, and ApiError for messages of another
        shape.
        """
        told: list[str] = [] if warnings is None else warnings
        plain = [self._plain(message, number) for number, message in enumerate(messages)]
        if resume:
            _mark(plain[-1])
        opens = not resume if begin is None else begin
        functions = [_function(tool) for tool in tools] or None

        def write(given: list[Plain]) -> str:
            return self._tokenizer.render(given, functions, variables, most, opens)

        text = self._written(plain, write, bool(tools), told)
        if functions and not any(one["function"]["name"] in text for one in functions):
            told.append("the chat template writes no tools: the model does not know of them")
        if not resume:
            return text
        before, found, _ = text.rpartition(MARK)
        if not found:
            raise TemplateError("the chat template leaves the last message out")
        return before

    def _written(
        self, plain: list[Plain], write: Callable[[list[Plain]], str], tools: bool, told: list[str]
    ) -> str:
        """Return the prompt in the first form of ``plain`` that the template takes whole."""
        developer = any(one["role"] == "developer" for one in plain)
        if developer and "developer" not in self._tokenizer.template_source(tools):
            for one in plain:
                if one["role"] == "developer":
                    one["role"] = "system"
        refused, text, lost = None, "", list[Plain]()
        for form in (plain, _filled(plain)):
            try:
                text = write(form)
            except TooLong:
                raise
            except TemplateError as error:
                refused = refused or error
                continue
            refused, plain = None, form
            lost = _lost(form, text)
            break
        if refused is None and not lost:
            return text
        if refused is None or developer:
            try:
                gathered = _gathered(plain)
                first = write(gathered)
                if not _lost(gathered, first):
                    told.append(
                        "the chat template takes one message of the system, which comes first: all"
                        " instructions are in it"
                    )
                    return first
            except TooLong:
                raise
            except TemplateError:
                pass
        if refused is not None:
            raise refused
        roles = ", ".join(sorted({one["role"] for one in lost}))
        told.append(f"the chat template leaves out messages of role {roles}")
        return text

    def _plain(self, message: Message, number: int) -> Plain:
        """Return a message as chat templates read it; raise ApiError that names it."""
        plain: Plain = {"role": message.role}
        more = {name: value for name, value in message.more.items() if value is not None}
        try:
            content = self._content(message)
            if content is None and isinstance(more.get("refusal"), str):
                content = more["refusal"]
            if content is not None:
                plain["content"] = content
            if message.name:
                plain["name"] = message.name
            if message.tool_call_id:
                plain["tool_call_id"] = message.tool_call_id
            if message.tool_calls:
                plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
        except ApiError as error:
            error.param = f"{error.param}[{number}]" if error.param == "messages" else error.param
            raise
        return more | plain

    def _content(self, message: Message) -> str | list[dict[str, Any]] | None:
        if message.content is None:
            return None
        if self._image is None:
            return text_content(message)
        parts = chat_images.parts(message)
        if self._parts:
            return parts
        image = self._image
        return "\n".join(image if one["type"] == "image" else one["text"] for one in parts)


def text_of(message: Message) -> str:
    """Return the text of a message; its images have none."""
    if isinstance(message.content, list):
        return "\n".join(str(part["text"]) for part in message.content if "text" in part)
    return message.content or ""


def _takes_parts(tokenizer: Tokenizer) -> bool:
    """Whether the chat template reads content in parts: of models that see, some take texts."""
    try:
        parts = [{"type": "text", "text": MARK}]
        text = tokenizer.render([{"role": "user", "content": parts}])
    except TemplateError:
        return False
    return MARK in text and "'text'" not in text and '"text"' not in text


def _function(tool: Tool) -> dict[str, Any]:
    """Return a tool as the client wrote it. ``strict`` is for the engine, not for the model."""
    function = {
        name: value
        for name, value in msgspec.to_builtins(tool.function).items()
        if value is not None and name != "strict"
    }
    return {"type": tool.type, "function": function}


def _mark(message: Plain) -> None:
    """Add the mark to the end of a message's text."""
    content = message.get("content", "")
    if isinstance(content, str):
        message["content"] = content + MARK
        return
    message["content"] = [*content, {"type": "text", "text": MARK}]


def _filled(plain: list[Plain]) -> list[Plain]:
    """Return the messages with contents, and with objects as the arguments of all calls."""
    filled = copy.deepcopy(plain)
    for message in filled:
        message.setdefault("content", "")
        for call in message.get("tool_calls", ()):
            arguments = call["function"].get("arguments")
            if not isinstance(arguments, dict):
                call["function"]["arguments"] = {"arguments": arguments}
    return filled


def _gathered(plain: list[Plain]) -> list[Plain]:
    """Return the messages with all instructions in one message of the system at the front."""
    contents = [one.get("content", "") for one in plain if one["role"] in INSTRUCTS]
    if not all(isinstance(one, str) for one in contents):
        raise TemplateError("instructions in parts cannot be gathered")
    rest = [one for one in plain if one["role"] not in INSTRUCTS]
    return [{"role": "system", "content": "\n\n".join(contents)}, *rest]


def _lost(plain: list[Plain], text: str) -> list[Plain]:
    """Return the instructions that are not in the prompt ``text``."""
    return [
        one
        for one in plain
        if one["role"] in INSTRUCTS
        and isinstance(content := one.get("content"), str)
        and content.strip() not in text
    ]


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("a tool call has no function with a name", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as our answers have it; templates write objects
        try:
            loaded = load(arguments or "{}")
            arguments = loaded if isinstance(loaded, dict) else arguments
        except NoCall:
            pass  # an earlier answer was cut short: the template gets the text
    arguments = {} if arguments is None else arguments
    return call | {"function": function | {"arguments": _whole_characters(arguments)}}


def _whole_characters(value: Any) -> Any:
    """Return ``value`` with half characters replaced, which are no text for a tokenizer."""
    try:
        written = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise invalid("the arguments of a tool call are nested too deeply", "messages") from None
    try:
        written.encode()
    except UnicodeEncodeError:
        return json.loads(written.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return value
