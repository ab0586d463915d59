"""Tokens to text, a piece at a time: whole characters only, and nothing past a stop string.

Text depends on the sequence of tokens alone, never on how it was split into steps or epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so it is complete after four tokens at the latest. A longer
# tail that still ends in the replacement character is invalid for good, and is let go.
MAX_WINDOW = 32


class Detokenizer:
    """Decodes a window of the last tokens only: the cost of a token does not grow with the text.

    The window begins some tokens before what was already given out, since tokenizers drop or add
    a space at the very beginning of a text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._context = 0  # tokens of the window that only give context
        self._given = 0  # characters of the window's text that were given out

    def push(self, token_id: int) -> str:
        """Return the text that became certain with ``token_id``."""
        self._window.append(token_id)
        text = self._decode(self._window)
        incomplete = text.endswith(REPLACEMENT)
        if incomplete and len(self._window) - self._context <= MAX_WINDOW:
            text = text[:-1]
            incomplete = True
        else:
            incomplete = False
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        if not incomplete and piece:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._given = len(self._decode(self._window))
        return piece

    def finish(self) -> str:
        """Return what is left when no token follows: an unfinished character, as a replacement."""
        return self._decode(self._window)[self._given :]


class StopMatcher:
    """Cuts a text before the first stop string, and holds back what may become one.

    With ``include`` it cuts after it.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    @property
    def held(self) -> str:
        """Text that may be the begin of a stop string and is kept back."""
        return self._held

    def push(self, piece: str) -> tuple[str, bool]:
        """Return the text that may be given out, and whether a stop string was found."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            at, self.found = min(found, key=lambda one: one[0])
            return text[: at + len(self.found) if self._include else at], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """Return the text that was kept back: no stop string can become of it any more."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
