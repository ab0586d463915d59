"""Tool call formats of model families, named as vLLM's parsers (``--tool-call-parser``)."""

from __future__ import annotations

import contextlib
import re
import secrets
import string
from collections.abc import Callable, Mapping

from plimsoll_engine.api.tool_arguments import (
    END_FUNCTION_TAG,
    END_HERMES_TAG,
    END_KEY_TAG,
    END_VALUE_TAG,
    FUNCTION_TAG,
    HERMES_TAG,
    KEY_TAG,
    VALUE_TAG,
    StringArguments,
    read_keyed_arguments,
    read_parameters,
    read_python_calls,
)
from plimsoll_engine.api.tool_calls import (
    CallReader,
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
MISTRAL_TAG, ARGS_TAG, CALL_ID_TAG = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
SEED_TAG, END_SEED_TAG = "<seed:tool_call>", "</seed:tool_call>"
DEEPSEEK_TAGS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL_TAGS = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR_TAG = "<｜tool▁sep｜>"
CHANNEL_TAG, MESSAGE_TAG, CONSTRAIN_TAG, START_TAG = (
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|start|>",
)
HARMONY_END_TAGS = ("<|end|>", "<|call|>", "<|return|>")


# ---- parsers


def read_hermes(reader: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, or a list between the tags."""

    def read_calls() -> Steps[None]:
        more = True
        while more:
            yield from _read_json_calls(reader)
            yield from reader.peek(" \t\r\n}]")
            taken_before = reader.num_taken
            yield from reader.take_mark(",", ";")
            if not (more := (yield from reader.peek()) == "{"):
                reader.put_back(reader.num_taken - taken_before)
        yield from reader.take_mark(END_HERMES_TAG)

    while (yield from reader.read_content([HERMES_TAG])) is not None:
        yield from reader.try_calls(read_calls())


def read_llama3_json(reader: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read one or more ``{"name": …, "parameters": {…}}``, with or without a tag."""

    def read_next_call() -> Steps[None]:
        yield from reader.peek()
        yield from reader.take_mark(";", ",")
        yield from _read_json_calls(reader)

    found = yield from reader.try_calls(_read_json_or_python(reader))
    while True:
        while found:
            found = yield from reader.try_calls(read_next_call())
        if (yield from reader.read_content([PYTHON_TAG])) is None:
            return
        found = yield from reader.try_calls(_read_json_or_python(reader))


def _read_json_or_python(reader: Reader) -> Steps[None]:
    # Llama 4 writes Python, although its template asks for JSON.
    if (yield from reader.peek()) == "[":
        taken_before = reader.num_taken
        reader.take(1)
        first = yield from reader.peek()
        if first != "{":
            yield from read_python_calls(reader)
            return
        reader.put_back(reader.num_taken - taken_before)
    yield from _read_json_calls(reader)


def read_mistral(reader: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read ``[TOOL_CALLS][{…}, …]``, or ``[TOOL_CALLS]NAME[ARGS]{…}`` of newer tokenizers."""

    def read_calls() -> Steps[None]:
        if (yield from reader.peek()) in ("[", "{"):
            yield from _read_json_calls(reader, create_short_id)
            return
        name, mark = yield from reader.take_until(ARGS_TAG, CALL_ID_TAG, "{")
        if mark == CALL_ID_TAG:
            _, mark = yield from reader.take_until(ARGS_TAG, "{")
        if mark == "{":
            reader.put_back()
        yield from _read_json_arguments(reader, name, create_short_id)

    while (yield from reader.read_content([MISTRAL_TAG])) is not None:
        yield from reader.try_calls(read_calls())


def read_qwen3_coder(reader: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` between Hermes's tags."""

    def read_function(taken_before: bool) -> Steps[None]:
        yield from reader.peek()
        if taken_before or (yield from reader.take_mark(FUNCTION_TAG)):
            name, _ = yield from reader.take_until(">")
            if (yield from reader.peek()) == "{":  # as Functionary writes them
                yield from _read_json_arguments(reader, name)
                yield from reader.peek()
                yield from reader.take_mark(END_FUNCTION_TAG)
            else:
                yield from read_parameters(reader, name, string_arguments)
        else:
            yield from _read_json_calls(reader)  # as the family's other models write them
        yield from reader.peek()
        yield from reader.take_mark(END_HERMES_TAG, END_SEED_TAG)

    while (
        mark := (yield from reader.read_content([HERMES_TAG, SEED_TAG, FUNCTION_TAG]))
    ) is not None:
        yield from reader.try_calls(read_function(taken_before=mark == FUNCTION_TAG))


def read_glm45(reader: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read ``NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`` between Hermes's tags."""

    def read_function() -> Steps[None]:
        if (yield from reader.peek()) in ("{", "["):
            yield from _read_json_calls(reader)  # as the family's other models write them
        else:
            name, mark = yield from reader.take_until(KEY_TAG, END_HERMES_TAG, "{")
            reader.put_back()
            if mark == "{":
                yield from _read_json_arguments(reader, name)
            else:
                yield from read_keyed_arguments(reader, name, string_arguments)
        yield from reader.peek()
        yield from reader.take_mark(END_HERMES_TAG)

    while (yield from reader.read_content([HERMES_TAG])) is not None:
        yield from reader.try_calls(read_function())


def read_deepseek_v3(reader: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read ``function<｜tool▁sep｜>NAME`` with a JSON code block, or ``NAME<｜tool▁sep｜>{…}``."""

    def read_calls() -> Steps[None]:
        yield from reader.peek()
        if not (yield from reader.take_mark(DEEPSEEK_CALL_TAGS[0])):
            raise NotACallError
        name, _ = yield from reader.take_until(DEEPSEEK_SEPARATOR_TAG)
        if (yield from reader.peek()) not in ("{", '"'):
            name, _ = yield from reader.take_until("\n")
            yield from reader.peek()
            yield from reader.take_mark("```json")
        yield from _read_json_arguments(reader, name)
        for mark in ("```", DEEPSEEK_CALL_TAGS[1]):
            yield from reader.peek()
            yield from reader.take_mark(mark)

    while (
        mark := (yield from reader.read_content([DEEPSEEK_TAGS[0], DEEPSEEK_CALL_TAGS[0]]))
    ) is not None:
        if mark == DEEPSEEK_CALL_TAGS[0]:  # some checkpoints leave out the outer tags
            reader.put_back()
        if (yield from reader.try_calls(read_calls())):
            while (yield from reader.try_calls(read_calls())):
                pass
            yield from reader.take_mark(DEEPSEEK_TAGS[1])
            reader.drop_consumed()


def read_pythonic(reader: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read an output that is a Python list of calls: ``[tide(port="Hull"), wind()]``."""

    def read_calls() -> Steps[None]:
        yield from reader.peek()
        yield from reader.take_mark("<|python_start|>")
        yield from _read_json_or_python(reader)
        yield from reader.peek()
        yield from reader.take_mark("<|python_end|>")

    yield from reader.try_calls(read_calls())
    yield from reader.read_content([])


def read_openai(reader: Reader, string_arguments: StringArguments) -> Steps[None]:
    """Read the channels of gpt-oss, which contain reasoning, content or calls."""

    def read_message(role: str) -> Steps[None]:
        header, _ = yield from reader.take_until(MESSAGE_TAG)
        name = re.search(r"to=functions\.([^\s<]+)", role + header)
        if name is None:
            is_reasoning = header.strip().startswith("analysis")
            yield from reader.read_content(HARMONY_END_TAGS, is_reasoning=is_reasoning)
            return
        yield from _read_json_arguments(reader, name[1])
        yield from reader.peek()
        yield from reader.take_mark(*HARMONY_END_TAGS)

    role = yield from _read_recipient(reader)  # the prompt ends with the first message's role
    while (mark := (yield from reader.read_content([CHANNEL_TAG, START_TAG]))) is not None:
        if mark == START_TAG:
            yield from reader.take_mark("assistant")
            reader.drop_consumed()
            role = yield from _read_recipient(reader)
        else:
            yield from reader.try_calls(read_message(role))
            role = ""


def _read_recipient(reader: Reader) -> Steps[str]:
    # The recipient is to=functions.NAME, and empty without one.
    taken_before = reader.num_taken
    try:
        yield from reader.peek()
        if (yield from reader.take_mark("to=functions.")):
            name, _ = yield from reader.take_until(CHANNEL_TAG)
            reader.text = CHANNEL_TAG + reader.text
            reader.drop_consumed()
            return f"to=functions.{name} "
    except NotACallError:
        pass
    reader.put_back(reader.num_taken - taken_before)
    return ""


def _read_json_calls(reader: Reader, create_id: Callable[[], str] = create_call_id) -> Steps[None]:
    if not (yield from _is_next(reader, "{", "[")):
        raise NotACallError
    taken_before = reader.num_taken
    listed = yield from reader.take_mark("[")
    if listed and not (yield from _is_next(reader, "{")):
        reader.put_back(reader.num_taken - taken_before)  # nested lists, or an empty one
        listed = ""
    more = True
    while more:
        if (name := (yield from _read_json_head(reader))) is None:
            given, closers = yield from reader.take_bracketed()
            reader.emit_calls(
                [
                    one._replace(id=create_id())
                    for one in parse_calls(load_lenient_json(given + closers), reader.has_tag)
                ]
            )
        else:
            yield from reader.read_json_call(name, create_id())
            yield from _drop_json_rest(reader)
        yield from reader.peek()
        more = bool(listed) and bool((yield from reader.take_mark(",")))
    if listed:
        yield from reader.take_mark("]")


def _is_next(reader: Reader, *marks: str) -> Steps[bool]:
    return (yield from reader.peek()) in marks


def _read_json_head(reader: Reader) -> Steps[str | None]:
    # Consumes {"name": "NAME", "arguments": before an object, and returns the name. Returns None
    # for other text, without consuming it.
    taken_before = reader.num_taken

    def skip_expected(*marks: str) -> Steps[None]:
        yield from reader.peek()
        if not (yield from reader.take_mark(*marks)):
            raise NotACallError

    try:
        for mark in ("{", '"name"', ":", '"'):
            yield from skip_expected(mark)
        name, mark = yield from reader.take_until('"', "\\")
        if mark != '"':
            raise NotACallError
        for marks in ((",",), ('"arguments"', '"parameters"'), (":",)):
            yield from skip_expected(*marks)
        if (yield from reader.peek()) == "{":
            return validate_name(name)
    except NotACallError:
        pass
    reader.put_back(reader.num_taken - taken_before)
    return None


def _drop_json_rest(reader: Reader) -> Steps[None]:
    if (yield from reader.peek()) == ",":
        reader.text = "{" + reader.text[1:]
        with contextlib.suppress(NotACallError):  # the call was already emitted
            yield from reader.take_bracketed()
    else:
        yield from reader.take_mark("}")
    reader.drop_consumed()


def _read_json_arguments(
    reader: Reader, name: str, create_id: Callable[[], str] = create_call_id
) -> Steps[None]:
    sign = yield from reader.peek()
    if sign == "{":
        yield from reader.read_json_call(validate_name(name), create_id())
        return
    if sign == '"':
        arguments = load_lenient_json((yield from reader.take_string()))
    elif (yield from reader.take_mark("null")):
        arguments = None
    else:
        raise NotACallError
    reader.emit_calls([make_call(name, arguments, create_id())])


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
# For templates without tool calls, or with an unknown format.
DEFAULT_FAMILY = "hermes"
# The first pattern that matches the template decides.
_TEMPLATE_PATTERNS = tuple(
    (re.compile(sign), family)
    for sign, family in (
        (re.escape(CHANNEL_TAG) + "(analysis|commentary)", "openai"),
        (re.escape(DEEPSEEK_TAGS[0]), "deepseek_v3"),
        (re.escape(MISTRAL_TAG), "mistral"),
        (KEY_TAG, "glm45"),
        (FUNCTION_TAG, "qwen3_coder"),
        (HERMES_TAG, "hermes"),
        (r"\[func_name1\(", "pythonic"),
        (r'"name\\?": [^{}]{0,40}"parameters', "llama3_json"),
        (r"<\|header_start\|>", "pythonic"),
        (re.escape(PYTHON_TAG), "llama3_json"),
    )
)
# Tags that may be special tokens. The detokenizer keeps them if calls are parsed.
TAGS = frozenset(
    {
        HERMES_TAG, END_HERMES_TAG, PYTHON_TAG, "<|python_start|>", "<|python_end|>", MISTRAL_TAG,
        ARGS_TAG, CALL_ID_TAG, SEED_TAG, END_SEED_TAG, KEY_TAG, END_KEY_TAG, VALUE_TAG,
        END_VALUE_TAG, *DEEPSEEK_TAGS, *DEEPSEEK_CALL_TAGS, DEEPSEEK_SEPARATOR_TAG, CHANNEL_TAG,
        MESSAGE_TAG, CONSTRAIN_TAG, START_TAG, *HARMONY_END_TAGS,
    }
)  # fmt: skip


def detect_family(template: str) -> str:
    """Return the tool call family of a chat template; "" if it is unknown."""
    return next((family for sign, family in _TEMPLATE_PATTERNS if sign.search(template)), "")


def get_call_reader(family: str, string_arguments: StringArguments) -> CallReader:
    """Return the function that reads calls that are not forced, in the format of ``family``."""
    return lambda reader: _READERS[family](reader, string_arguments)


def create_parser(
    family: str, string_arguments: StringArguments, allow_several: bool = True
) -> ToolCallParser:
    """Return a parser of one output in the format of ``family``."""
    return ToolCallParser(get_call_reader(family, string_arguments), allow_several)
