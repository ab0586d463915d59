"""Tool calls come out of a text the same however it is cut, and nothing else is lost."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from plimsoll_engine.api.tool_calls import CLOSE, OPEN, ToolCallParser

PARTS = st.sampled_from(
    [
        OPEN, CLOSE, "<tool", "_call>", "</", "<", "\n", " ", "text", "é",
        '{"name": "f", "arguments": {"a": [1, "</x>"]}}', '{"name": "g"}', '{"name": 7}', "{",
        OPEN + '\n{"name": "h", "arguments": {}}\n' + CLOSE,
    ]
)  # fmt: skip


def parse(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser()
    text, calls = "", []
    for piece in pieces:
        parsed = parser.push(piece)
        text += parsed.text
        calls += parsed.calls
    rest = parser.finish()
    assert parser.finish().text == ""
    return text + rest.text, [(call.name, call.arguments) for call in calls + rest.calls]


@given(parts=st.lists(PARTS, max_size=8), cuts=st.lists(st.integers(0, 200), max_size=12))
@example(parts=[OPEN, '{"name": "g"}', CLOSE, "\n"], cuts=[5, 12, 20, 24, 27])
def test_the_cuts_do_not_matter(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    cut_text, cut_calls = parse(pieces)
    whole_text, whole_calls = parse([text])
    assert cut_calls == whole_calls
    # Blank pieces after a call are layout; where they are cut decides which blanks are pieces.
    assert cut_text.split() == whole_text.split()
    if not whole_calls:
        assert cut_text == whole_text == text


def test_calls_between_texts() -> None:
    first = OPEN + '\n{"name": "tide", "arguments": {"port": "Hüll"}}\n' + CLOSE
    text, calls = parse(["Let me see.\n", first, "\n", OPEN + '{"name": "wind"}' + CLOSE])
    assert text == "Let me see.\n"
    assert calls == [("tide", '{"port": "Hüll"}'), ("wind", "{}")]
    assert json.loads(calls[0][1]) == {"port": "Hüll"}


def test_what_only_looks_like_a_call_stays_text() -> None:
    for text in (
        OPEN + "not json" + CLOSE,
        OPEN + '{"name": "f", "arguments": "a string"}' + CLOSE,
        OPEN + '{"name": "cut short", "argu',
        "a <tool",
        OPEN + "[" * 100_000 + CLOSE,
    ):
        assert parse([text]) == (text, [])


def test_a_long_call_takes_time_in_its_length_alone() -> None:
    argument = "word " * 40_000
    call = json.dumps({"name": "f", "arguments": {"text": argument}})
    pieces = [OPEN, *(call[i : i + 3] for i in range(0, len(call), 3)), CLOSE]
    text, calls = parse(pieces)
    assert text == ""
    assert json.loads(calls[0][1])["text"] == argument
