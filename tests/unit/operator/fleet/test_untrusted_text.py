"""Each text becomes one printable line, whatever a pod, a driver or a log says."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from plimsoll_operator.fleet.untrusted_text import (
    MAX_LINE_CHARS,
    join_last_lines,
    make_printable_line,
)


@given(st.text(max_size=5000), st.sampled_from([make_printable_line, join_last_lines]))
def test_what_a_pod_says_is_one_bounded_printable_line(
    text: str, cleaned: Callable[[str], str]
) -> None:
    found = cleaned(text)
    assert len(found) <= MAX_LINE_CHARS
    assert found.isprintable()
    assert found == found.strip()


def test_of_a_log_the_end_is_kept_and_of_a_sentence_the_beginning() -> None:
    assert join_last_lines("a\nb\nc\n\nd\n") == "b | c | d"
    assert join_last_lines("x" * 999 + "end").endswith("xend")
    assert make_printable_line("spec.x: " + "y" * 999).startswith("spec.x: y")
    assert make_printable_line("\x1b[31mred\x1b[0m \u202eevil\x00") == "red evil"
