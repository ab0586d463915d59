"""Tool calls in a model's text, taken out as the text comes in.

What a family of models writes is in :mod:`plimsoll_engine.api.tool_families`. The rules for all:

- A call is given out once its name came and its arguments begin; these follow as they come in
  (:mod:`plimsoll_engine.api.json_pieces`). Where they are before the name, or written as a text, it
  is given out once it is whole.
- A tag inside a string of a call's arguments is part of the string.
- Whatever only looks like a call stays text, so that nothing is lost. Behind a tag, this is noted,
  and told in a header of an answer in one piece.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from plimsoll_engine.api.json_pieces import JsonPieces
from plimsoll_engine.frontend.requests.detokenize import overlap

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Reads on; yields where it needs more of the text."""

RETRIES = 16
"""Times that a text is parsed again after the start of a call that was never completed."""
_IN_STRING = re.compile(r'["\\]')
_IN_TEXT = re.compile(r"['\\]")
_OUTSIDE = re.compile(r'["{}\[\]<]')
_OUTSIDE_PYTHON = re.compile(r"[\"'(){}\[\]]")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}


class ToolCall(NamedTuple):
    """``arguments`` is a JSON object as text.

    With ``more`` it is the beginning of one; then parts without an id and a name follow.
    """

    id: str
    name: str
    arguments: str
    more: bool = False


@dataclass(slots=True)
class Parsed:
    """What a piece of text turned out to be: plain text, and calls that it completed.

    ``reasoning`` came before both.
    """

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""


class NoCall(Exception):
    """What began like a call is none."""


class Endless(NoCall):
    """The text ended before what began like a call did."""


class Reader:
    """The text that came and was not read yet, and what became of the rest.

    The methods that return :data:`Steps` wait for as much of the text as they need.
    """

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self.finished = False
        """Whether the model itself ended the text."""
        self.skipped = ""
        """What the last :meth:`next` skipped."""
        self.out = Parsed()
        self._raw: list[str] = []
        """What the call under way has taken."""
        self._blank = ""
        self._layout = False
        """Whether white space follows a call: it is layout, and kept back until text follows."""
        self._retries = RETRIES
        self._tagged = False
        """Whether a tag began what is read."""
        self.unread = False
        """Whether what a tag began stayed text."""

    def content(self, marks: Sequence[str], thoughts: bool = False) -> Steps[str | None]:
        """Give out text up to the first of ``marks`` and take that; None at the text's end.

        The text is of the answer, or else ``thoughts``.
        """
        say = self._think if thoughts else self._say
        while True:
            found = [(at, mark) for mark in marks if (at := self.text.find(mark)) >= 0]
            if found:
                at, mark = min(found)
                say(self.text[:at])
                self.text = self.text[at:]
                self._raw, self._tagged = [], True
                self.take(len(mark))
                return mark
            keep = 0 if self.ended else max((overlap(self.text, mark) for mark in marks), default=0)
            say(self.text[: len(self.text) - keep])
            self.text = self.text[len(self.text) - keep :]
            if self.ended:
                return None
            yield

    def _say(self, text: str) -> None:
        if self._layout and not text.strip():
            self._blank += text
            return
        self.out.text += self._blank + text
        self._blank, self._layout = "", False

    def _think(self, text: str) -> None:
        self.out.reasoning += text

    def take(self, count: int) -> str:
        """Return the next ``count`` characters, as part of the call under way."""
        taken, self.text = self.text[:count], self.text[count:]
        self._raw.append(taken)
        return taken

    def next(self, skipped: str = " \t\r\n") -> Steps[str]:
        """Return the next character that is not ``skipped``, which stays; empty at the end."""
        self.skipped = ""
        while True:
            begin = self.text.lstrip(skipped)
            self.skipped += self.take(len(self.text) - len(begin))
            if self.text or self.ended:
                return self.text[:1]
            yield

    def follows(self, *marks: str) -> Steps[str]:
        """Return the one of ``marks`` that comes next; empty where none does."""
        while True:
            for mark in marks:
                if self.text.startswith(mark):
                    return mark
            if self.ended or not any(mark.startswith(self.text) for mark in marks):
                return ""
            yield

    def takes(self, *marks: str) -> Steps[str]:
        """Take the one of ``marks`` that comes next and return it; empty where none does."""
        mark = yield from self.follows(*marks)
        return self.take(len(mark)) if mark else ""

    def drops(self, mark: str) -> Steps[None]:
        """Take ``mark`` where it comes next, or what a text that ends there has of it."""
        if not (yield from self.takes(mark)) and self.ended and mark.startswith(self.text):
            self.take(len(self.text))
        self.forget()

    def back(self, count: int = 1) -> None:
        """Undo the last :meth:`take`, or so many of them."""
        taken = self._raw[len(self._raw) - count :]
        del self._raw[len(self._raw) - count :]
        self.text = "".join(taken) + self.text

    @property
    def taken(self) -> int:
        """How often the call under way has taken something."""
        return len(self._raw)

    def forget(self) -> None:
        """Leave out what was taken: it is neither text nor part of a call."""
        self._raw = []

    def up_to(self, *marks: str) -> Steps[tuple[str, str]]:
        """Take the text before the first of ``marks``, and the mark; raise NoCall without one."""
        taken: list[str] = []
        while True:
            found = [(at, mark) for mark in marks if (at := self.text.find(mark)) >= 0]
            if found:
                at, mark = min(found)
                taken.append(self.take(at))
                self.take(len(mark))
                return "".join(taken), mark
            if self.ended:
                raise Endless
            keep = max(overlap(self.text, mark) for mark in marks)
            taken.append(self.take(len(self.text) - keep))
            yield

    def bracketed(self, python: bool = False) -> Steps[tuple[str, str]]:
        """Take a JSON object or array, or what has brackets in Python.

        Returns its text, and the brackets that it lacks before a tag. Raises NoCall where the text
        ends first.
        """
        stack: list[str] = []
        quote, escaped, taken = "", False, list[str]()
        if (yield from self.next()) not in ("{", "[", "(" if python else "["):
            raise NoCall
        while True:
            at, end = 0, None
            while end is None and at < len(self.text):
                if escaped:
                    escaped, at = False, at + 1
                    continue
                inside = _IN_TEXT if quote == "'" else _IN_STRING
                outside = _OUTSIDE_PYTHON if python else _OUTSIDE
                mark = (inside if quote else outside).search(self.text, at)
                if mark is None:
                    break
                at, sign = mark.end(), mark[0]
                if quote:
                    escaped = sign == "\\"
                    quote = "" if sign == quote else quote
                elif sign in "\"'":
                    quote = sign
                elif sign in _CLOSERS:
                    stack.append(_CLOSERS[sign])
                elif sign == "<":
                    end = at - 1
                else:
                    stack.pop()
                    end = None if stack else at
            taken.append(self.take(len(self.text) if end is None else end))
            if end is not None:
                return "".join(taken), "".join(reversed(stack))
            if self.ended:
                raise Endless
            yield

    def opens(self, name: str, id_: str = "") -> None:
        """Give out the beginning of a call; :meth:`adds` gives its arguments."""
        self._raw, self._tagged = [], False
        self._blank, self._layout = "", True
        self.out.calls.append(ToolCall(id_ or new_id(), name, "", more=True))

    def adds(self, piece: str, more: bool = True) -> None:
        """Give out the next part of the arguments of the call that is open, or the last one."""
        if not piece:
            return
        if not self.out.calls:
            self.out.calls.append(ToolCall("", "", ""))
        part = self.out.calls[-1]
        self.out.calls[-1] = part._replace(arguments=part.arguments + piece, more=more)

    def streams(self, name: str, id_: str = "") -> Steps[bool]:
        """Give out a call whose arguments come next, an object in JSON.

        Returns whether it came whole; the text may end before.
        """
        self.opens(name, id_)
        pieces = JsonPieces()
        if (yield from self.next()) != "{":
            return False
        self.forget()
        while True:
            piece, self.text = pieces.push(self.text, self.ended and not self.finished)
            self.adds(piece, more=not pieces.whole)
            if self.finished and not pieces.whole:
                piece, self.text = pieces.end(self.text), ""
                self.adds(piece, more=not pieces.whole)
            if pieces.whole or self.ended:
                return pieces.whole
            yield

    def argument(self) -> Steps[tuple[str, str]]:
        """Take an argument of a call in Python; return it, and the comma or bracket that ends it.

        Raises NoCall where the text ends first.
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
                elif sign in _CLOSERS:
                    closers.append(_CLOSERS[sign])
                elif sign in ")]}":
                    closers.pop()
                if not quote and (not closers or (sign == "," and len(closers) == 1)):
                    end = at
                    break
            taken.append(self.take(len(self.text) if end is None else end))
            if end is not None:
                return "".join(taken), self.take(1)
            if self.ended:
                raise Endless
            yield

    def gives(self, calls: list[ToolCall]) -> None:
        """Give out calls that are whole."""
        self._raw, self._tagged = [], False
        self._blank, self._layout = "", True
        self.out.calls += calls

    def attempt(self, reading: Steps[None]) -> Steps[bool]:
        """Follow ``reading``, which gives out calls, or emit as text what it consumed since.

        If the text ended in it, all but its first piece is parsed again: a call may follow there.
        """
        try:
            yield from reading
        except NoCall as error:
            self.unread |= self._tagged
            self._tagged = False
            first, rest = (self._raw or [""])[0], "".join(self._raw[1:])
            if isinstance(error, Endless) and self._retries:
                self._retries -= 1
                self.text, rest = rest + self.text, ""
            self._raw = []
            self._say(first + rest)
            return False
        self._raw, self._tagged = [], False
        return True


Family = Callable[[Reader], Steps[None]]


class ToolCallParser:
    """Takes the calls of ``family`` out of a text that comes in pieces.

    Unless ``parallel``, the first call is the only one that is given out.
    """

    def __init__(self, family: Family, parallel: bool = True) -> None:
        self._reader = Reader()
        self._family = family
        self._steps: Steps[None] | None = family(self._reader)
        self._parallel = parallel
        self._given = 0

    @property
    def unread(self) -> bool:
        """Whether what a tag of the family began is no call, and stayed text."""
        return self._reader.unread

    def again(self) -> ToolCallParser:
        """Return a parser like this one for another text."""
        return ToolCallParser(self._family, self._parallel)

    def push(self, piece: str, last: bool = False, finished: bool = False) -> Parsed:
        """Return what ``piece`` makes certain, and all that is left where it is the ``last``.

        ``finished``: the model ended the text, so brackets that are open are missing.
        """
        self._reader.text += piece
        self._reader.ended |= last
        self._reader.finished |= finished
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        found, self._reader.out = self._reader.out, Parsed()
        if not self._parallel:
            for at, one in enumerate(found.calls):
                self._given += bool(one.id)
                if self._given > 1:
                    del found.calls[at:]
                    break
        return found


def call(name: object, arguments: object, id_: str = "") -> ToolCall:
    """Return a call; raise NoCall where the name is no text or the arguments are no object."""
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        arguments = load(arguments)
    if not isinstance(arguments, dict) or not isinstance(name, str):
        raise NoCall
    return ToolCall(id_ or new_id(), checked(name), written(arguments))


def written(value: Any) -> str:
    """Return a value in JSON; raise NoCall where it is nested too deeply."""
    try:
        told = json.dumps(value, ensure_ascii=False)
        # Half a character stays the escape that the model wrote.
        return told if _valid(told) else json.dumps(value)
    except RecursionError:
        raise NoCall from None


def checked(name: str) -> str:
    """Return the name of a tool without blanks around it; raise NoCall where it is none."""
    if not name.strip() or not _valid(name):
        raise NoCall
    return name.strip()


def new_id() -> str:
    """Return an id of a call in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def calls_of(value: Any) -> list[ToolCall]:
    """Return the calls that a JSON value holds: an object with a name, or a list of such."""
    if isinstance(value, list) and value:
        return [one for entry in value for one in calls_of(entry)]
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise NoCall
    arguments = value.get("arguments", value.get("parameters"))
    return [call(value.get("name"), arguments)]


def load(text: str) -> Any:
    """Return the value of JSON as models write it; raise NoCall where it is none."""
    try:
        return json.loads(text, strict=False, parse_float=_number, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        raise NoCall from None


def _number(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
