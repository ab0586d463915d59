"""Reasoning and answer come apart the same however the text is cut, and nothing else is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plimsoll_engine.api.reasoning import (
    CLOSE_TAG,
    OPEN_TAG,
    ReasoningParser,
    ends_with_closed_reasoning,
)

PARTS = st.sampled_from([OPEN_TAG, CLOSE_TAG, "<thi", "nk>", "</", "<", "\n", " ", "text", "é"])


def parse(pieces: list[str]) -> tuple[str, str]:
    parser = ReasoningParser()
    found = [parser.push(piece) for piece in pieces] + [parser.finish()]
    assert parser.finish() == ("", "")
    return "".join(one.reasoning for one in found), "".join(one.content for one in found)


@given(parts=st.lists(PARTS, max_size=8), cuts=st.lists(st.integers(0, 60), max_size=12))
@example(parts=["\n", OPEN_TAG, "text", CLOSE_TAG, "text", CLOSE_TAG], cuts=[3, 6, 9, 15, 18, 20])
def test_the_cuts_do_not_matter(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    found = parse([text[a:b] for a, b in pairwise(places)])
    assert found == parse([text])
    begun = text.lstrip().startswith(OPEN_TAG)
    inner = text.lstrip().removeprefix(OPEN_TAG) if begun else text
    reasoning, _, content = inner.partition(CLOSE_TAG)
    assert found == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nso", "\nwhy\n", "\n\nso"),
        ("why</think>so", "why", "so"),  # the template has written the opening tag
        ("why", "why", ""),  # cut before its answer
        ("</think>so", "", "so"),
        ("why</think>so <think> and </think>", "why", "so <think> and </think>"),
        ("", "", ""),
    ],
)
def test_what_is_reasoning(text: str, reasoning: str, content: str) -> None:
    assert parse([text]) == parse(list(text)) == (reasoning, content)


def test_a_prompt_may_have_closed_it() -> None:
    assert ends_with_closed_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not ends_with_closed_reasoning("<|im_start|>assistant\n<think>\n")
    assert not ends_with_closed_reasoning(
        "what does </think> mean?<|im_end|>\n<|im_start|>assistant\n"
    )
