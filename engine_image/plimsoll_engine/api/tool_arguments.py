"""Convert tool call arguments to JSON while they arrive.

Qwen3-Coder and GLM write a tag for each argument, and Llama 4 writes Python. String arguments are
emitted as they arrive, others when they are complete.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from plimsoll_engine.api.json_pieces import JSON_BY_PYTHON_WORD
from plimsoll_engine.api.tool_calls import (
    NotACallError,
    Reader,
    Steps,
    dump_json,
    load_lenient_json,
    validate_name,
)
from plimsoll_engine.frontend.requests.detokenize import find_overlap

# String arguments in the schemas of tools, by tool and argument. True means that the text is always
# the string itself, False that it may also be null or a string in quotes.
StringArguments = Mapping[str, Mapping[str, bool]]
# Python's parser takes about 100 bytes of memory per character.
MAX_PYTHON_CHARACTERS = 64 << 10

_PYTHON_STRING_PATTERN = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", re.DOTALL)
_CONTROL_CHARACTER_PATTERN = re.compile(r"[\x00-\x1f]")
# JSON's constants, and numbers that become null.
_JSON_CONSTANTS = ("true", "false", "null", "NaN", "nan", "Infinity", "inf")

HERMES_TAG, END_HERMES_TAG = "<tool_call>", "</tool_call>"
PARAMETER_TAG, END_PARAMETER_TAG = "<parameter=", "</parameter>"
FUNCTION_TAG, END_FUNCTION_TAG = "<function=", "</function>"
KEY_TAG, END_KEY_TAG = "<arg_key>", "</arg_key>"
VALUE_TAG, END_VALUE_TAG = "<arg_value>", "</arg_value>"


_CLOSING_TAG_PATTERN = r"</(?:seed:)?tool_call>\s{0,8}"
_NEXT_CALL_PATTERN = re.compile(
    rf"</function>\s{{0,8}}{_CLOSING_TAG_PATTERN}(?=<(?:seed:)?tool_call>\s{{0,8}}<function=)"
    rf"|{_CLOSING_TAG_PATTERN}(?=<tool_call>[\w.-]{{1,64}}\s{{0,8}}<arg_key>)"
)
_END_OF_CALL_PATTERNS = {
    END_PARAMETER_TAG: re.compile(rf"(?:</function>\s{{0,8}})?(?:{_CLOSING_TAG_PATTERN})?\Z"),
    END_VALUE_TAG: re.compile(rf"(?:{_CLOSING_TAG_PATTERN})?\Z"),
}
# No end of a call is longer.
MAX_END_CHARACTERS = 192
# Text that may become the end of a call whose last value has no closing tag. Such a value ends
# where the call's own closing tags are followed by another call or the end of the output.
_POSSIBLE_END_PATTERN = re.compile(
    rf"(?:</function>\s{{0,8}})?(?:{_CLOSING_TAG_PATTERN})?(?:<(?:seed:)?tool_call>[\w.\s-]{{0,72}})?"
    r"(?:<[/\w:=]{0,16})?\Z"
)


def find_string_arguments(parameters: dict[str, Any] | None) -> dict[str, bool]:
    """Return the string arguments in a tool's schema, as in :data:`StringArguments`."""
    properties = (parameters or {}).get("properties")
    return {
        key: schema.get("type") == "string"
        for key, schema in (properties.items() if isinstance(properties, dict) else ())
        if isinstance(schema, dict) and "string" in (kinds := _list_types(schema))
        and kinds <= {"string", "null"}
    }  # fmt: skip


def _list_types(schema: dict[str, Any]) -> set[str | None]:
    # The set contains None if a type is missing.
    cases = schema.get("anyOf", schema.get("oneOf"))
    found = set[str | None]()
    for one in cases if isinstance(cases, list) and "type" not in schema else [schema]:
        given = one.get("type") if isinstance(one, dict) else None
        listed = given if isinstance(given, list) else [given]
        found.update(kind if isinstance(kind, str) else None for kind in listed)
    return found


class ArgumentEmitter:
    """Emitter of the arguments of the call ``name`` as a JSON object."""

    def __init__(self, reader: Reader, name: str) -> None:
        self.reader = reader
        self.has_arguments = False
        self._name = validate_name(name)
        self._in_text = False

    def start_argument(self, key: str) -> None:
        """Emit the key of the next argument."""
        if not self.has_arguments:
            self.reader.start_call(self._name)
        self.add_json(
            (", " if self.has_arguments else "{") + json.dumps(key, ensure_ascii=False) + ": "
        )
        self.has_arguments = True

    def add_json(self, piece: str, has_more: bool = True) -> None:
        """Emit a piece of JSON. ``has_more`` is False for the last piece."""
        self.reader.add_arguments(piece, has_more)
        self.reader.drop_consumed()

    def add_string(self, piece: str, is_last: bool, strips_line_breaks: bool) -> str:
        """Emit a piece of a string, and the closing quote if ``is_last`` is True.

        Return the line break at the end of ``piece`` if it is held back, else "".
        """
        begins, self._in_text = not self._in_text, not is_last
        piece = piece.removeprefix("\n") if begins and strips_line_breaks else piece
        line_break = "\n" if strips_line_breaks and piece.endswith("\n") else ""
        text = json.dumps(piece[: len(piece) - len(line_break)], ensure_ascii=False)
        self.add_json(('"' if begins else "") + text[1:-1] + ('"' if is_last else ""))
        return line_break

    def finish(self) -> None:
        """Emit the end of the call."""
        if not self.has_arguments:
            self.reader.start_call(self._name)
        self.add_json("}" if self.has_arguments else "{}", has_more=False)


def read_parameters(reader: Reader, name: str, string_arguments: StringArguments) -> Steps[None]:
    """Read ``<parameter=KEY>VALUE</parameter>`` up to the end of a function."""
    emitter = ArgumentEmitter(reader, name)
    following = PARAMETER_TAG, END_FUNCTION_TAG, END_HERMES_TAG
    while True:
        yield from reader.peek()
        mark = yield from reader.take_mark(PARAMETER_TAG, END_FUNCTION_TAG)
        if mark != PARAMETER_TAG:
            if not mark and reader.text and not emitter.has_arguments:
                raise NotACallError
            emitter.finish()
            return
        key, _ = yield from reader.take_until(">")
        emitter.start_argument(key.strip())
        kind = string_arguments.get(name.strip(), {}).get(key.strip())
        if not (
            yield from _emit_value(
                emitter, kind, END_PARAMETER_TAG, *following, strips_line_breaks=True
            )
        ):
            return


def read_keyed_arguments(
    reader: Reader, name: str, string_arguments: StringArguments
) -> Steps[None]:
    """Read ``<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>``."""
    emitter = ArgumentEmitter(reader, name)
    while (yield from reader.peek()) and (yield from reader.take_mark(KEY_TAG)):
        key, _ = yield from reader.take_until(END_KEY_TAG)
        yield from reader.peek()
        if not (yield from reader.take_mark(VALUE_TAG)):
            if emitter.has_arguments:
                emitter.finish()
            raise NotACallError
        emitter.start_argument(key.strip())
        kind = string_arguments.get(name.strip(), {}).get(key.strip())
        if not (yield from _emit_value(emitter, kind, END_VALUE_TAG, KEY_TAG, END_HERMES_TAG)):
            return
    emitter.finish()


def _emit_value(
    emitter: ArgumentEmitter,
    is_always_string: bool | None,
    end_tag: str,
    *following: str,
    strips_line_breaks: bool = False,
) -> Steps[bool]:
    # Returns False if the text ends before the end tag. The tag counts only if one of ``following``
    # comes after it. Without the tag, the value ends with the call.
    reader, whole, parts, is_text = emitter.reader, False, list[str](), is_always_string is True
    while not whole:
        at = reader.text.find(end_tag)
        keep = (
            find_overlap(reader.text, end_tag)
            if reader.ended
            else _count_held_back_characters(reader.text)
        )
        if (ends := _find_end_of_call(reader, at, end_tag)) is not None:
            parts.append(reader.take(ends))
            if end_tag.startswith(reader.text):
                reader.take(len(reader.text))
            at, whole = -1, True
        else:
            parts.append(reader.take(len(reader.text) - keep if at < 0 else at))
        if at >= 0:
            reader.take(len(end_tag))
            yield from reader.peek()
            whole = bool((yield from reader.peek_mark(*following)))
            whole = whole or (
                reader.ended and any(one.startswith(reader.text) for one in following)
            )
            parts += [] if whole else [end_tag, reader.skipped]
        if is_text and (whole or any(parts)):
            parts = [emitter.add_string("".join(parts), whole, strips_line_breaks)]
        if at < 0 and not whole:
            if reader.ended:
                reader.take(keep)
                emitter.add_json("" if is_text else "".join(parts).strip())
                return False
            yield
    if not is_text:
        value = "".join(parts)
        if strips_line_breaks:
            value = value.removeprefix("\n").removesuffix("\n")
        parsed = _parse_typed_value(value)
        if is_always_string is not None and not (parsed is None or isinstance(parsed, str)):
            parsed = value
        emitter.add_json(dump_json(parsed))
    return True


def _find_end_of_call(reader: Reader, tag_index: int, end_tag: str) -> int | None:
    # Returns None if the call does not end before ``tag_index``, which is negative without a tag.
    if found := _NEXT_CALL_PATTERN.search(
        reader.text, 0, len(reader.text) if tag_index < 0 else tag_index
    ):
        return found.start()
    if tag_index >= 0 or not reader.finished:
        return None
    rest = len(reader.text) - find_overlap(reader.text, end_tag)
    found = _END_OF_CALL_PATTERNS[end_tag].search(
        reader.text, max(0, rest - MAX_END_CHARACTERS), rest
    )
    return None if found is None else found.start()


def _count_held_back_characters(text: str) -> int:
    # These last characters may belong to the end of a call.
    found = _POSSIBLE_END_PATTERN.search(text, max(0, len(text) - MAX_END_CHARACTERS))
    return 0 if found is None else len(found[0])


def _parse_typed_value(value: str) -> Any:
    try:
        return load_lenient_json(value)
    except NotACallError:
        word = JSON_BY_PYTHON_WORD.get(value.strip())
        return value if word is None else json.loads(word)


def read_python_calls(reader: Reader) -> Steps[None]:
    """Read Python calls up to the end of a list whose opening bracket was already consumed."""
    more = True
    while more:
        yield from reader.peek()
        while (end := _find_end_of_name(reader.text)) == len(reader.text) and not reader.ended:
            yield
        name = reader.take(end)
        if not all(part.isidentifier() for part in name.split(".")):
            raise NotACallError
        if not (yield from reader.take_mark("(")):
            raise NotACallError
        yield from _emit_python_arguments(ArgumentEmitter(reader, name))
        yield from reader.peek()
        more = bool((yield from reader.take_mark(","))) and (yield from reader.peek()) != "]"
    yield from reader.take_mark("]")


def _find_end_of_name(text: str) -> int:
    return next(
        (at for at, sign in enumerate(text) if not (sign.isalnum() or sign in "_.")), len(text)
    )


def _emit_python_arguments(emitter: ArgumentEmitter) -> Steps[None]:
    mark = ","
    while mark == ",":
        given, mark = yield from emitter.reader.take_python_argument()
        if mark == ")" and not given.strip():
            break
        try:
            key, value = _parse_python_argument(given)
            told = dump_json(value)
        except NotACallError:
            if emitter.has_arguments:
                emitter.finish()
            raise
        emitter.start_argument(key)
        emitter.add_json(told)
    emitter.finish()


def _parse_python_argument(text: str) -> tuple[str, Any]:
    if len(text) > MAX_PYTHON_CHARACTERS:
        raise NotACallError
    try:
        try:
            node = ast.parse(f"f({text}\n)", mode="eval").body
        except (SyntaxError, ValueError):  # raw line breaks and the like in a string
            text = _PYTHON_STRING_PATTERN.sub(lambda found: _escape_controls(found[0]), text)
            node = ast.parse(f"f({text}\n)", mode="eval").body
        if not isinstance(node, ast.Call) or node.args or len(node.keywords) != 1:
            raise NotACallError
        (one,) = node.keywords
        if one.arg is None:
            raise NotACallError
        return one.arg, _evaluate_literal(one.value)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NotACallError from None


def _escape_controls(text: str) -> str:
    return _CONTROL_CHARACTER_PATTERN.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _evaluate_literal(node: ast.expr) -> Any:
    # The literal is Python's, or JSON's true, false or null.
    if isinstance(node, ast.Name) and node.id in _JSON_CONSTANTS:
        return {"true": True, "false": False}.get(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluate_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise NotACallError
        return dict(zip(keys, map(_evaluate_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float):
        raise NotACallError
    return None if isinstance(value, float) and not math.isfinite(value) else value
