"""Text depends on the tokens alone: not on steps, not on epochs.

Tests ``frontend/requests/detokenize.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from plimsoll_engine.frontend.requests.detokenize import (
    MAX_PENDING_TOKENS,
    REPLACEMENT_CHARACTER,
    Detokenizer,
    StopMatcher,
    find_prompt_context,
    find_special_ids,
)
from tests.byte_text import FIRST_BYTE, byte_level, llama_2

BYTES = byte_level()
WORDS = ("▁hi", "▁there", "hi", "Say", "▁Say", "ä", "日")
LLAMA = llama_2(WORDS)
LLAMA_WITHOUT_STRIP = llama_2(WORDS, strip=False)
BOS, EOS = 1, 2

TEXTS = [
    "hi₿a", "a 🦭 b", "👨‍👩‍👧‍👦!", "𝔘𝔫𝔦code", "ẞ鬱ß", "한국어 텍스트", "🇩🇪🇫🇷",
    "héllo", "日本の首都", "a\ufffdb",
]  # fmt: skip


def token(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.token_to_id(text)
    assert found is not None
    return found


def detokenize(tokenizer: Tokenizer, ids: Iterable[int], prompt: Sequence[int] = ()) -> list[str]:
    skipped = find_special_ids(tokenizer)
    detokenizer = Detokenizer(tokenizer, find_prompt_context(tokenizer, prompt, skipped), skipped)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@given(st.text(max_size=200))
def test_pieces_make_the_text(text: str) -> None:
    given = text.encode("utf-8", errors="surrogatepass")
    assert "".join(detokenize(BYTES, given)) == given.decode("utf-8", errors="replace")


@given(st.text(max_size=100))
def test_no_piece_holds_half_a_character(text: str) -> None:
    pieces = detokenize(BYTES, text.replace(REPLACEMENT_CHARACTER, "").encode())
    assert not any(REPLACEMENT_CHARACTER in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [LLAMA, LLAMA_WITHOUT_STRIP])
@pytest.mark.parametrize("text", TEXTS)
def test_characters_made_of_byte_tokens_are_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text.replace(" ", "▁")).ids
    pieces = detokenize(tokenizer, ids, tokenizer.encode("Say").ids)
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) >= len(set(text)) - 1, "nothing was streamed"


@given(st.text(max_size=60), st.text(min_size=1, max_size=9))
def test_a_continuation_is_what_the_whole_has_more_than_its_prompt(text: str, prompt: str) -> None:
    before = LLAMA.encode(prompt.replace(" ", "▁")).ids
    after = LLAMA.encode(text.replace(" ", "▁")).ids
    whole = LLAMA.decode(before + after)
    if prompt.strip(" ") and whole.startswith(LLAMA.decode(before)):
        assert LLAMA.decode(before) + "".join(detokenize(LLAMA, after, before)) == whole


def test_a_decoder_takes_the_first_space_of_a_text_alone() -> None:
    there = [token(LLAMA, "▁hi"), token(LLAMA, "▁there")]
    said = token(LLAMA, "Say")
    assert "".join(detokenize(LLAMA, there)) == "hi there"
    assert "".join(detokenize(LLAMA, there, [BOS])) == "hi there"
    assert "".join(detokenize(LLAMA, there, [said])) == " hi there"
    assert "".join(detokenize(LLAMA, there, [said, BOS, EOS])) == " hi there"
    assert "".join(detokenize(LLAMA, [token(LLAMA, "▁"), *there], [said])) == "  hi there"


def test_the_half_character_of_a_prompt_is_no_text_of_the_answer() -> None:
    euro = [FIRST_BYTE + byte for byte in "€".encode()]
    letter = token(LLAMA, "a")
    assert "".join(detokenize(LLAMA, [letter], [letter, *euro[:2]])) == "a"
    assert "".join(detokenize(LLAMA, [letter], [letter, *euro])) == "a"


def test_invalid_bytes_take_no_text_with_them() -> None:
    euro = [FIRST_BYTE + byte for byte in "€".encode()]
    broken, letter = FIRST_BYTE + 0xF0, token(LLAMA, "a")
    pieces = detokenize(LLAMA, [letter, *euro, broken, letter, letter, *euro, letter])
    assert "".join(pieces) == f"a€{REPLACEMENT_CHARACTER}aa€a"


@given(st.lists(st.integers(0, 255), max_size=MAX_PENDING_TOKENS))
def test_invalid_bytes_make_the_same_text_as_at_once(ids: list[int]) -> None:
    assert "".join(detokenize(BYTES, ids)) == BYTES.decode(ids)


@pytest.mark.parametrize(("tokenizer", "number"), [(BYTES, 0x80), (LLAMA, 0x80), (LLAMA, EOS)])
def test_tokens_without_text_cost_no_growing_window(tokenizer: Tokenizer, number: int) -> None:
    detokenizer, longest = Detokenizer(tokenizer, skipped=find_special_ids(tokenizer)), 0
    for _ in range(1000):
        detokenizer.push(number)
        longest = max(longest, len(detokenizer._pending))
    assert longest <= MAX_PENDING_TOKENS
    assert detokenizer.finish().count(REPLACEMENT_CHARACTER) <= MAX_PENDING_TOKENS


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


@given(
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=3), max_size=12),
)
def test_no_more_is_held_back_than_may_begin_a_stop(stops: list[str], pieces: list[str]) -> None:
    matcher, whole, sent = StopMatcher(stops), "", ""
    for piece in pieces:
        whole += piece
        text, stopped = matcher.push(piece)
        sent += text
        assert stopped == any(stop in whole for stop in stops)
        if stopped:
            return
        held = max(
            size for stop in stops for size in range(len(stop)) if whole.endswith(stop[:size])
        )
        assert sent == whole[: len(whole) - held]


def test_long_stops_take_no_time_for_each_token() -> None:
    """The longest and most that a request may have; each step pushes a piece to each choice."""
    matcher = StopMatcher(["a" * 1023 + "b"] + [chr(ord("c") + n) * 1024 for n in range(15)])
    before = time.process_time()
    for _ in range(2000):
        assert matcher.push("a")[1] is False
    assert time.process_time() - before < 1  # 4 s, where each length was compared
