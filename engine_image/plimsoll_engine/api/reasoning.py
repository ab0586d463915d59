"""The reasoning that models of the Qwen3 and DeepSeek-R1 families write before their answer.

<think>
Hull is a port in the north.
</think>
The tide is at nine.

Many templates end the prompt with the opening tag, so the text may begin inside. A text without the
closing tag was cut in its reasoning.
"""

from __future__ import annotations

from typing import NamedTuple

from plimsoll_engine.frontend.requests.detokenize import StopMatcher

OPEN, CLOSE = "<think>", "</think>"


class Split(NamedTuple):
    """What a piece of text turned out to be."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Splits a text that comes in pieces. It begins with reasoning."""

    def __init__(self) -> None:
        self._begun = False
        self._start = ""
        """What may be the beginning of :data:`OPEN`."""
        self._matcher: StopMatcher | None = StopMatcher((CLOSE,))
        """None once the reasoning is over."""

    @property
    def over(self) -> bool:
        """Whether the reasoning has ended."""
        return self._matcher is None

    def push(self, piece: str) -> Split:
        """Return what ``piece`` makes certain."""
        if not self._begun:
            self._start += piece
            begin = self._start.lstrip()
            if OPEN.startswith(begin):
                if begin != OPEN:
                    return Split()
                begin = ""
            elif begin.startswith(OPEN):
                begin = begin.removeprefix(OPEN)
            else:
                begin = self._start
            piece, self._start, self._begun = begin, "", True
        if self._matcher is None:
            return Split(content=piece)
        whole = self._matcher.held + piece
        reasoning, found = self._matcher.push(piece)
        if not found:
            return Split(reasoning)
        self._matcher = None
        return Split(reasoning, whole[len(reasoning) + len(CLOSE) :])

    def finish(self) -> Split:
        """Return what is left when nothing follows."""
        rest, self._start = self._start, ""
        matcher, self._matcher = self._matcher, None
        return Split(rest + ("" if matcher is None else matcher.finish()))


def closed(prompt: str) -> bool:
    """Whether ``prompt`` ends with reasoning that is over, so that the text has none."""
    return prompt.rstrip().endswith(CLOSE)
