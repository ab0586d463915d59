"""JSON of other programs: one error for all bad input, and a bound on its depth."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.decoding import MAX_DEPTH, MalformedError, decode, is_nested_deeper


class Page(msgspec.Struct):
    count: int = 0
    name: str = ""


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"name": "\xff"}',
        b'{"name": "\\ud800"}',
        b'{"count": 1e999}',
        b'{"count": ' + b"9" * 5000 + b"}",
        b'{"later": ' + nested(1000) + b"}",
        b'{"later": ' + b"[" * 100_000,
        b'{"later": ' + b'{"a":' * 100_000,
    ],
)
def test_every_fault_is_the_one_error(data: bytes) -> None:
    with pytest.raises(MalformedError):
        decode(data, Page)


def test_a_depth_that_no_answer_has_is_refused_wherever_it_stands() -> None:
    assert decode(b'{"later": ' + nested(MAX_DEPTH - 1) + b', "count": 3}', Page).count == 3
    with pytest.raises(MalformedError, match=f"more than {MAX_DEPTH} levels"):
        decode(b'{"later": ' + nested(MAX_DEPTH) + b', "count": 3}', Page)


def test_it_holds_in_a_thread_with_a_small_stack() -> None:
    """Msgspec alone ends the process there: it recurses before Python looks at the stack."""
    found: list[str] = []

    def run() -> None:
        try:
            decode(b'{"later": ' + nested(1000) + b"}", Page)
        except MalformedError as error:
            found.append(str(error))

    before = threading.stack_size(128 << 10)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join(10)
    assert found


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab[]{}"\\\n', max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('"[{\\'), inner, max_size=3)
    ),
    max_leaves=40,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(_values)
def test_brackets_in_strings_are_no_depth(value: object) -> None:
    data = json.dumps(value).encode()
    for limit in range(depth(value) + 2):
        assert is_nested_deeper(data, limit) == (depth(value) > limit)


def test_a_page_of_brackets_is_judged_piece_by_piece() -> None:
    text = b'["' + b"[" * 200_000 + b'", ' + b"[{}]," * 50_000 + b"0]"
    assert not is_nested_deeper(text, 3)
    assert is_nested_deeper(text, 2)
