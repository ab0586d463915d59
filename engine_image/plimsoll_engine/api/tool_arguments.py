"""Arguments of tool calls that a model does not write in JSON, given out in JSON as they come in.

Qwen3-Coder and GLM have a tag for each, and Llama 4 writes Python. A text is given out letter by
letter where a tool's schema says that it is one, and any other value once it is whole.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Mapping
from typing import Any

from plimsoll_engine.api.tool_calls import NoCall, Reader, Steps, checked, load, written
from plimsoll_engine.frontend.requests.detokenize import overlap

Texts = Mapping[str, Collection[str]]
"""By tool, those of its arguments that are texts by its schema."""
MAX_PYTHON_CHARACTERS = 64 << 10
"""Python's parser takes some hundred bytes of memory for each."""

HERMES, END_HERMES = "<tool_call>", "</tool_call>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


class Arguments:
    """The arguments of a call, given out in JSON as they come in."""

    def __init__(self, text: Reader, name: str) -> None:
        self.text = text
        self.begun = False
        self._name = checked(name)
        self._in_text = False

    def key(self, key: str) -> None:
        """Begin the next argument."""
        if not self.begun:
            self.text.opens(self._name)
        self.adds((", " if self.begun else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self.begun = True

    def adds(self, piece: str, more: bool = True) -> None:
        """Give out JSON."""
        self.text.adds(piece, more)
        self.text.forget()

    def says(self, piece: str, whole: bool, lines: bool) -> str:
        """Give out a part of a text, and its end if ``whole``; return what may be layout there."""
        begins, self._in_text = not self._in_text, not whole
        piece = piece.removeprefix("\n") if begins and lines else piece
        held = "\n" if lines and piece.endswith("\n") else ""
        said = json.dumps(piece[: len(piece) - len(held)], ensure_ascii=False)
        self.adds(('"' if begins else "") + said[1:-1] + ('"' if whole else ""))
        return held

    def end(self) -> None:
        """Give out the end of the call."""
        if not self.begun:
            self.text.opens(self._name)
        self.adds("}" if self.begun else "{}", more=False)


def parameters(text: Reader, name: str, texts: Texts) -> Steps[None]:
    """Read ``<parameter=KEY>VALUE</parameter>`` up to the end of a function."""
    arguments = Arguments(text, name)
    following = PARAMETER, END_FUNCTION, END_HERMES
    while True:
        yield from text.next()
        mark = yield from text.takes(PARAMETER, END_FUNCTION)
        if mark != PARAMETER:
            if not mark and text.text and not arguments.begun:
                raise NoCall
            arguments.end()
            return
        key, _ = yield from text.up_to(">")
        arguments.key(key.strip())
        is_text = key.strip() in texts.get(name.strip(), ())
        if not (yield from _value(arguments, is_text, END_PARAMETER, *following, lines=True)):
            return


def keys(text: Reader, name: str, texts: Texts) -> Steps[None]:
    """Read ``<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>``."""
    arguments = Arguments(text, name)
    while (yield from text.next()) and (yield from text.takes(KEY)):
        key, _ = yield from text.up_to(END_KEY)
        yield from text.next()
        if not (yield from text.takes(VALUE)):
            if arguments.begun:
                arguments.end()
            raise NoCall
        arguments.key(key.strip())
        is_text = key.strip() in texts.get(name.strip(), ())
        if not (yield from _value(arguments, is_text, END_VALUE, KEY, END_HERMES)):
            return
    arguments.end()


def _value(
    arguments: Arguments, is_text: bool, end: str, *following: str, lines: bool = False
) -> Steps[bool]:
    """Give out a value up to the tag ``end``, which ends it only where one of ``following`` comes.

    With ``lines``, a line break at its begin and at its end is layout. Returns whether it came
    whole.
    """
    text, whole, parts = arguments.text, False, list[str]()
    while not whole:
        at = text.text.find(end)
        keep = overlap(text.text, end)
        parts.append(text.take(len(text.text) - keep if at < 0 else at))
        if at >= 0:
            text.take(len(end))
            yield from text.next()
            whole = bool((yield from text.follows(*following)))
            whole = whole or (text.ended and any(one.startswith(text.text) for one in following))
            parts += [] if whole else [end, text.skipped]
        if is_text and (whole or any(parts)):
            parts = [arguments.says("".join(parts), whole, lines)]
        if at < 0:
            if text.ended:
                text.take(keep)
                arguments.adds("" if is_text else "".join(parts).strip())
                return False
            yield
    if not is_text:
        value = "".join(parts)
        if lines:
            value = value.removeprefix("\n").removesuffix("\n")
        arguments.adds(written(_typed(value)))
    return True


def _typed(value: str) -> Any:
    try:
        return load(value)
    except NoCall:
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)


def python_calls(text: Reader) -> Steps[None]:
    """Read calls up to the end of their list, which is begun."""
    more = True
    while more:
        yield from text.next()
        while (end := _end_of_name(text.text)) == len(text.text) and not text.ended:
            yield
        name = text.take(end)
        if not all(part.isidentifier() for part in name.split(".")):
            raise NoCall
        if not (yield from text.takes("(")):
            raise NoCall
        yield from _python_arguments(Arguments(text, name))
        yield from text.next()
        more = bool((yield from text.takes(","))) and (yield from text.next()) != "]"
    yield from text.takes("]")


def _end_of_name(text: str) -> int:
    return next(
        (at for at, sign in enumerate(text) if not (sign.isalnum() or sign in "_.")), len(text)
    )


def _python_arguments(arguments: Arguments) -> Steps[None]:
    mark = ","
    while mark == ",":
        given, mark = yield from arguments.text.argument()
        if mark == ")" and not given.strip():
            break
        try:
            key, value = _python_argument(given)
            told = written(value)
        except NoCall:
            if arguments.begun:
                arguments.end()
            raise
        arguments.key(key)
        arguments.adds(told)
    arguments.end()


def _python_argument(given: str) -> tuple[str, Any]:
    if len(given) > MAX_PYTHON_CHARACTERS:
        raise NoCall
    try:
        node = ast.parse(f"f({given}\n)", mode="eval").body
        if not isinstance(node, ast.Call) or node.args or len(node.keywords) != 1:
            raise NoCall
        (one,) = node.keywords
        if one.arg is None:
            raise NoCall
        return one.arg, _literal(one.value)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NoCall from None


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
