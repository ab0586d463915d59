"""How families of models write tool calls, and how each is read.

The names are vLLM's of its parsers (``--tool-call-parser``). What is prescribed where a call is
forced is in :mod:`plimsoll_engine.api.forced_calls`.
"""

from __future__ import annotations

import ast
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from typing import Any

from plimsoll_engine.api.tool_calls import (
    Family,
    NoCall,
    Reader,
    Steps,
    ToolCall,
    ToolCallParser,
    call,
    calls_of,
    load,
)

Texts = Mapping[str, Collection[str]]
"""By tool, those of its arguments that are texts by its schema."""
MAX_PYTHON_CHARACTERS = 64 << 10
"""Python's parser takes some hundred bytes of memory for each."""

HERMES, END_HERMES = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
SEED, END_SEED = "<seed:tool_call>", "</seed:tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
CHANNEL, MESSAGE, CONSTRAIN, START = "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>"
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")


# ---- reading


def hermes(text: Reader, texts: Texts) -> Steps[None]:
    """Read ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, or a list in the tags."""

    def body() -> Steps[list[ToolCall]]:
        found = yield from _json_calls(text)
        yield from text.next(" \t\r\n}]")
        yield from text.takes(END_HERMES)
        return found

    while (yield from text.content([HERMES])) is not None:
        yield from text.attempt(body())


def llama3_json(text: Reader, texts: Texts) -> Steps[None]:
    """Read ``{"name": …, "parameters": {…}}``, alone or after its tag; ``;`` parts several."""

    def another() -> Steps[list[ToolCall]]:
        yield from text.next()
        if not (yield from text.takes(";")):
            raise NoCall
        return (yield from _json_calls(text))

    found = yield from text.attempt(_json_or_python(text))
    while True:
        while found:
            found = yield from text.attempt(another())
        if (yield from text.content([PYTHON_TAG])) is None:
            return
        found = yield from text.attempt(_json_or_python(text))


def _json_or_python(text: Reader) -> Steps[list[ToolCall]]:
    """Read what Llama writes: 3 was taught JSON, 4 Python, but its template asks for JSON."""
    if (yield from text.next()) != "[":
        return (yield from _json_calls(text))
    given, _ = yield from text.bracketed(python=True)
    try:
        return calls_of(load(given))
    except NoCall:
        return _python_calls(given)


def mistral(text: Reader, texts: Texts) -> Steps[None]:
    """Read ``[TOOL_CALLS][{…}, …]``, and ``[TOOL_CALLS]NAME[ARGS]{…}`` of later tokenizers."""

    def body() -> Steps[list[ToolCall]]:
        first = yield from text.next()
        if first in ("[", "{"):
            return [_short(one) for one in (yield from _json_calls(text))]
        name, mark = yield from text.up_to(ARGS, CALL_ID, "{")
        if mark == CALL_ID:
            _, mark = yield from text.up_to(ARGS, "{")
        if mark == "{":
            text.back()
        given, closers = yield from _object(text)
        return [_short(call(name.strip(), load(given + closers)))]

    while (yield from text.content([MISTRAL])) is not None:
        yield from text.attempt(body())


def qwen3_coder(text: Reader, texts: Texts) -> Steps[None]:
    """Read ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` in the tags of Hermes."""

    def function(begun: bool) -> Steps[list[ToolCall]]:
        yield from text.next()
        if begun or (yield from text.takes(FUNCTION)):
            name, _ = yield from text.up_to(">")
            if (yield from text.next()) == "{":  # as Functionary writes them
                given, closers = yield from text.bracketed()
                found = [call(name.strip(), load(given + closers))]
                yield from text.next()
                yield from text.takes(END_FUNCTION)
            else:
                found = [(yield from _parameters(text, name.strip(), texts))]
        else:
            found = yield from _json_calls(text)  # as the family's other models write them
        yield from text.next()
        yield from text.takes(END_HERMES, END_SEED)
        return found

    while (mark := (yield from text.content([HERMES, SEED, FUNCTION]))) is not None:
        yield from text.attempt(function(begun=mark == FUNCTION))


def glm45(text: Reader, texts: Texts) -> Steps[None]:
    """Read ``NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`` in the tags of Hermes."""

    def function() -> Steps[list[ToolCall]]:
        if (yield from text.next()) in ("{", "["):
            found = yield from _json_calls(text)  # as the family's other models write them
        else:
            name, _ = yield from text.up_to(KEY, END_HERMES)
            text.back()
            found = [(yield from _keys(text, name.strip(), texts))]
        yield from text.next()
        yield from text.takes(END_HERMES)
        return found

    while (yield from text.content([HERMES])) is not None:
        yield from text.attempt(function())


def deepseek_v3(text: Reader, texts: Texts) -> Steps[None]:
    """Read ``function<｜tool▁sep｜>NAME`` with a block of JSON, and ``NAME<｜tool▁sep｜>{…}``."""

    def body() -> Steps[list[ToolCall]]:
        yield from text.next()
        if not (yield from text.takes(DEEPSEEK_CALL[0])):
            raise NoCall
        name, _ = yield from text.up_to(DEEPSEEK_SEPARATOR)
        if (yield from text.next()) != "{":
            name, _ = yield from text.up_to("\n")
            yield from text.next()
            yield from text.takes("```json")
        given, closers = yield from _object(text)
        for mark in ("```", DEEPSEEK_CALL[1]):
            yield from text.next()
            yield from text.takes(mark)
        return [call(name.strip(), load(given + closers))]

    while (yield from text.content([DEEPSEEK[0]])) is not None:
        if (yield from text.attempt(body())):
            while (yield from text.attempt(body())):
                pass
            yield from text.takes(DEEPSEEK[1])
            text.forget()


def pythonic(text: Reader, texts: Texts) -> Steps[None]:
    """Read a text that is a list of calls in Python: ``[tide(port="Hull"), wind()]``."""

    def body() -> Steps[list[ToolCall]]:
        yield from text.next()
        yield from text.takes("<|python_start|>")
        found = yield from _json_or_python(text)
        yield from text.next()
        yield from text.takes("<|python_end|>")
        return found

    yield from text.attempt(body())
    yield from text.content([])


def openai(text: Reader, texts: Texts) -> Steps[None]:
    """Read gpt-oss's channels: thoughts, calls (a recipient ``functions.NAME``), and the answer."""

    def message() -> Steps[list[ToolCall]]:
        header, _ = yield from text.up_to(MESSAGE)
        name = re.search(r"to=functions\.([^\s<]+)", header)
        if name is None:
            thoughts = header.strip().startswith("analysis")
            yield from text.content(HARMONY_ENDS, thoughts=thoughts)
            return []
        yield from text.next()
        given, closers = yield from _object(text)
        yield from text.next()
        yield from text.takes(*HARMONY_ENDS)
        return [call(name[1], load(given + closers))]

    while (mark := (yield from text.content([CHANNEL, START]))) is not None:
        if mark == START:
            yield from text.takes("assistant")
            text.forget()
        else:
            yield from text.attempt(message())


def _json_calls(text: Reader) -> Steps[list[ToolCall]]:
    if (yield from text.next()) not in ("{", "["):
        raise NoCall
    given, closers = yield from text.bracketed()
    return calls_of(load(given + closers))


def _object(text: Reader) -> Steps[tuple[str, str]]:
    if (yield from text.next()) != "{":
        raise NoCall
    return (yield from text.bracketed())


def _short(one: ToolCall) -> ToolCall:
    return one._replace(id=short_id())


def short_id() -> str:
    """Return an id as Mistral's templates demand it: nine letters and digits."""
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(9))


def _parameters(text: Reader, name: str, texts: Texts) -> Steps[ToolCall]:
    arguments: dict[str, Any] = {}
    while True:
        yield from text.next()
        mark = yield from text.takes(PARAMETER, END_FUNCTION)
        if mark != PARAMETER:
            if not mark and text.text:
                raise NoCall
            return call(name, arguments)
        key, _ = yield from text.up_to(">")
        value = yield from _value(text, END_PARAMETER, PARAMETER, END_FUNCTION, END_HERMES)
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = _typed(value, key.strip() in texts.get(name, ()))


def _keys(text: Reader, name: str, texts: Texts) -> Steps[ToolCall]:
    arguments: dict[str, Any] = {}
    while (yield from text.next()) and (yield from text.takes(KEY)):
        key, _ = yield from text.up_to(END_KEY)
        yield from text.next()
        if not (yield from text.takes(VALUE)):
            raise NoCall
        value = yield from _value(text, END_VALUE, KEY, END_HERMES)
        arguments[key.strip()] = _typed(value, key.strip() in texts.get(name, ()))
    return call(name, arguments)


def _value(text: Reader, end: str, *following: str) -> Steps[str]:
    """Take a value up to the tag ``end``, which ends it only where one of ``following`` comes."""
    value, _ = yield from text.up_to(end)
    while (yield from text.next()) and not (yield from text.follows(*following)):
        value += end + text.skipped
        more, _ = yield from text.up_to(end)
        value += more
    return value


def _typed(value: str, is_text: bool) -> Any:
    if is_text:
        return value
    try:
        return load(value)
    except NoCall:
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)


def _python_calls(given: str) -> list[ToolCall]:
    if len(given) > MAX_PYTHON_CHARACTERS:
        raise NoCall
    try:
        listed = ast.parse(given.strip(), mode="eval").body
        if not isinstance(listed, ast.List) or not listed.elts:
            raise NoCall
        return [_python_call(one) for one in listed.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NoCall from None


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise NoCall
    arguments: dict[str, Any] = {}
    for one in node.keywords:
        if one.arg is None:
            raise NoCall
        arguments[one.arg] = _literal(one.value)
    return call(ast.unparse(node.func), arguments)


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, with JSON's own names of true, false and null."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False}.get(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise NoCall
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float):
        raise NoCall
    return value


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
