"""Parser of the reasoning that Qwen3 and DeepSeek-R1 models write before their answer.

An output is, for example:

    <think>Hull is a port in the north.</think>The tide is at nine.

Many templates end the prompt with the opening tag, so the output may begin within the reasoning.
Without a closing tag, the whole output is reasoning.
"""

from __future__ import annotations

from typing import NamedTuple

from plimsoll_engine.frontend.requests.detokenize import StopMatcher

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"


class ParsedText(NamedTuple):
    """Piece of an output, split into reasoning and content."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Streaming parser that splits an output into reasoning and content."""

    def __init__(self) -> None:
        self._started = False
        # Text that may be the beginning of the opening tag.
        self._start = ""
        # None after the reasoning has ended.
        self._matcher: StopMatcher | None = StopMatcher((CLOSE_TAG,))

    @property
    def has_ended(self) -> bool:
        """Whether the reasoning has ended."""
        return self._matcher is None

    def push(self, piece: str) -> ParsedText:
        """Add a piece of text. Return the reasoning and the content that can be sent now."""
        if not self._started:
            self._start += piece
            rest = self._start.lstrip()
            if OPEN_TAG.startswith(rest):
                if rest != OPEN_TAG:
                    return ParsedText()
                rest = ""
            elif rest.startswith(OPEN_TAG):
                rest = rest.removeprefix(OPEN_TAG)
            else:
                rest = self._start
            piece, self._start, self._started = rest, "", True
        if self._matcher is None:
            return ParsedText(content=piece)
        whole = self._matcher.held_text + piece
        reasoning, found = self._matcher.push(piece)
        if not found:
            return ParsedText(reasoning)
        self._matcher = None
        return ParsedText(reasoning, whole[len(reasoning) + len(CLOSE_TAG) :])

    def finish(self) -> ParsedText:
        """Return the text that was held back, at the end of the output."""
        rest, self._start = self._start, ""
        matcher, self._matcher = self._matcher, None
        return ParsedText(rest + ("" if matcher is None else matcher.finish()))


def ends_with_closed_reasoning(prompt: str) -> bool:
    """Report whether ``prompt`` ends with complete reasoning, so that the output has none."""
    return prompt.rstrip().endswith(CLOSE_TAG)
