"""The JSON object of a call's arguments, given on as it comes in, with its slips fixed. Pure.

Fixed are raw control characters and unknown escapes in texts, numbers that JSON lacks, Python's
names of constants, a comma before a closing bracket, and closing brackets that are missing or
spare. Anything else is given on as it is.
"""

from __future__ import annotations

import json
import math
import re

_IN_TEXT = re.compile(r'["\\\x00-\x1f]')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_BETWEEN = re.compile(r"[\s,:]+")
_WORD = re.compile(r'[^\s"{}\[\],:<]+')
_WORDS = {"True": "true", "False": "false", "None": "null"}
LONGEST = 64
"""Characters that a number or a run of blanks may have to be held back until its end."""


class JsonPieces:
    """Takes a text that begins with an opening brace; ``whole`` once that is closed.

    A ``<`` outside a text closes it as well: a tag came too early.
    """

    def __init__(self) -> None:
        self.whole = False
        self._closers: list[str] = []
        self._in_text = False

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """Return what ``text`` adds to the object, and what is left of it.

        The rest follows the object, or needs more of the text. ``last``: none will come.
        """
        found: list[str] = []
        at = 0
        while at < len(text) and not self.whole:
            step = self._text(text, at, last) if self._in_text else self._outside(text, at, last)
            if step is None:
                break
            written, at = step
            found.append(written)
        return "".join(found), text[at:]

    def end(self, text: str) -> str:
        """Return what the last ``text`` adds, and the brackets that it lacks outside a text."""
        closers = "" if self._in_text else "".join(reversed(self._closers))
        return self.push(text + closers, last=True)[0]

    def _text(self, text: str, at: int, last: bool) -> tuple[str, int] | None:
        mark = _IN_TEXT.search(text, at)
        if mark is None:
            return text[at:], len(text)
        begin, end, sign = text[at : mark.start()], mark.end(), mark[0]
        if sign == '"':
            self._in_text = False
        elif sign != "\\":
            sign = json.dumps(sign)[1:-1]
        elif (escape := _ESCAPE.match(text, mark.start())) is not None:
            sign, end = escape[0], escape.end()
        elif (begun := _ESCAPE_BEGUN.fullmatch(text, mark.start())) is not None:
            if not last:
                return (begin, begun.start()) if begin else None
        else:
            sign = "" if text[end] == "'" else "\\\\"
        return begin + sign, end

    def _outside(self, text: str, at: int, last: bool) -> tuple[str, int] | None:
        sign = text[at]
        if sign == '"':
            self._in_text = True
        elif sign in "{[":
            self._closers.append("}" if sign == "{" else "]")
        elif sign in "}]":
            return self._close(sign), at + 1
        elif sign == "<":
            return self._close_all(), at
        elif (run := _BETWEEN.match(text, at)) is not None:
            rest = text[run.end() : run.end() + 1]
            if "," in run[0] and not rest and not last and len(run[0]) < LONGEST:
                return None
            comma = rest and rest in "}]" and "," in run[0]
            return run[0].replace(",", "", 1) if comma else run[0], run.end()
        elif (word := _WORD.match(text, at)) is not None:
            if word.end() == len(text) and not last and len(word[0]) < LONGEST:
                return None
            return _known(word[0]), word.end()
        return sign, at + 1

    def _close(self, sign: str) -> str:
        """Return ``sign`` after what must be closed before it; nothing where it closes nothing."""
        if sign not in self._closers:
            return ""
        closed = ""
        while not closed.endswith(sign):
            closed += self._closers.pop()
        self.whole = not self._closers
        return closed

    def _close_all(self) -> str:
        closed = "".join(reversed(self._closers))
        self._closers, self.whole = [], True
        return closed


def _known(word: str) -> str:
    """Return a number or a name as JSON has it."""
    if word.lstrip("-").isdigit() or len(word) >= LONGEST:
        return word
    try:
        return word if math.isfinite(float(word)) else "null"
    except ValueError:
        return _WORDS.get(word, word)
