"""The request log and what waits to be sent: bounded, carried over, and free of cycles.

Tests ``frontend/requests/request_log.py``, ``frontend/workers/outbox.py`` and
``messages/choices.py``.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_engine.api.chat_choice import ChatChoice
from plimsoll_engine.frontend.requests.detokenize import Detokenizer
from plimsoll_engine.frontend.requests.request_log import (
    Delta,
    Generation,
    QueueFullError,
    RequestFailedError,
    RequestLog,
    StopRules,
    TokenLogprobs,
)
from plimsoll_engine.frontend.workers.outbox import Outbox
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.choices import MAX_JOINED_TOKENS, split_choices
from plimsoll_engine.messages.framing import LENGTH_PREFIX
from plimsoll_engine.messages.worker_ipc import Abort, Logprobs, Media, Sampling, Stop, Submit
from tests.byte_text import FIRST_BYTE, byte_level, bytes_text, llama_2


def generation(name: str = "a", stops: Sequence[str] = ()) -> Generation:
    return Generation(name, [1, 2], Sampling(max_tokens=9, seed=4), bytes_text(), StopRules(stops))


def test_a_full_log_refuses() -> None:
    log = RequestLog(1)
    log.admit(generation("a"))
    with pytest.raises(QueueFullError, match="--max-queued"):
        log.admit(generation("b"))
    assert log.release("a") is not None
    assert log.release("a") is None
    log.admit(generation("b"))


def test_the_choices_of_a_request_are_admitted_together_or_not() -> None:
    log = RequestLog(3)
    log.admit(generation("a"), generation("b"))
    with pytest.raises(QueueFullError):
        log.admit(generation("c"), generation("d"))
    assert len(log) == 2


class CountedTokens(list[int]):
    """Counts the tokens that are read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()

    def __contains__(self, token: object) -> bool:
        self.read += len(self)
        return super().__contains__(token)


@pytest.mark.parametrize("end", [None, 1_500])
def test_the_end_of_the_reasoning_costs_one_look_at_each_token(end: int | None) -> None:
    one = generation()
    one.output_ids = tokens = CountedTokens()
    for number in range(3_000):
        tokens.append(7 if number == end else 1)
        assert one.count_tokens_before(7) == (len(tokens) if end is None or number < end else end)
    assert tokens.read <= 3_000


def test_no_stop_string_is_looked_for_before_min_tokens() -> None:
    async def run() -> None:
        sampling = Sampling(max_tokens=9, min_tokens=3)
        one = Generation("a", [1], sampling, bytes_text(), StopRules(["b"]))
        for token in "abcdbe":
            one.push(ord(token), None)
        delta = one.take()
        assert delta is not None
        assert delta[:2] == ("abcd", "stop")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("rules", "text", "reason"),
    [
        (StopRules(["cd", "x"]), "ab", "cd"),
        (StopRules(["x", "cd"], include=True), "abcd", "cd"),
        (StopRules(["e", "bc"], include=True), "abc", "bc"),
        (StopRules(), "abcde", ord("f")),
        (StopRules(include=True), "abcdef", ord("f")),
        (StopRules(["f"], include=True), "abcdef", "f"),
    ],
)
def test_a_text_ends_before_what_ends_it_or_after_it(
    rules: StopRules, text: str, reason: str | int
) -> None:
    async def run() -> None:
        one = Generation("a", [1], Sampling(9, stop_token_ids=[ord("f")]), bytes_text(), rules)
        for token in "abcdef":
            one.push(ord(token), "stop" if token == "f" else None)
        delta = one.take()
        assert delta is not None
        assert (delta.text, delta.finish_reason, delta.stop_reason) == (text, "stop", reason)

    asyncio.run(run())


def test_what_is_carried_is_what_runs() -> None:
    log = RequestLog(9)
    for name in "abcd":
        log.admit(generation(name))
    running, finished, failed, parked = (log.get(name) for name in "abcd")
    assert running is not None
    assert finished is not None
    assert failed is not None
    assert parked is not None
    running.push(ord("x"), None)
    finished.push(ord("x"), "stop")
    failed.fail(RequestFailedError("error", "why"))
    parked.parked = True
    sampling, arrived = Sampling(max_tokens=9, seed=4), running.times.arrived
    for attempt in (1, 2):  # each submission has a number of its own
        assert [g.create_submission() for g in log.list_carried_over()] == [
            Submit("a", [1, 2], sampling, [ord("x")], arrived=arrived, attempt=attempt)
        ]


def test_a_stop_string_over_two_tokens_ends_the_text_before_it() -> None:
    async def run() -> None:
        one = generation(stops=["lo w"])
        for token in "hello world":
            one.push(ord(token), None)
        assert one.take() == Delta("hel", "stop", [], [ord(c) for c in "hello w"], "lo w")
        assert one.output_ids == [ord(c) for c in "hello w"]

    asyncio.run(run())


def test_a_request_dies_by_reference_counting_alone() -> None:
    async def run() -> None:
        gc.disable()
        try:
            for end in ("finish", "fail", "leave"):
                log = RequestLog(4)
                one = generation(stops=["zz"])
                log.admit(one)
                one.push(ord("z"), "length" if end == "finish" else None)
                if end == "fail":
                    one.fail(RequestFailedError("error", "why"))
                    with pytest.raises(RequestFailedError):
                        one.take()
                gone = weakref.ref(one)
                log.release("a")
                del one
                assert gone() is None, end
        finally:
            gc.enable()

    asyncio.run(run())


@given(st.lists(st.tuples(st.sampled_from(["submit", "abort", "take"]), st.integers(0, 5))))
def test_the_outbox_never_outgrows_the_live_requests(steps: list[tuple[str, int]]) -> None:
    outbox, live, sent, prompt = Outbox(), set[int](), set[int](), [1]
    for action, number in steps:
        if action == "submit" and number not in live:
            live.add(number)
            outbox.put(Submit(str(number), prompt, Sampling(max_tokens=number % 3)))
        elif action == "abort" and number in live:
            live.discard(number)
            outbox.put(Abort(str(number)))
        elif action == "take":
            message = outbox.take()
            if isinstance(message, Submit):
                sent |= {int(one.request_id) for one in split_choices(message)}
            elif isinstance(message, Abort):
                assert int(message.request_id) in sent  # never of what the worker does not know
                sent.discard(int(message.request_id))
        assert len(outbox) <= len(live) + len(sent)


def choices_of(prompt: list[int], count: int) -> list[Generation]:
    """As they come from a body; each has had a token already."""
    image = Media("image", b"k", 0, 1, 1, [1 << 16], "uint8", b"x" * (1 << 16))
    found = [
        Generation(f"c-{number}", prompt, Sampling(9, seed=number), bytes_text(), media=[image])
        for number in range(count)
    ]
    for number, one in enumerate(found):
        one.push(FIRST_BYTE + number, None)
    return found


def received(outbox: Outbox) -> tuple[list[Submit], list[int]]:
    """What a worker makes of the frames that the outbox gives, and the bytes of each."""
    found, sizes = list[Submit](), list[int]()
    while (message := outbox.take()) is not None:
        body = worker_ipc.encode_frame(message)[LENGTH_PREFIX.size :]
        sizes.append(len(body))
        decoded = worker_ipc.to_worker_decoder.decode(body)
        assert isinstance(decoded, Submit)
        found += split_choices(decoded)
    return found, sizes


def test_the_prompt_of_several_choices_is_sent_once() -> None:
    prompt = [100_000 + number % 1000 for number in range(32_768)]
    outbox, submits = Outbox(), [one.create_submission() for one in choices_of(prompt, 8)]
    for submit in submits:
        outbox.put(submit)
    found, (size,) = received(outbox)
    assert found == submits
    assert size < len(worker_ipc.encode_frame(submits[0])) + 7 * 100


def test_only_choices_of_one_prompt_that_still_wait_become_a_message() -> None:
    outbox, submits = Outbox(), [one.create_submission() for one in choices_of([1, 2], 4)]
    other = msgspec.structs.replace(submits[3], priority=1)
    equal = msgspec.structs.replace(submits[3], request_id="equal", prompt_ids=[1, 2])
    for submit in (*submits[:3], other, equal):
        outbox.put(submit)
    outbox.put(Abort("c-1"))
    found, sizes = received(outbox)
    assert found == [submits[0], submits[2], other, equal]
    assert len(sizes) == 3


def test_a_message_of_choices_is_bounded() -> None:
    outbox = Outbox()
    submits = [one.create_submission() for one in choices_of([5] * (MAX_JOINED_TOKENS // 3), 4)]
    for submit in submits:
        outbox.put(submit)
    found, sizes = received(outbox)
    assert found == submits
    assert len(sizes) == 2


def test_stop_overtakes_what_the_next_worker_gets_anyway() -> None:
    outbox = Outbox()
    outbox.put(Submit("a", [1], Sampling(max_tokens=1)))
    outbox.put(worker_ipc.AuditQuery("q"))
    outbox.put(Stop())
    assert (outbox.take(), outbox.take()) == (Stop(), None)


@pytest.mark.parametrize("strip", [None, True, False])
@pytest.mark.parametrize(
    ("data", "offsets", "text"),
    [
        ("a€b".encode(), [0, 1, 1, 1, 2], "a€b"),
        ("🦭x🦭".encode(), [0, 0, 0, 0, 1, 2, 2, 2, 2], "🦭x🦭"),
        (b"a\xf0\x9fb", [0, 1, 1, None], None),  # no character: what replaces it is before b
        (b"\xe2\x82\xe2\x82\xacz", None, None),
        (b"\x80\x80a", None, None),
    ],
)
def test_log_probabilities_say_where_in_the_text_their_token_begins(
    strip: bool | None, data: bytes, offsets: list[int | None] | None, text: str | None
) -> None:
    """Tokens are bytes: of a byte-level vocabulary, or of SentencePiece's with letters of it."""
    library = byte_level() if strip is None else llama_2(strip=strip)

    def token(byte: int) -> int:
        if strip is None:
            return byte
        letter = library.token_to_id(chr(byte)) if byte < 0x80 else None
        return FIRST_BYTE + byte if letter is None else int(letter)

    async def run() -> None:
        one = Generation("a", [1], Sampling(99), Detokenizer(library), StopRules(["never"]))
        for number, byte in enumerate(data):
            ends = "length" if number == len(data) - 1 else None
            one.push(token(byte), ends, worker_ipc.Logprobs(-0.5, [], []))
        delta = one.take()
        assert delta is not None
        assert text is None or delta.text == text
        found = [entry.offset for entry in delta.logprobs]
        assert found == sorted(found)
        for byte, place, wanted in zip(data, found, offsets or [None] * len(data), strict=True):
            assert wanted is None or place == wanted
            if byte < 0x80:
                assert delta.text[place] == chr(byte)
            else:
                assert place < len(delta.text)

    asyncio.run(run())


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [
        ("ab stop x", "stop", "ab "),
        ("sssx", "ssx", "s"),
        ("a😀éz", "é", "a😀"),
        ("ab sto", "stop", None),
    ],
)
def test_tokens_of_a_stop_string_are_no_part_of_the_text(
    said: str, stop: str, text: str | None, include: bool
) -> None:
    """Their offsets point at its end, and a stream does not send their bytes either."""

    async def run(streamed: bool) -> list[tuple[int, bool]]:
        rules = StopRules([stop], include)
        one = Generation("a", [1], Sampling(99), Detokenizer(byte_level()), rules)
        found, shown = list[TokenLogprobs](), ""
        for number, byte in enumerate(said.encode()):
            ends = "length" if number == len(said.encode()) - 1 else None
            one.push(byte, ends, worker_ipc.Logprobs(-0.5, [], []))
            if (streamed or one.is_done) and (delta := one.take()) is not None:
                found += delta.logprobs
                shown += delta.text
            if one.is_done:
                break
        wanted = said if text is None else text + (stop if include else "")
        assert shown == wanted
        assert bytes(entry.token_id for entry in found if entry.shown) == wanted.encode()
        assert all(entry.offset <= len(wanted) for entry in found)
        assert len(found) == len(one.output_ids)
        return [(entry.offset, entry.shown) for entry in found]

    assert asyncio.run(run(streamed=True)) == asyncio.run(run(streamed=False))


def test_a_token_that_is_no_text_is_marked() -> None:
    async def run(skipped: frozenset[int], ends: str) -> list[bool]:
        sampling = Sampling(9, stop_token_ids=[98])
        one = Generation(
            "a", [1], sampling, Detokenizer(byte_level(), skipped=skipped), StopRules()
        )
        for byte in (97, 99, 98):
            one.push(byte, ends if byte == 98 else None, worker_ipc.Logprobs(-0.5, [], []))
        delta = one.take()
        assert delta is not None
        return [entry.shown for entry in delta.logprobs]

    assert asyncio.run(run(frozenset(), "stop")) == [True, True, False]
    assert asyncio.run(run(frozenset({99}), "length")) == [True, False, True]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("top", [0, 20])
def test_an_answer_in_the_making_is_in_the_ledger(top: int, streamed: bool) -> None:
    """An answer in one piece until it is whole, and a stream until its client takes it."""

    async def run() -> tuple[int, int, int]:
        log = RequestLog(1)
        sampling = Sampling(max_tokens=9000, seed=4, logprobs=top)
        one = Generation("a", [1, 2], sampling, bytes_text(), StopRules())
        choice = ChatChoice(0, lambda token: f" token{token}", None)
        log.admit(one)
        tracemalloc.start()
        try:
            empty, before = log.count_bytes(), tracemalloc.get_traced_memory()[0]
            for number in range(1000):
                likeliest = [100_000 + number + place for place in range(top)]
                logprobs = Logprobs(-number / 7, likeliest, [-place / 3 for place in likeliest])
                one.push(97 + number % 9, None, logprobs)
                if not streamed and (delta := one.take(streamed)) is not None:
                    choice.add(delta)
            held = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        counted = log.count_bytes() - empty
        one.take(streamed)
        return held, counted, log.count_bytes() - empty

    held, counted, taken = asyncio.run(run())
    assert 0.6 * held < counted < 1.6 * held
    assert (taken < 0.4 * counted) == streamed
