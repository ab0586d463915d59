"""Text depends on the tokens alone: not on steps, not on epochs.

Tests ``frontend/requests/detokenize.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from plimsoll_engine.frontend.requests.detokenize import MAX_WINDOW, Detokenizer, StopMatcher


def decode_bytes(ids: Sequence[int]) -> str:
    """A byte-level tokenizer: the token is the byte."""
    return bytes(ids).decode("utf-8", errors="replace")


def decode_words(ids: Sequence[int]) -> str:
    """A tokenizer of the sentencepiece kind: a word's leading space is lost at the beginning."""
    return "".join(f" w{i}" for i in ids).lstrip(" ")


def detokenize(ids: Sequence[int], decode: object = decode_bytes) -> list[str]:
    detokenizer = Detokenizer(decode)  # type: ignore[arg-type]
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@given(st.text(max_size=200))
def test_pieces_make_the_text(text: str) -> None:
    pieces = detokenize(text.encode("utf-8", errors="surrogatepass"))
    assert "".join(pieces) == decode_bytes(text.encode("utf-8", errors="surrogatepass"))


@given(st.text(max_size=100))
def test_no_piece_holds_half_a_character(text: str) -> None:
    assert not any("\ufffd" in piece for piece in detokenize(text.replace("\ufffd", "").encode()))


@given(st.lists(st.integers(0, 255), max_size=MAX_WINDOW))
def test_invalid_bytes_make_the_same_text_as_at_once(ids: list[int]) -> None:
    assert "".join(detokenize(ids)) == decode_bytes(ids)


def test_endless_invalid_bytes_are_let_go_and_cost_no_growing_window() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes(ids)

    pieces = detokenize([0x80] * 1000, decode)
    assert len("".join(pieces)) >= 1000 - 1
    assert longest <= 2 * MAX_WINDOW + 2


@given(st.lists(st.integers(0, 99), max_size=50))
def test_spaces_between_words_survive(ids: list[int]) -> None:
    assert "".join(detokenize(ids, decode_words)) == decode_words(ids)


@given(
    st.text(alphabet="abc", max_size=60),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 7), min_size=1, max_size=60),
)
def test_stop_strings_cut_alike_however_the_text_is_split(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    def run(pieces: list[str]) -> tuple[str, bool]:
        matcher, given_out = StopMatcher(stops), ""
        for piece in pieces:
            out, stopped = matcher.push(piece)
            given_out += out
            if stopped:
                return given_out, True
        return given_out + matcher.finish(), False

    pieces, at = list[str](), 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    # The stop that is complete first wins, whichever way the text came.
    assert run(list(text)) == run([c for piece in pieces for c in piece])
    out, stopped = run(pieces)
    assert stopped == any(stop in text for stop in stops)
    assert text.startswith(out)
    assert not any(stop in out for stop in stops)
