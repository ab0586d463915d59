"""Streaming repair of the JSON arguments that models write.

The repair covers control characters and unknown escapes in strings, numbers such as NaN, Python's
constants, trailing commas, and missing or extra closing brackets.
"""

from __future__ import annotations

import json
import math
import re

_STRING_SPECIAL_PATTERN = re.compile(r'["\\\x00-\x1f]')
_ESCAPE_PATTERN = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_PARTIAL_ESCAPE_PATTERN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SEPARATORS_PATTERN = re.compile(r"[\s,:]+")
_WORD_PATTERN = re.compile(r'[^\s"{}\[\],:<]+')
JSON_BY_PYTHON_WORD = {"True": "true", "False": "false", "None": "null"}
# A longer number or white space is not held back until it is complete.
MAX_HELD_CHARACTERS = 64


class JsonRepairer:
    """Repairer of one JSON object. ``is_complete`` is True after the object's last bracket."""

    def __init__(self) -> None:
        self.is_complete = False
        self._closers: list[str] = []
        self._in_string = False

    def push(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Return the repaired part of ``text``, and the rest.

        The rest is text after the object, or text that cannot be repaired until more arrives. If
        ``is_last`` is True, no more text follows.
        """
        found: list[str] = []
        at = 0
        while at < len(text) and not self.is_complete:
            step = (
                self._read_string(text, at, is_last)
                if self._in_string
                else self._read_structure(text, at, is_last)
            )
            if step is None:
                break
            written, at = step
            found.append(written)
        return "".join(found), text[at:]

    def close(self, text: str) -> str:
        """Return the last piece ``text`` after its repair."""
        closers = "" if self._in_string else "".join(reversed(self._closers))
        return self.push(text + closers, is_last=True)[0]

    def _read_string(self, text: str, start: int, is_last: bool) -> tuple[str, int] | None:
        mark = _STRING_SPECIAL_PATTERN.search(text, start)
        if mark is None:
            return text[start:], len(text)
        begin, end, sign = text[start : mark.start()], mark.end(), mark[0]
        if sign == '"':
            self._in_string = False
        elif sign != "\\":
            sign = json.dumps(sign)[1:-1]
        elif (escape := _ESCAPE_PATTERN.match(text, mark.start())) is not None:
            sign, end = escape[0], escape.end()
        elif (partial := _PARTIAL_ESCAPE_PATTERN.fullmatch(text, mark.start())) is not None:
            if not is_last:
                return (begin, partial.start()) if begin else None
        else:
            sign = "" if text[end] == "'" else "\\\\"
        return begin + sign, end

    def _read_structure(self, text: str, start: int, is_last: bool) -> tuple[str, int] | None:
        sign = text[start]
        if sign == '"':
            self._in_string = True
        elif sign in "{[":
            self._closers.append("}" if sign == "{" else "]")
        elif sign in "}]":
            return self._close_bracket(sign), start + 1
        elif sign == "<":
            return self._close_all_brackets(), start
        elif (run := _SEPARATORS_PATTERN.match(text, start)) is not None:
            rest = text[run.end() : run.end() + 1]
            if "," in run[0] and not rest and not is_last and len(run[0]) < MAX_HELD_CHARACTERS:
                return None
            comma = rest and rest in "}]<" and "," in run[0]
            return run[0].replace(",", "", 1) if comma else run[0], run.end()
        elif (word := _WORD_PATTERN.match(text, start)) is not None:
            if word.end() == len(text) and not is_last and len(word[0]) < MAX_HELD_CHARACTERS:
                return None
            return _convert_word_to_json(word[0]), word.end()
        return sign, start + 1

    def _close_bracket(self, bracket: str) -> str:
        # Closes inner brackets first. Returns "" if the bracket closes no open one.
        if bracket not in self._closers:
            return ""
        closed = ""
        while not closed.endswith(bracket):
            closed += self._closers.pop()
        self.is_complete = not self._closers
        return closed

    def _close_all_brackets(self) -> str:
        closed = "".join(reversed(self._closers))
        self._closers, self.is_complete = [], True
        return closed


def _convert_word_to_json(word: str) -> str:
    # The word is a number or a constant.
    if word.lstrip("-").isdigit() or len(word) >= MAX_HELD_CHARACTERS:
        return word
    try:
        return word if math.isfinite(float(word)) else "null"
    except ValueError:
        return JSON_BY_PYTHON_WORD.get(word, word)
