"""Streaming parser of the tool calls in a model's output.

The formats are in :mod:`plimsoll_engine.api.tool_families`. Text that only resembles a call is
returned as text.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from plimsoll_engine.api.json_pieces import JsonRepairer
from plimsoll_engine.frontend.requests.detokenize import find_overlap

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Generator that yields whenever it needs more text, and returns its result at the end."""

# Maximum number of times that text is parsed again after an incomplete call.
MAX_REPARSES = 16
_STRING_MARK_PATTERN = re.compile(r'["\\]')
_BRACKET_MARK_PATTERN = re.compile(r'["{}\[\]<]')
_INVALID_NAME_PATTERN = re.compile(r'["{}()\[\]<>\n]')
_CLOSING_BRACKETS = {"{": "}", "[": "]", "(": ")"}


class ToolCall(NamedTuple):
    """Tool call, or a part of one. ``arguments`` is text in JSON.

    If ``more`` is True, further parts without ID and name continue the arguments.
    """

    id: str
    name: str
    arguments: str
    more: bool = False


@dataclass(slots=True)
class ParsedOutput:
    """Parsed piece of an output: reasoning, then plain text, then tool calls or parts of them."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""


class NotACallError(Exception):
    """The text is not a valid tool call."""


class IncompleteCallError(NotACallError):
    """The text ends within a tool call."""


class Reader:
    """Buffer of unread text, and of the parsed output."""

    # A call is emitted once its name is known, and its arguments as they arrive. If the arguments
    # precede the name or are a string, the call is emitted when it is complete. A tag inside a
    # string of the arguments is part of the string.

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        # Whether the model itself ended the output, rather than a limit or a stop string.
        self.finished = False
        # White space that the last peek() skipped.
        self.skipped = ""
        self.result = ParsedOutput()
        # Text that the current call has consumed.
        self._consumed: list[str] = []
        self._blank = ""
        # Whether a call has ended. White space after it is held back until text follows.
        self._after_call = False
        self._retries_left = MAX_REPARSES
        # Whether the current call began with a tag.
        self.has_tag = False
        # Whether text after a tag could not be parsed and is returned as text.
        self.has_unparsed_call = False

    def read_content(self, marks: Sequence[str], is_reasoning: bool = False) -> Steps[str | None]:
        """Emit the text before the first of ``marks``. Consume and return that mark.

        If the text has none of the marks, emit all text and return None.
        """
        emit = self._emit_reasoning if is_reasoning else self._emit_text
        while True:
            found = [(at, mark) for mark in marks if (at := self.text.find(mark)) >= 0]
            if found:
                at, mark = min(found)
                emit(self.text[:at])
                self.text = self.text[at:]
                self._consumed, self.has_tag = [], True
                self.take(len(mark))
                return mark
            keep = (
                0
                if self.ended
                else max((find_overlap(self.text, mark) for mark in marks), default=0)
            )
            emit(self.text[: len(self.text) - keep])
            self.text = self.text[len(self.text) - keep :]
            if self.ended:
                return None
            yield

    def _emit_text(self, text: str) -> None:
        if self._after_call and not text.strip():
            self._blank += text
            return
        self.result.text += self._blank + text
        self._blank, self._after_call = "", False

    def _emit_reasoning(self, text: str) -> None:
        self.result.reasoning += text

    def take(self, num_characters: int) -> str:
        """Consume and return the next ``num_characters`` characters."""
        taken, self.text = self.text[:num_characters], self.text[num_characters:]
        self._consumed.append(taken)
        return taken

    def peek(self, skipped: str = " \t\r\n") -> Steps[str]:
        """Skip the characters in ``skipped``, and return the next one; "" at the end."""
        self.skipped = ""
        while True:
            begin = self.text.lstrip(skipped)
            self.skipped += self.take(len(self.text) - len(begin))
            if self.text or self.ended:
                return self.text[:1]
            yield

    def peek_mark(self, *marks: str) -> Steps[str]:
        """Return the next mark if it is in ``marks``, without consuming it; else ""."""
        while True:
            for mark in marks:
                if self.text.startswith(mark):
                    return mark
            if self.ended or not any(mark.startswith(self.text) for mark in marks):
                return ""
            yield

    def take_mark(self, *marks: str) -> Steps[str]:
        """Consume and return the next mark if it is in ``marks``; else return ""."""
        mark = yield from self.peek_mark(*marks)
        return self.take(len(mark)) if mark else ""

    def drop_mark(self, mark: str) -> Steps[None]:
        """Drop ``mark`` if it comes next, even if the end of the text cuts it off."""
        if not (yield from self.take_mark(mark)) and self.ended and mark.startswith(self.text):
            self.take(len(self.text))
        self.drop_consumed()

    def put_back(self, num_calls: int = 1) -> None:
        """Undo the last ``num_calls`` calls of :meth:`take`."""
        taken = self._consumed[len(self._consumed) - num_calls :]
        del self._consumed[len(self._consumed) - num_calls :]
        self.text = "".join(taken) + self.text

    @property
    def num_taken(self) -> int:
        """Number of calls of :meth:`take` for the current tool call."""
        return len(self._consumed)

    def drop_consumed(self) -> None:
        """Drop the consumed text, so that it becomes neither output nor part of a call."""
        self._consumed = []

    def take_until(self, *marks: str) -> Steps[tuple[str, str]]:
        """Consume and return the text before the first of ``marks``, and that mark.

        Raises NotACallError if the text has none of the marks.
        """
        taken: list[str] = []
        while True:
            found = [(at, mark) for mark in marks if (at := self.text.find(mark)) >= 0]
            if found:
                at, mark = min(found)
                taken.append(self.take(at))
                self.take(len(mark))
                return "".join(taken), mark
            if self.ended:
                raise IncompleteCallError
            keep = max(find_overlap(self.text, mark) for mark in marks)
            taken.append(self.take(len(self.text) - keep))
            yield

    def take_string(self) -> Steps[str]:
        """Consume and return a JSON string with its quotes.

        Raises NotACallError if the string has no end.
        """
        taken = [self.take(1)]
        while True:
            part, mark = yield from self.take_until('"', "\\")
            taken += [part, mark]
            if mark == '"':
                return "".join(taken)
            yield from self.peek(skipped="")
            taken.append(self.take(1))

    def take_bracketed(self) -> Steps[tuple[str, str]]:
        """Consume a JSON object or array.

        Return the text, and the closing brackets that it lacks because a tag follows. Raises
        NotACallError if the text ends first.
        """
        stack: list[str] = []
        quoted, escaped, taken = False, False, list[str]()
        if (yield from self.peek()) not in ("{", "["):
            raise NotACallError
        while True:
            at, end = 0, None
            while end is None and at < len(self.text):
                if escaped:
                    escaped, at = False, at + 1
                    continue
                pattern = _STRING_MARK_PATTERN if quoted else _BRACKET_MARK_PATTERN
                mark = pattern.search(self.text, at)
                if mark is None:
                    break
                at, sign = mark.end(), mark[0]
                if sign == '"':
                    quoted = not quoted
                elif quoted:
                    escaped = True
                elif sign in _CLOSING_BRACKETS:
                    stack.append(_CLOSING_BRACKETS[sign])
                elif sign == "<":
                    end = at - 1
                else:
                    stack.pop()
                    end = None if stack else at
            taken.append(self.take(len(self.text) if end is None else end))
            if end is not None:
                return "".join(taken), "".join(reversed(stack))
            if self.ended:
                raise IncompleteCallError
            yield

    def start_call(self, name: str, id_: str = "") -> None:
        """Emit the start of a call. :meth:`add_arguments` emits the arguments."""
        self._consumed = []
        self._blank, self._after_call = "", True
        self.result.calls.append(ToolCall(id_ or create_call_id(), name, "", more=True))

    def add_arguments(self, piece: str, has_more: bool = True) -> None:
        """Emit a piece of the open call's arguments. ``has_more`` is False for the last piece."""
        if not piece:
            return
        if not self.result.calls:
            self.result.calls.append(ToolCall("", "", ""))
        part = self.result.calls[-1]
        self.result.calls[-1] = part._replace(arguments=part.arguments + piece, more=has_more)

    def read_json_call(self, name: str, id_: str = "") -> Steps[bool]:
        """Emit a call whose arguments follow as a JSON object. Return True if it is complete."""
        self.start_call(name, id_)
        pieces = JsonRepairer()
        if (yield from self.peek()) != "{":
            return False
        self.drop_consumed()
        while True:
            piece, self.text = pieces.push(self.text, self.ended and not self.finished)
            self.add_arguments(piece, has_more=not pieces.is_complete)
            if self.finished and not pieces.is_complete:
                piece, self.text = pieces.close(self.text), ""
                self.add_arguments(piece, has_more=not pieces.is_complete)
            if pieces.is_complete or self.ended:
                return pieces.is_complete
            yield

    def take_python_argument(self) -> Steps[tuple[str, str]]:
        """Consume and return an argument of a Python call, and the comma or ")" that follows.

        Raises NotACallError if the text ends first.
        """
        closers, quote, escaped, taken = [")"], "", False, list[str]()
        while True:
            end = None
            for at, sign in enumerate(self.text):
                if escaped:
                    escaped = False
                elif quote:
                    escaped = sign == "\\"
                    quote = "" if sign == quote else quote
                elif sign in "\"'":
                    quote = sign
                elif sign in _CLOSING_BRACKETS:
                    closers.append(_CLOSING_BRACKETS[sign])
                elif sign in ")]}":
                    closers.pop()
                if not quote and (not closers or (sign == "," and len(closers) == 1)):
                    end = at
                    break
            taken.append(self.take(len(self.text) if end is None else end))
            if end is not None:
                return "".join(taken), self.take(1)
            if self.ended:
                if self.finished and not quote:  # the model left the brackets open
                    return "".join([*taken, *reversed(closers[1:])]), ")"
                raise IncompleteCallError
            yield

    def emit_calls(self, calls: list[ToolCall]) -> None:
        """Emit complete calls."""
        self._consumed = []
        self._blank, self._after_call = "", True
        self.result.calls += calls

    def try_calls(self, steps: Steps[None]) -> Steps[bool]:
        """Run ``steps``, which emit calls. Return False after NotACallError.

        The consumed text is then emitted. If it ended within a call, only its beginning is emitted,
        and the rest is parsed again.
        """
        try:
            yield from steps
        except NotACallError as error:
            self.has_unparsed_call |= self.has_tag
            self.has_tag = False
            first, rest = (self._consumed or [""])[0], "".join(self._consumed[1:])
            if isinstance(error, IncompleteCallError) and self._retries_left:
                self._retries_left -= 1
                self.text, rest = rest + self.text, ""
            self._consumed = []
            self._emit_text(first + rest)
            return False
        self._consumed, self.has_tag = [], False
        return True


CallReader = Callable[[Reader], Steps[None]]
"""Function that reads the output, emits text and calls, and yields until it has enough text."""


class ToolCallParser:
    """Streaming parser of an output. Only the first call is returned unless ``allow_several``."""

    def __init__(self, read_output: CallReader, allow_several: bool = True) -> None:
        self._reader = Reader()
        self._read_output = read_output
        self._steps: Steps[None] | None = read_output(self._reader)
        self._parallel = allow_several
        self._num_calls = 0

    @property
    def has_unparsed_call(self) -> bool:
        """Whether text after a tag could not be parsed and is returned as text."""
        return self._reader.has_unparsed_call

    def copy(self) -> ToolCallParser:
        """Return a new parser with the same settings."""
        return ToolCallParser(self._read_output, self._parallel)

    def push(self, piece: str, is_last: bool = False, is_finished: bool = False) -> ParsedOutput:
        """Add a piece of the output. Return the text and the tool calls that can be sent now.

        If ``is_last`` is True, return the rest as well. If ``is_finished`` is True, the model ended
        the output, and missing brackets are added.
        """
        self._reader.text += piece
        self._reader.ended |= is_last
        self._reader.finished |= is_finished
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        found, self._reader.result = self._reader.result, ParsedOutput()
        if not self._parallel:
            for at, one in enumerate(found.calls):
                self._num_calls += bool(one.id)
                if self._num_calls > 1:
                    del found.calls[at:]
                    break
        return found


def make_call(name: object, arguments: object, id_: str = "") -> ToolCall:
    """Return a tool call. Raises NotACallError if the name or the arguments are invalid."""
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        arguments = load_lenient_json(arguments)
    if not isinstance(arguments, dict) or not isinstance(name, str):
        raise NotACallError
    return ToolCall(id_ or create_call_id(), validate_name(name), dump_json(arguments))


def dump_json(value: Any) -> str:
    """Return ``value`` as JSON. Raises NotACallError if ``value`` is nested too deeply."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        # A lone surrogate stays escaped, as the model wrote it.
        return text if _is_encodable(text) else json.dumps(value)
    except RecursionError:
        raise NotACallError from None


def validate_name(name: str) -> str:
    """Return the tool name without surrounding white space. Raises NotACallError."""
    if not name.strip() or _INVALID_NAME_PATTERN.search(name.strip()) or not _is_encodable(name):
        raise NotACallError
    return name.strip()


def create_call_id() -> str:
    """Return a call ID in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


def parse_calls(value: Any, has_tag: bool) -> list[ToolCall]:
    """Return the calls in a JSON value. Raises NotACallError if it has none.

    If ``has_tag`` is False, an object without arguments is not a call.
    """
    if isinstance(value, list) and value:
        return [one for entry in value for one in parse_calls(entry, has_tag)]
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise NotACallError
    if not (has_tag or "arguments" in value or "parameters" in value):
        raise NotACallError
    arguments = value.get("arguments", value.get("parameters"))
    return [make_call(value.get("name"), arguments)]


def load_lenient_json(text: str) -> Any:
    """Return the value of JSON that may have typical errors of models. Raises NotACallError."""
    with contextlib.suppress(ValueError, RecursionError):
        return _load_json(text)
    repairer = JsonRepairer()
    repaired, rest = repairer.push(text.strip(), is_last=True)
    if repairer.is_complete and not rest:
        with contextlib.suppress(ValueError, RecursionError):
            return _load_json(repaired)
    raise NotACallError


def _load_json(text: str) -> Any:
    return json.loads(text, strict=False, parse_float=_parse_number, parse_constant=lambda _: None)


def _parse_number(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
