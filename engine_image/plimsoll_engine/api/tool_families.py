"""How families of models write tool calls, and how each is read.

The names are vLLM's of its parsers (``--tool-call-parser``). What is prescribed where a call is
forced is in :mod:`plimsoll_engine.api.forced_calls`.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import string
from collections.abc import Callable, Mapping

from plimsoll_engine.api.tool_arguments import (
    END_FUNCTION,
    END_HERMES,
    END_KEY,
    END_VALUE,
    FUNCTION,
    HERMES,
    KEY,
    VALUE,
    Texts,
    keys,
    parameters,
    python_calls,
)
from plimsoll_engine.api.tool_calls import (
    Family,
    NoCall,
    Reader,
    Steps,
    ToolCallParser,
    calls_of,
    checked,
    load,
    new_id,
)

PYTHON_TAG = "<|python_tag|>"
MISTRAL, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
SEED, END_SEED = "<seed:tool_call>", "</seed:tool_call>"
DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
CHANNEL, MESSAGE, CONSTRAIN, START = "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>"
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")


# ---- reading


def hermes(text: Reader, texts: Texts) -> Steps[None]:
    """Read ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, or a list in the tags."""

    def body() -> Steps[None]:
        yield from _json_calls(text)
        yield from text.next(" \t\r\n}]")
        yield from text.takes(END_HERMES)

    while (yield from text.content([HERMES])) is not None:
        yield from text.attempt(body())


def llama3_json(text: Reader, texts: Texts) -> Steps[None]:
    """Read ``{"name": …, "parameters": {…}}``, alone or after its tag; ``;`` parts several."""

    def another() -> Steps[None]:
        yield from text.next()
        if not (yield from text.takes(";")):
            raise NoCall
        yield from _json_calls(text)

    found = yield from text.attempt(_json_or_python(text))
    while True:
        while found:
            found = yield from text.attempt(another())
        if (yield from text.content([PYTHON_TAG])) is None:
            return
        found = yield from text.attempt(_json_or_python(text))


def _json_or_python(text: Reader) -> Steps[None]:
    """Read what Llama writes: 3 was taught JSON, 4 Python, but its template asks for JSON."""
    if (yield from text.next()) == "[":
        begun = text.taken
        text.take(1)
        first = yield from text.next()
        if first != "{":
            yield from python_calls(text)
            return
        text.back(text.taken - begun)
    yield from _json_calls(text)


def mistral(text: Reader, texts: Texts) -> Steps[None]:
    """Read ``[TOOL_CALLS][{…}, …]``, and ``[TOOL_CALLS]NAME[ARGS]{…}`` of later tokenizers."""

    def body() -> Steps[None]:
        if (yield from text.next()) in ("[", "{"):
            yield from _json_calls(text, short_id)
            return
        name, mark = yield from text.up_to(ARGS, CALL_ID, "{")
        if mark == CALL_ID:
            _, mark = yield from text.up_to(ARGS, "{")
        if mark == "{":
            text.back()
        yield from _object(text, name, short_id)

    while (yield from text.content([MISTRAL])) is not None:
        yield from text.attempt(body())


def qwen3_coder(text: Reader, texts: Texts) -> Steps[None]:
    """Read ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` in the tags of Hermes."""

    def function(begun: bool) -> Steps[None]:
        yield from text.next()
        if begun or (yield from text.takes(FUNCTION)):
            name, _ = yield from text.up_to(">")
            if (yield from text.next()) == "{":  # as Functionary writes them
                yield from _object(text, name)
                yield from text.next()
                yield from text.takes(END_FUNCTION)
            else:
                yield from parameters(text, name, texts)
        else:
            yield from _json_calls(text)  # as the family's other models write them
        yield from text.next()
        yield from text.takes(END_HERMES, END_SEED)

    while (mark := (yield from text.content([HERMES, SEED, FUNCTION]))) is not None:
        yield from text.attempt(function(begun=mark == FUNCTION))


def glm45(text: Reader, texts: Texts) -> Steps[None]:
    """Read ``NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`` in the tags of Hermes."""

    def function() -> Steps[None]:
        if (yield from text.next()) in ("{", "["):
            yield from _json_calls(text)  # as the family's other models write them
        else:
            name, _ = yield from text.up_to(KEY, END_HERMES)
            text.back()
            yield from keys(text, name, texts)
        yield from text.next()
        yield from text.takes(END_HERMES)

    while (yield from text.content([HERMES])) is not None:
        yield from text.attempt(function())


def deepseek_v3(text: Reader, texts: Texts) -> Steps[None]:
    """Read ``function<｜tool▁sep｜>NAME`` with a block of JSON, and ``NAME<｜tool▁sep｜>{…}``."""

    def body() -> Steps[None]:
        yield from text.next()
        if not (yield from text.takes(DEEPSEEK_CALL[0])):
            raise NoCall
        name, _ = yield from text.up_to(DEEPSEEK_SEPARATOR)
        if (yield from text.next()) != "{":
            name, _ = yield from text.up_to("\n")
            yield from text.next()
            yield from text.takes("```json")
        yield from _object(text, name)
        for mark in ("```", DEEPSEEK_CALL[1]):
            yield from text.next()
            yield from text.takes(mark)

    while (yield from text.content([DEEPSEEK[0]])) is not None:
        if (yield from text.attempt(body())):
            while (yield from text.attempt(body())):
                pass
            yield from text.takes(DEEPSEEK[1])
            text.forget()


def pythonic(text: Reader, texts: Texts) -> Steps[None]:
    """Read a text that is a list of calls in Python: ``[tide(port="Hull"), wind()]``."""

    def body() -> Steps[None]:
        yield from text.next()
        yield from text.takes("<|python_start|>")
        yield from _json_or_python(text)
        yield from text.next()
        yield from text.takes("<|python_end|>")

    yield from text.attempt(body())
    yield from text.content([])


def openai(text: Reader, texts: Texts) -> Steps[None]:
    """Read gpt-oss's channels: thoughts, calls (a recipient ``functions.NAME``), and the answer."""

    def message() -> Steps[None]:
        header, _ = yield from text.up_to(MESSAGE)
        name = re.search(r"to=functions\.([^\s<]+)", header)
        if name is None:
            thoughts = header.strip().startswith("analysis")
            yield from text.content(HARMONY_ENDS, thoughts=thoughts)
            return
        yield from _object(text, name[1])
        yield from text.next()
        yield from text.takes(*HARMONY_ENDS)

    while (mark := (yield from text.content([CHANNEL, START]))) is not None:
        if mark == START:
            yield from text.takes("assistant")
            text.forget()
        else:
            yield from text.attempt(message())


def _json_calls(text: Reader, new: Callable[[], str] = new_id) -> Steps[None]:
    """Read an object with a name and arguments, or a list of such."""
    if not (yield from _begins(text, "{", "[")):
        raise NoCall
    begun = text.taken
    listed = yield from text.takes("[")
    if listed and not (yield from _begins(text, "{")):
        text.back(text.taken - begun)  # lists in it, or nothing
        listed = ""
    more = True
    while more:
        if (name := (yield from _head(text))) is None:
            given, closers = yield from text.bracketed()
            text.gives([one._replace(id=new()) for one in calls_of(load(given + closers))])
        else:
            yield from text.streams(name, new())
            yield from _rest(text)
        yield from text.next()
        more = bool(listed) and bool((yield from text.takes(",")))
    if listed:
        yield from text.takes("]")


def _begins(text: Reader, *marks: str) -> Steps[bool]:
    return (yield from text.next()) in marks


def _head(text: Reader) -> Steps[str | None]:
    """Take ``{"name": "NAME", "arguments":`` where an object follows, and return the name.

    An object of another form stays: None.
    """
    begun = text.taken

    def expected(*marks: str) -> Steps[None]:
        yield from text.next()
        if not (yield from text.takes(*marks)):
            raise NoCall

    try:
        for mark in ("{", '"name"', ":", '"'):
            yield from expected(mark)
        name, mark = yield from text.up_to('"', "\\")
        if mark != '"':
            raise NoCall
        for marks in ((",",), ('"arguments"', '"parameters"'), (":",)):
            yield from expected(*marks)
        if (yield from text.next()) == "{":
            return checked(name)
    except NoCall:
        pass
    text.back(text.taken - begun)
    return None


def _rest(text: Reader) -> Steps[None]:
    """Take what follows the arguments in a call's object."""
    if (yield from text.next()) == ",":
        text.text = "{" + text.text[1:]
        with contextlib.suppress(NoCall):  # the call is given out
            yield from text.bracketed()
    else:
        yield from text.takes("}")
    text.forget()


def _object(text: Reader, name: str, new: Callable[[], str] = new_id) -> Steps[None]:
    """Read the arguments of a call in JSON."""
    if (yield from text.next()) != "{":
        raise NoCall
    yield from text.streams(checked(name), new())


def short_id() -> str:
    """Return an id as Mistral's templates demand it: nine letters and digits."""
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(9))


# ---- which family

_READERS: Mapping[str, Callable[[Reader, Texts], Steps[None]]] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "qwen3_coder": qwen3_coder,
    "glm45": glm45,
    "deepseek_v3": deepseek_v3,
    "pythonic": pythonic,
    "openai": openai,
}
NAMES = tuple(_READERS)
DEFAULT = "hermes"
"""The family of templates that write no calls, or calls of an unknown form."""
_SIGNS = tuple(
    (re.compile(sign), family)
    for sign, family in (
        (re.escape(CHANNEL) + "(analysis|commentary)", "openai"),
        (re.escape(DEEPSEEK[0]), "deepseek_v3"),
        (re.escape(MISTRAL), "mistral"),
        (KEY, "glm45"),
        (FUNCTION, "qwen3_coder"),
        (HERMES, "hermes"),
        (r"\[func_name1\(", "pythonic"),
        (r'"name\\?": [^{}]{0,40}"parameters', "llama3_json"),
        (r"<\|header_start\|>", "pythonic"),
        (re.escape(PYTHON_TAG), "llama3_json"),
    )
)
"""What a chat template holds, and the family that it is of; the first one counts."""
MARKS = frozenset(
    {
        HERMES, END_HERMES, PYTHON_TAG, "<|python_start|>", "<|python_end|>", MISTRAL, ARGS,
        CALL_ID, SEED, END_SEED, KEY, END_KEY, VALUE, END_VALUE, *DEEPSEEK, *DEEPSEEK_CALL,
        DEEPSEEK_SEPARATOR, CHANNEL, MESSAGE, CONSTRAIN, START,
        *HARMONY_ENDS,
    }
)  # fmt: skip
"""Tags that may be special tokens: they are read where calls are, and left out elsewhere."""


def of_template(template: str) -> str:
    """Return the family whose calls a chat template writes; empty where none is known."""
    return next((family for sign, family in _SIGNS if sign.search(template)), "")


def reader(family: str, texts: Texts) -> Family:
    """Return what reads the calls of a text that its model wrote freely."""
    return lambda text: _READERS[family](text, texts)


def parser(family: str, texts: Texts, parallel: bool = True) -> ToolCallParser:
    """Return a parser of one text."""
    return ToolCallParser(reader(family, texts), parallel)
