"""Tool calls in a model's text, as the Hermes and Qwen families write them.

<tool_call>
{"name": "get_tide", "arguments": {"port": "Hull"}}
</tool_call>
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

from plimsoll_engine.frontend.requests.detokenize import StopMatcher

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """``arguments`` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Parsed:
    """What a piece of text turned out to be: plain text, and calls that it completed.

    ``reasoning`` came before both.
    """

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""


class ToolCallParser:
    """Takes the calls out of a text that comes in pieces.

    A call is given out when it is whole; what only looks like one stays text, so that nothing is
    lost.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._matcher = StopMatcher((OPEN,))
        self._call: list[str] | None = None  # what followed OPEN, while inside

    def push(self, piece: str) -> Parsed:
        """Return what ``piece`` makes certain."""
        parsed = Parsed()
        while piece:
            whole = self._matcher.held + piece
            text, found = self._matcher.push(piece)
            if self._call is not None:
                self._call.append(text)
            elif text.strip() or not self.calls:
                parsed.text += text  # line breaks between calls are layout, not content
            if not found:
                break
            piece = whole[len(text) + len(OPEN if self._call is None else CLOSE) :]
            if self._call is None:
                self._call = []
            else:
                self._end(self._call, parsed)
                self._call = None
            self._matcher = StopMatcher((OPEN if self._call is None else CLOSE,))
        return parsed

    def finish(self) -> Parsed:
        """Return what is left when nothing follows; an unfinished call is text."""
        rest = self._matcher.finish()
        if self._call is None:
            return Parsed(rest)
        text, self._call = OPEN + "".join(self._call) + rest, None
        return Parsed(text)

    def _end(self, pieces: list[str], parsed: Parsed) -> None:
        text = "".join(pieces)
        call = _read(text)
        if call is None:
            parsed.text += OPEN + text + CLOSE
        else:
            self.calls += 1
            parsed.calls.append(call)


def _read(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    written = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{secrets.token_hex(12)}", call["name"], written)
