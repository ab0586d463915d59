"""A conversation as its chat template writes it. Pure.

Messages and tools reach the template as they were sent, without their nulls. What a template does
not take is written in a form that it does take where one says the same:

- content in parts is one text where the template reads texts, and a text is a part where it reads
  parts alone;

- a developer's message is one of the system where the template knows no developer;
- instructions that it drops, or refuses where they stand, go to the front, as one message;
- a message without content has an empty one, and arguments that are no JSON are an object with
  them as a text, where the template would fail otherwise.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from plimsoll_engine.api import chat_images
from plimsoll_engine.api.errors import ApiError, invalid
from plimsoll_engine.api.protocol import Message, Tool
from plimsoll_engine.api.tool_calls import NoCall, load
from plimsoll_engine.frontend.requests.tokenizer import TemplateError, Tokenizer, TooLong

MARK = "\ue000\uf8ff\ue000"
"""Added to the message that the model is to continue: the prompt ends where it is."""
INSTRUCTS = ("system", "developer")
MAX_LOST = 8

Plain = dict[str, Any]
"""A message as chat templates read it."""


class ChatPrompt:
    """Writes conversations for one checkpoint; ``image`` is the token of images, where it sees."""

    def __init__(self, tokenizer: Tokenizer, image: str | None) -> None:
        self._tokenizer = tokenizer
        self._image = image
        parts = [{"type": "text", "text": MARK}]
        self._takes_parts = _takes(tokenizer, parts)
        self._takes_texts = not self._takes_parts or _takes(tokenizer, MARK)

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
        for form in self._forms(plain):
            try:
                text = write(form)
            except TooLong:
                raise
            except TemplateError as error:
                refused = refused or error
                continue
            if _spelled(form, text):
                continue
            refused, plain, lost = None, form, _lost(form, text)
            if not lost:
                return text
            break
        if developer or _instructs(lost):
            try:
                gathered = _gathered(plain)
                gathered[0]["content"] = self._text(gathered[0]["content"])
                first = write(gathered)
                if not _instructs(rest := _lost(gathered, first)):
                    refused, text, lost = None, first, rest
                    told.append(
                        "the chat template takes one message of the system, which comes first: all"
                        " instructions are in it"
                    )
            except TooLong:
                raise
            except TemplateError:
                pass
        if refused is not None:
            raise refused
        if lost:
            roles = ", ".join(sorted({one["role"] for one in lost}))
            told.append(f"the chat template leaves text out of messages of role {roles}")
        return text

    def _plain(self, message: Message, number: int) -> Plain:
        """Return a message as chat templates read it; raise ApiError that names it."""
        plain: Plain = {"role": message.role}
        try:
            content = self._content(message)
            if content is None and isinstance(message.extra.get("refusal"), str):
                content = message.extra["refusal"]
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
        return _as_sent(message.extra, plain)

    def _content(self, message: Message) -> str | list[dict[str, Any]] | None:
        content = message.content
        if isinstance(content, str):
            return self._text(content)
        if content is None:
            return None
        return chat_images.parts(content, self._image is not None)

    def _text(self, text: str) -> str | list[dict[str, Any]]:
        return text if self._takes_texts else [{"type": "text", "text": text}]

    def _forms(self, plain: list[Plain]) -> Iterator[list[Plain]]:
        """Yield the messages in the forms that a template may take, the closest one first."""
        texts = [one | self._joined(one.get("content")) for one in plain]
        for form in (plain, texts) if self._takes_parts and texts != plain else (texts,):
            yield form
            yield self._filled(form)

    def _filled(self, plain: list[Plain]) -> list[Plain]:
        """Return the messages with contents, and with objects as the arguments of all calls."""
        filled = copy.deepcopy(plain)
        for message in filled:
            message.setdefault("content", self._text(""))
            for call in message.get("tool_calls", ()):
                arguments = call["function"].get("arguments")
                if not isinstance(arguments, dict):
                    call["function"]["arguments"] = {"arguments": arguments}
        return filled

    def _joined(self, content: Any) -> Plain:
        """Return the content of a message whose parts are one text, with the image's token."""
        if not isinstance(content, list):
            return {}
        return {"content": "\n".join(one.get("text", self._image) for one in content)}


def text_of(message: Message) -> str:
    """Return the text of a message; its images have none."""
    if isinstance(message.content, list):
        return "\n".join(str(part["text"]) for part in message.content if "text" in part)
    return message.content or ""


def _takes(tokenizer: Tokenizer, content: object) -> bool:
    """Whether the chat template writes the text of a user's ``content``, MARK, and that alone."""
    try:
        text = tokenizer.render([{"role": "user", "content": content}])
    except TemplateError:
        return False
    return MARK in text and not _JSON.search(text)


_JSON = re.compile(rf'"text": ?"{MARK}')


def _spelled(plain: list[Plain], text: str) -> bool:
    """Whether a prompt may have contents in parts as Python or JSON write lists."""
    return any(isinstance(one.get("content"), list) for one in plain) and any(
        sign in text for sign in ("'type': 'text'", '"type": "text"', '"type":"text"')
    )


def _as_sent(extra: Plain, known: Plain) -> Plain:
    """Return all fields in the order in which they were sent, without nulls."""
    return {name: value for name, value in (extra | known).items() if value is not None}


def _function(tool: Tool) -> Plain:
    """Return a tool as the client wrote it. ``strict`` is for the engine, not for the model."""
    given = tool.function
    known = {name: getattr(given, name) for name in ("name", "description", "parameters")}
    return _as_sent(tool.extra, {"type": tool.type, "function": _as_sent(given.extra, known)})


def _mark(message: Plain) -> None:
    """Add the mark to the end of a message's text."""
    content = message.get("content", "")
    if isinstance(content, str):
        message["content"] = content + MARK
    elif content and "text" in content[-1]:
        message["content"] = [*content[:-1], {"type": "text", "text": content[-1]["text"] + MARK}]
    else:
        message["content"] = [*content, {"type": "text", "text": MARK}]


def _gathered(plain: list[Plain]) -> list[Plain]:
    """Return the messages with all instructions in one message of the system at the front."""
    contents = ["\n".join(_texts(one)) for one in plain if one["role"] in INSTRUCTS]
    rest = [one for one in plain if one["role"] not in INSTRUCTS]
    return [{"role": "system", "content": "\n\n".join(contents)}, *rest]


def _lost(plain: list[Plain], text: str) -> list[Plain]:
    """Return messages to the model that are not in the prompt ``text``, the first of each role.

    Templates trim texts, indent them, or write them as JSON. At most MAX_LOST roles are looked for.
    """
    lost: dict[str, Plain] = {}
    letters, at = "", 0
    for one in plain:
        role = one["role"]
        if role == "assistant" or role in lost:
            continue
        for part in map(str.strip, _texts(one)):
            # Messages come in order, mostly: all are found in one pass.
            if (found := text.find(part, at)) >= 0:
                at = found
            elif part not in text:
                letters = letters or _letters(text)
                if _letters(part) not in letters:
                    lost[role] = one
                    break
        if len(lost) == MAX_LOST:
            break
    return list(lost.values())


def _instructs(messages: list[Plain]) -> bool:
    return any(one["role"] in INSTRUCTS for one in messages)


def _letters(text: str) -> str:
    plain = re.sub(r"\\u([0-9a-f]{4})", lambda found: chr(int(found[1], 16)), text)
    return re.sub(r"\\[nrt]|[\W_]", "", plain)


def _texts(message: Plain) -> list[str]:
    """Return the texts of a message's content."""
    content = message.get("content", "")
    if isinstance(content, str):
        return [content]
    return [one["text"] for one in content if "text" in one]


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
