"""Conversion of tool call arguments to JSON while they arrive.

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

StringArguments = Mapping[str, Mapping[str, bool]]
"""String arguments by tool, according to its schema.

The value is True if each text is the string itself. It is False if the text may also be a string in
quotes or null.
"""
MAX_PYTHON_CHARACTERS = 64 << 10
"""Maximum length for Python's parser, which takes about 100 bytes of memory per character."""

_PYTHON_STRING_PATTERN = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", re.DOTALL)
_CONTROL_CHARACTER_PATTERN = re.compile(r"[\x00-\x1f]")
_JSON_CONSTANTS = ("true", "false", "null", "NaN", "nan", "Infinity", "inf")
"""Names of JSON's constants, and of numbers that become null."""

HERMES, END_HERMES = "<tool_call>", "</tool_call>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


_CLOSING_TAG_PATTERN = r"</(?:seed:)?tool_call>\s{0,8}"
_NEXT_CALL_PATTERN = re.compile(
    rf"</function>\s{{0,8}}{_CLOSING_TAG_PATTERN}(?=<(?:seed:)?tool_call>\s{{0,8}}<function=)"
    rf"|{_CLOSING_TAG_PATTERN}(?=<tool_call>[\w.-]{{1,64}}\s{{0,8}}<arg_key>)"
)
_END_OF_CALL_PATTERNS = {
    END_PARAMETER: re.compile(rf"(?:</function>\s{{0,8}})?(?:{_CLOSING_TAG_PATTERN})?\Z"),
    END_VALUE: re.compile(rf"(?:{_CLOSING_TAG_PATTERN})?\Z"),
}
MAX_END_CHARACTERS = 192
"""Number of characters to search for the end of a call; more than its longest match."""
_POSSIBLE_END_PATTERN = re.compile(
    rf"(?:</function>\s{{0,8}})?(?:{_CLOSING_TAG_PATTERN})?(?:<(?:seed:)?tool_call>[\w.\s-]{{0,72}})?"
    r"(?:<[/\w:=]{0,16})?\Z"
)
"""Patterns of the text behind a value whose closing tag is missing.

The value ends where the call's own closing tags are followed by another call, or by the end of the
output. The last pattern matches the text that may become one of them.
"""


def find_string_arguments(parameters: dict[str, Any] | None) -> dict[str, bool]:
    """Return the arguments of a tool whose values are strings or null.

    The value is True if the schema's type is ``string``, as in :data:`StringArguments`.
    """
    properties = (parameters or {}).get("properties")
    return {
        key: schema.get("type") == "string"
        for key, schema in (properties.items() if isinstance(properties, dict) else ())
        if isinstance(schema, dict) and "string" in (kinds := _list_types(schema))
        and kinds <= {"string", "null"}
    }  # fmt: skip


def _list_types(schema: dict[str, Any]) -> set[str | None]:
    """Return the types in a schema. The set has None if a type is missing."""
    cases = schema.get("anyOf", schema.get("oneOf"))
    found = set[str | None]()
    for one in cases if isinstance(cases, list) and "type" not in schema else [schema]:
        given = one.get("type") if isinstance(one, dict) else None
        listed = given if isinstance(given, list) else [given]
        found.update(kind if isinstance(kind, str) else None for kind in listed)
    return found


class ArgumentEmitter:
    """Emitter of the arguments of the call ``name`` as a JSON object."""

    def __init__(self, text: Reader, name: str) -> None:
        self.text = text
        self.has_arguments = False
        self._name = validate_name(name)
        self._in_text = False

    def start_argument(self, key: str) -> None:
        """Emit the key of the next argument."""
        if not self.has_arguments:
            self.text.start_call(self._name)
        self.add_json(
            (", " if self.has_arguments else "{") + json.dumps(key, ensure_ascii=False) + ": "
        )
        self.has_arguments = True

    def add_json(self, piece: str, more: bool = True) -> None:
        """Emit a piece of JSON. ``more`` is False for the last piece."""
        self.text.add_arguments(piece, more)
        self.text.drop_consumed()

    def add_string(self, piece: str, is_last: bool, strips_line_breaks: bool) -> str:
        """Emit a piece of a string. Emit the closing quote if ``is_last`` is True.

        Return a line break at the end of ``piece`` that is held back, or "".
        """
        begins, self._in_text = not self._in_text, not is_last
        piece = piece.removeprefix("\n") if begins and strips_line_breaks else piece
        held = "\n" if strips_line_breaks and piece.endswith("\n") else ""
        said = json.dumps(piece[: len(piece) - len(held)], ensure_ascii=False)
        self.add_json(('"' if begins else "") + said[1:-1] + ('"' if is_last else ""))
        return held

    def finish(self) -> None:
        """Emit the end of the call."""
        if not self.has_arguments:
            self.text.start_call(self._name)
        self.add_json("}" if self.has_arguments else "{}", more=False)


def read_parameters(text: Reader, name: str, string_arguments: StringArguments) -> Steps[None]:
    """Read ``<parameter=KEY>VALUE</parameter>`` up to the end of a function."""
    emitter = ArgumentEmitter(text, name)
    following = PARAMETER, END_FUNCTION, END_HERMES
    while True:
        yield from text.peek()
        mark = yield from text.take_mark(PARAMETER, END_FUNCTION)
        if mark != PARAMETER:
            if not mark and text.text and not emitter.has_arguments:
                raise NotACallError
            emitter.finish()
            return
        key, _ = yield from text.take_until(">")
        emitter.start_argument(key.strip())
        kind = string_arguments.get(name.strip(), {}).get(key.strip())
        if not (
            yield from _emit_value(
                emitter, kind, END_PARAMETER, *following, strips_line_breaks=True
            )
        ):
            return


def read_keyed_arguments(text: Reader, name: str, string_arguments: StringArguments) -> Steps[None]:
    """Read ``<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>``."""
    emitter = ArgumentEmitter(text, name)
    while (yield from text.peek()) and (yield from text.take_mark(KEY)):
        key, _ = yield from text.take_until(END_KEY)
        yield from text.peek()
        if not (yield from text.take_mark(VALUE)):
            if emitter.has_arguments:
                emitter.finish()
            raise NotACallError
        emitter.start_argument(key.strip())
        kind = string_arguments.get(name.strip(), {}).get(key.strip())
        if not (yield from _emit_value(emitter, kind, END_VALUE, KEY, END_HERMES)):
            return
    emitter.finish()


def _emit_value(
    emitter: ArgumentEmitter,
    kind: bool | None,
    end_tag: str,
    *following: str,
    strips_line_breaks: bool = False,
) -> Steps[bool]:
    """Emit an argument's value up to ``end_tag``. Return True if the value is complete.

    The tag counts only if one of ``following`` comes after it. Without the tag, the value ends with
    the call. ``kind`` is the argument's value in :data:`StringArguments`, or None if the argument
    is unknown. ``strips_line_breaks`` removes a line break at the start and at the end of the
    value.
    """
    text, whole, parts, is_text = emitter.text, False, list[str](), kind is True
    while not whole:
        at = text.text.find(end_tag)
        keep = find_overlap(text.text, end_tag) if text.ended else _count_held_back(text.text)
        if (ends := _find_end_of_call(text, at, end_tag)) is not None:
            parts.append(text.take(ends))
            if end_tag.startswith(text.text):
                text.take(len(text.text))
            at, whole = -1, True
        else:
            parts.append(text.take(len(text.text) - keep if at < 0 else at))
        if at >= 0:
            text.take(len(end_tag))
            yield from text.peek()
            whole = bool((yield from text.peek_mark(*following)))
            whole = whole or (text.ended and any(one.startswith(text.text) for one in following))
            parts += [] if whole else [end_tag, text.skipped]
        if is_text and (whole or any(parts)):
            parts = [emitter.add_string("".join(parts), whole, strips_line_breaks)]
        if at < 0 and not whole:
            if text.ended:
                text.take(keep)
                emitter.add_json("" if is_text else "".join(parts).strip())
                return False
            yield
    if not is_text:
        value = "".join(parts)
        if strips_line_breaks:
            value = value.removeprefix("\n").removesuffix("\n")
        parsed = _parse_typed_value(value)
        if kind is not None and not (parsed is None or isinstance(parsed, str)):
            parsed = value
        emitter.add_json(dump_json(parsed))
    return True


def _find_end_of_call(text: Reader, tag_index: int, end_tag: str) -> int | None:
    """Return the index at which the call ends, or None if it does not end before ``tag_index``.

    ``tag_index`` is the index of the tag ``end_tag``, or negative if the tag is not there.
    """
    if found := _NEXT_CALL_PATTERN.search(
        text.text, 0, len(text.text) if tag_index < 0 else tag_index
    ):
        return found.start()
    if tag_index >= 0 or not text.finished:
        return None
    rest = len(text.text) - find_overlap(text.text, end_tag)
    found = _END_OF_CALL_PATTERNS[end_tag].search(
        text.text, max(0, rest - MAX_END_CHARACTERS), rest
    )
    return None if found is None else found.start()


def _count_held_back(text: str) -> int:
    """Return the number of characters at the end of ``text`` that may be the end of a call."""
    found = _POSSIBLE_END_PATTERN.search(text, max(0, len(text) - MAX_END_CHARACTERS))
    return 0 if found is None else len(found[0])


def _parse_typed_value(value: str) -> Any:
    try:
        return load_lenient_json(value)
    except NotACallError:
        word = JSON_BY_PYTHON_WORD.get(value.strip())
        return value if word is None else json.loads(word)


def read_python_calls(text: Reader) -> Steps[None]:
    """Read Python calls up to the end of a list. Its opening bracket was already consumed."""
    more = True
    while more:
        yield from text.peek()
        while (end := _find_end_of_name(text.text)) == len(text.text) and not text.ended:
            yield
        name = text.take(end)
        if not all(part.isidentifier() for part in name.split(".")):
            raise NotACallError
        if not (yield from text.take_mark("(")):
            raise NotACallError
        yield from _emit_python_arguments(ArgumentEmitter(text, name))
        yield from text.peek()
        more = bool((yield from text.take_mark(","))) and (yield from text.peek()) != "]"
    yield from text.take_mark("]")


def _find_end_of_name(text: str) -> int:
    return next(
        (at for at, sign in enumerate(text) if not (sign.isalnum() or sign in "_.")), len(text)
    )


def _emit_python_arguments(emitter: ArgumentEmitter) -> Steps[None]:
    mark = ","
    while mark == ",":
        given, mark = yield from emitter.text.take_python_argument()
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


def _parse_python_argument(given: str) -> tuple[str, Any]:
    if len(given) > MAX_PYTHON_CHARACTERS:
        raise NotACallError
    try:
        try:
            node = ast.parse(f"f({given}\n)", mode="eval").body
        except (SyntaxError, ValueError):  # raw line breaks and the like in a string
            given = _PYTHON_STRING_PATTERN.sub(lambda found: _escape_controls(found[0]), given)
            node = ast.parse(f"f({given}\n)", mode="eval").body
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
    """Return the value of a Python literal, or of JSON's true, false and null."""
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
