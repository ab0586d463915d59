"""Tool call formats of model families, and their parsers.

The names are those of vLLM's parsers (``--tool-call-parser``). The grammars of forced calls are in
:mod:`plimsoll_engine.api.forced_calls`.
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
    StringArguments,
    read_keyed_arguments,
    read_parameters,
    read_python_calls,
)
from plimsoll_engine.api.tool_calls import (
    Family,
    NotACallError,
    Reader,
    Steps,
    ToolCallParser,
    create_call_id,
    load_lenient_json,
    make_call,
    parse_calls,
    validate_name,
)

PYTHON_TAG = "<|python_tag|>"
MISTRAL, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
SEED, END_SEED = "<seed:tool_call>", "</seed:tool_call>"
DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
CHANNEL, MESSAGE, CONSTRAIN, START = "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>"
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")


# ---- parsers


def read_hermes(text: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, or a list between the tags."""

    def read_calls() -> Steps[None]:
        more = True
        while more:
            yield from _read_json_calls(text)
            yield from text.peek(" \t\r\n}]")
            taken_before = text.num_taken
            yield from text.take_mark(",", ";")
            if not (more := (yield from text.peek()) == "{"):
                text.put_back(text.num_taken - taken_before)
        yield from text.take_mark(END_HERMES)

    while (yield from text.read_content([HERMES])) is not None:
        yield from text.try_calls(read_calls())


def read_llama3_json(text: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read one or more ``{"name": …, "parameters": {…}}``, with or without a tag."""

    def read_next_call() -> Steps[None]:
        yield from text.peek()
        yield from text.take_mark(";", ",")
        yield from _read_json_calls(text)

    found = yield from text.try_calls(_read_json_or_python(text))
    while True:
        while found:
            found = yield from text.try_calls(read_next_call())
        if (yield from text.read_content([PYTHON_TAG])) is None:
            return
        found = yield from text.try_calls(_read_json_or_python(text))


def _read_json_or_python(text: Reader) -> Steps[None]:
    """Read JSON or a Python list. Llama 4 writes Python, although its template asks for JSON."""
    if (yield from text.peek()) == "[":
        taken_before = text.num_taken
        text.take(1)
        first = yield from text.peek()
        if first != "{":
            yield from read_python_calls(text)
            return
        text.put_back(text.num_taken - taken_before)
    yield from _read_json_calls(text)


def read_mistral(text: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read ``[TOOL_CALLS][{…}, …]``, or ``[TOOL_CALLS]NAME[ARGS]{…}`` from newer tokenizers."""

    def read_calls() -> Steps[None]:
        if (yield from text.peek()) in ("[", "{"):
            yield from _read_json_calls(text, create_short_id)
            return
        name, mark = yield from text.take_until(ARGS, CALL_ID, "{")
        if mark == CALL_ID:
            _, mark = yield from text.take_until(ARGS, "{")
        if mark == "{":
            text.put_back()
        yield from _read_json_arguments(text, name, create_short_id)

    while (yield from text.read_content([MISTRAL])) is not None:
        yield from text.try_calls(read_calls())


def read_qwen3_coder(text: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` between Hermes's tags."""

    def read_function(taken_before: bool) -> Steps[None]:
        yield from text.peek()
        if taken_before or (yield from text.take_mark(FUNCTION)):
            name, _ = yield from text.take_until(">")
            if (yield from text.peek()) == "{":  # as Functionary writes them
                yield from _read_json_arguments(text, name)
                yield from text.peek()
                yield from text.take_mark(END_FUNCTION)
            else:
                yield from read_parameters(text, name, string_arguments)
        else:
            yield from _read_json_calls(text)  # as the family's other models write them
        yield from text.peek()
        yield from text.take_mark(END_HERMES, END_SEED)

    while (mark := (yield from text.read_content([HERMES, SEED, FUNCTION]))) is not None:
        yield from text.try_calls(read_function(taken_before=mark == FUNCTION))


def read_glm45(text: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read ``NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`` between Hermes's tags."""

    def read_function() -> Steps[None]:
        if (yield from text.peek()) in ("{", "["):
            yield from _read_json_calls(text)  # as the family's other models write them
        else:
            name, mark = yield from text.take_until(KEY, END_HERMES, "{")
            text.put_back()
            if mark == "{":
                yield from _read_json_arguments(text, name)
            else:
                yield from read_keyed_arguments(text, name, string_arguments)
        yield from text.peek()
        yield from text.take_mark(END_HERMES)

    while (yield from text.read_content([HERMES])) is not None:
        yield from text.try_calls(read_function())


def read_deepseek_v3(text: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read ``function<｜tool▁sep｜>NAME`` with a JSON code block, or ``NAME<｜tool▁sep｜>{…}``."""

    def read_calls() -> Steps[None]:
        yield from text.peek()
        if not (yield from text.take_mark(DEEPSEEK_CALL[0])):
            raise NotACallError
        name, _ = yield from text.take_until(DEEPSEEK_SEPARATOR)
        if (yield from text.peek()) not in ("{", '"'):
            name, _ = yield from text.take_until("\n")
            yield from text.peek()
            yield from text.take_mark("```json")
        yield from _read_json_arguments(text, name)
        for mark in ("```", DEEPSEEK_CALL[1]):
            yield from text.peek()
            yield from text.take_mark(mark)

    while (mark := (yield from text.read_content([DEEPSEEK[0], DEEPSEEK_CALL[0]]))) is not None:
        if mark == DEEPSEEK_CALL[0]:  # some checkpoints leave out the outer tags
            text.put_back()
        if (yield from text.try_calls(read_calls())):
            while (yield from text.try_calls(read_calls())):
                pass
            yield from text.take_mark(DEEPSEEK[1])
            text.drop_consumed()


def read_pythonic(text: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read an output that is a Python list of calls: ``[tide(port="Hull"), wind()]``."""

    def read_calls() -> Steps[None]:
        yield from text.peek()
        yield from text.take_mark("<|python_start|>")
        yield from _read_json_or_python(text)
        yield from text.peek()
        yield from text.take_mark("<|python_end|>")

    yield from text.try_calls(read_calls())
    yield from text.read_content([])


def read_openai(text: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read the channels of gpt-oss, which have reasoning, content, or calls.

    The recipient of a call is ``functions.NAME``.
    """

    def read_message(role: str) -> Steps[None]:
        header, _ = yield from text.take_until(MESSAGE)
        name = re.search(r"to=functions\.([^\s<]+)", role + header)
        if name is None:
            is_reasoning = header.strip().startswith("analysis")
            yield from text.read_content(HARMONY_ENDS, is_reasoning=is_reasoning)
            return
        yield from _read_json_arguments(text, name[1])
        yield from text.peek()
        yield from text.take_mark(*HARMONY_ENDS)

    role = yield from _read_recipient(text)  # the prompt ends with the first message's role
    while (mark := (yield from text.read_content([CHANNEL, START]))) is not None:
        if mark == START:
            yield from text.take_mark("assistant")
            text.drop_consumed()
            role = yield from _read_recipient(text)
        else:
            yield from text.try_calls(read_message(role))
            role = ""


def _read_recipient(text: Reader) -> Steps[str]:
    """Consume and return the recipient ``to=functions.NAME`` of a message; "" if it has none."""
    taken_before = text.num_taken
    try:
        yield from text.peek()
        if (yield from text.take_mark("to=functions.")):
            name, _ = yield from text.take_until(CHANNEL)
            text.text = CHANNEL + text.text
            text.drop_consumed()
            return f"to=functions.{name} "
    except NotACallError:
        pass
    text.put_back(text.num_taken - taken_before)
    return ""


def _read_json_calls(text: Reader, create_id: Callable[[], str] = create_call_id) -> Steps[None]:
    """Read a call as a JSON object with name and arguments, or a list of such objects."""
    if not (yield from _is_next(text, "{", "[")):
        raise NotACallError
    taken_before = text.num_taken
    listed = yield from text.take_mark("[")
    if listed and not (yield from _is_next(text, "{")):
        text.put_back(text.num_taken - taken_before)  # nested lists, or an empty one
        listed = ""
    more = True
    while more:
        if (name := (yield from _read_json_head(text))) is None:
            given, closers = yield from text.take_bracketed()
            text.emit_calls(
                [
                    one._replace(id=create_id())
                    for one in parse_calls(load_lenient_json(given + closers), text.has_tag)
                ]
            )
        else:
            yield from text.read_json_call(name, create_id())
            yield from _drop_json_rest(text)
        yield from text.peek()
        more = bool(listed) and bool((yield from text.take_mark(",")))
    if listed:
        yield from text.take_mark("]")


def _is_next(text: Reader, *marks: str) -> Steps[bool]:
    return (yield from text.peek()) in marks


def _read_json_head(text: Reader) -> Steps[str | None]:
    """Consume ``{"name": "NAME", "arguments":`` before an object, and return the name.

    Return None for other text, without consuming it.
    """
    taken_before = text.num_taken

    def skip_expected(*marks: str) -> Steps[None]:
        yield from text.peek()
        if not (yield from text.take_mark(*marks)):
            raise NotACallError

    try:
        for mark in ("{", '"name"', ":", '"'):
            yield from skip_expected(mark)
        name, mark = yield from text.take_until('"', "\\")
        if mark != '"':
            raise NotACallError
        for marks in ((",",), ('"arguments"', '"parameters"'), (":",)):
            yield from skip_expected(*marks)
        if (yield from text.peek()) == "{":
            return validate_name(name)
    except NotACallError:
        pass
    text.put_back(text.num_taken - taken_before)
    return None


def _drop_json_rest(text: Reader) -> Steps[None]:
    if (yield from text.peek()) == ",":
        text.text = "{" + text.text[1:]
        with contextlib.suppress(NotACallError):  # the call was already emitted
            yield from text.take_bracketed()
    else:
        yield from text.take_mark("}")
    text.drop_consumed()


def _read_json_arguments(
    text: Reader, name: str, create_id: Callable[[], str] = create_call_id
) -> Steps[None]:
    sign = yield from text.peek()
    if sign == "{":
        yield from text.read_json_call(validate_name(name), create_id())
        return
    if sign == '"':
        arguments = load_lenient_json((yield from text.take_string()))
    elif (yield from text.take_mark("null")):
        arguments = None
    else:
        raise NotACallError
    text.emit_calls([make_call(name, arguments, create_id())])


def create_short_id() -> str:
    """Return an ID of nine letters and digits, as Mistral's templates require."""
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(9))


# ---- choice of the family

_READERS: Mapping[str, Callable[[Reader, StringArguments], Steps[None]]] = {
    "hermes": read_hermes,
    "llama3_json": read_llama3_json,
    "mistral": read_mistral,
    "qwen3_coder": read_qwen3_coder,
    "glm45": read_glm45,
    "deepseek_v3": read_deepseek_v3,
    "pythonic": read_pythonic,
    "openai": read_openai,
}
FAMILY_NAMES = tuple(_READERS)
DEFAULT_FAMILY = "hermes"
"""Family of templates without tool calls, or with an unknown format."""
_TEMPLATE_PATTERNS = tuple(
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
"""Patterns of chat templates and their families. The first match applies."""
TAGS = frozenset(
    {
        HERMES, END_HERMES, PYTHON_TAG, "<|python_start|>", "<|python_end|>", MISTRAL, ARGS,
        CALL_ID, SEED, END_SEED, KEY, END_KEY, VALUE, END_VALUE, *DEEPSEEK, *DEEPSEEK_CALL,
        DEEPSEEK_SEPARATOR, CHANNEL, MESSAGE, CONSTRAIN, START,
        *HARMONY_ENDS,
    }
)  # fmt: skip
"""Tags that may be special tokens. The detokenizer keeps them if calls are parsed."""


def detect_family(template: str) -> str:
    """Return the tool call family of the chat template ``template``; "" if it is unknown."""
    return next((family for sign, family in _TEMPLATE_PATTERNS if sign.search(template)), "")


def get_reader(family: str, string_arguments: StringArguments) -> Family:
    """Return the function that reads calls in the format of ``family``.

    Use it only for requests whose ``tool_choice`` does not force a call.
    """
    return lambda text: _READERS[family](text, string_arguments)


def create_parser(
    family: str, string_arguments: StringArguments, parallel: bool = True
) -> ToolCallParser:
    """Return a parser of one output in the format of ``family``."""
    return ToolCallParser(get_reader(family, string_arguments), parallel)
