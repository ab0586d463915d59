"""Prompt lookup finds what a search of the whole text finds.

Tests ``core/speculation/ngram.py``.
"""

from __future__ import annotations

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from plimsoll_engine.core.speculation.ngram import MAX_COMPARED_POSITIONS, NgramIndex


def searched(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """What :meth:`NgramIndex.propose` says, from its description alone."""
    best = (0, -1)
    for end in range(shortest, len(tokens)):
        matched = 0
        while matched < min(longest, end) and tokens[end - 1 - matched] == tokens[-1 - matched]:
            matched += 1
        if matched >= shortest:
            best = max(best, (matched, end))
    if best[1] < 0:
        return []
    text = list(tokens)
    for place in range(best[1], best[1] + count):
        text.append(text[place])
    return text[len(tokens) :]


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=MAX_COMPARED_POSITIONS),
    shortest=st.integers(1, 4),
    more=st.integers(0, 4),
    count=st.integers(1, 6),
    cuts=st.lists(st.integers(1, 7), max_size=40),
)
def test_it_finds_what_a_search_finds(
    tokens: list[int], shortest: int, more: int, count: int, cuts: list[int]
) -> None:
    index = NgramIndex(shortest, len(tokens))
    length = 0
    for cut in [*cuts, len(tokens)]:  # the text grows by pieces
        length = min(len(tokens), length + cut)
        while index.extend(tokens[:length], 3):
            pass
    expected = searched(tokens, shortest, shortest + more, count)
    assert index.propose(tokens, shortest + more, count) == expected


def test_a_loop_goes_round() -> None:
    index = NgramIndex(2, 100)
    tokens = [9, 1, 2, 3, 1, 2, 3, 1]
    index.extend(tokens, 100)
    assert index.propose(tokens, 4, 7) == [2, 3, 1, 2, 3, 1, 2]


def test_a_part_of_a_text_is_looked_up_while_the_rest_waits() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(1000) for _ in range(500)] * 2
    index = NgramIndex(2, len(tokens))
    assert index.extend(tokens, 300) == 300
    assert index.propose(tokens[:600], 4, 3) == tokens[600:603]  # what follows token 100
    assert index.propose(tokens[:900], 4, 3) == []  # token 400 is not indexed yet
    assert index.extend(tokens, 10_000) == len(tokens) - 2 - 300


def test_cost_and_memory_are_bounded_on_the_worst_text() -> None:
    """One token alone, whose runs all have one place in the table, and then another one."""
    length = 100_000
    tokens = [7] * (length - 2) + [8, 7]
    index = NgramIndex(1, length)
    index.extend(tokens, length)
    assert index.nbytes <= (128 << 10) + 4 * length
    begun = time.perf_counter()
    for _ in range(100):
        assert len(index.propose(tokens, 64, 4)) == 4
    assert time.perf_counter() - begun < 1.0  # a walk through all would take 100 times as long
