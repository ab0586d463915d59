"""How much an answer may take, by what was asked for.

Tests ``api/answer_sizes.py``.
"""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from plimsoll_engine.api import answer_sizes, logprobs
from plimsoll_engine.api.chat_choice import ChatChoice
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.response_bodies import CompletionChoice
from plimsoll_engine.frontend.requests.request_log import Delta, TokenLogprobs
from plimsoll_engine.http.slices import MAX_SLICE_BYTES, SlicedResponses
from plimsoll_engine.messages.worker_ipc import Logprobs

CONTEXT = 32_768


@pytest.mark.parametrize(
    ("choices", "tokens", "top"),
    [(1, CONTEXT, 20), (1, CONTEXT, None), (128, CONTEXT, None), (128, 256, 20)],
)
def test_what_a_client_would_ask_for_is_taken(choices: int, tokens: int, top: int | None) -> None:
    answer_sizes.check_response_size(choices, choices * tokens, top, CONTEXT, "n")


@pytest.mark.parametrize(("choices", "top"), [(128, 20), (128, 0), (2, 20)])
def test_a_product_over_the_limit_names_what_to_lower(choices: int, top: int) -> None:
    with pytest.raises(ApiError) as told:
        answer_sizes.check_response_size(
            choices,
            choices * CONTEXT,
            top,
            CONTEXT,
            "n, max_tokens",
        )
    assert (told.value.status, told.value.code, told.value.param) == (400, "answer_too_large", "n")
    assert "lower n, max_tokens" in str(told.value)
    assert f"{answer_sizes.compute_max_response_bytes(CONTEXT) >> 20} MiB" in str(told.value)


@pytest.mark.parametrize(
    ("choices", "tokens", "top", "echoed"),
    [(1, 1 << 31, 20, 0), (128, 1 << 31, None, 0), (18, 1 << 31, 0, 0), (32, 128, 20, 0),
     (1, 1 << 31, 20, 4096), (128, 16, None, 8192)],
)  # fmt: skip
def test_what_fits_whatever_the_context_is_taken_before_it_is_known(
    choices: int, tokens: int, top: int | None, echoed: int
) -> None:
    answer_sizes.check_response_size(
        choices, choices * tokens, top, None, "n", choices * echoed, top if echoed else None
    )


@pytest.mark.parametrize(
    ("choices", "tokens", "top"), [(2, 1 << 31, 20), (1, 1 << 31, 127), (128, 4096, 4)]
)
def test_what_may_not_fit_waits_for_the_context(choices: int, tokens: int, top: int) -> None:
    with pytest.raises(ApiError) as told:
        answer_sizes.check_response_size(
            choices, choices * tokens, top, None, "n, max_tokens or logprobs"
        )
    assert (told.value.status, told.value.code, told.value.param) == (503, "not_serving", "n")
    assert told.value.make_headers() == {"retry-after": "1"}


def test_a_log_probability_takes_no_more_than_is_counted() -> None:
    count = 200
    ids = list(range(20))
    told = [
        TokenLogprobs(n, Logprobs(chosen=-n / 7, top_ids=ids, top=[-n / 3 - i for i in ids]))
        for n in range(count)
    ]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        body = logprobs.make_chat_logprobs(
            logprobs.make_chat_entries(told, lambda token: f" token{token}")
        )
        encoded = msgspec.json.encode(body)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(encoded) < taken <= answer_sizes.estimate_response_bytes(count, 20)


@pytest.mark.parametrize("kind", [CompletionChoice, ChatChoice])
def test_log_probabilities_are_encoded_as_they_come(kind: Any) -> None:
    """An answer in one piece says what a stream says, and leaves nothing to encode to its end."""
    deltas = [
        Delta(
            "ab" if n else "",
            "length" if n == 3 else None,
            [TokenLogprobs(n, Logprobs(-n / 7, [n, 7], [-0.5, float("-inf")]))] * 2,
        )
        for n in range(4)
    ]

    def choice() -> Any:
        arguments = (None,) if kind is ChatChoice else ()
        return kind(0, lambda token: f" token{token}", *arguments)

    whole, stream = choice(), choice()
    for delta in deltas:
        whole.add(delta)
    built = whole.to_object()["logprobs"]
    told = json.loads(msgspec.json.encode(built))
    chunks = [chunk for delta in deltas[1:] for chunk in stream.make_chunks(delta)]
    streamed = [json.loads(msgspec.json.encode(chunk))["logprobs"] for chunk in chunks]
    for key in ("content",) if kind is ChatChoice else ("tokens", "token_logprobs", "top_logprobs"):
        assert told[key][2:] == [entry for one in streamed if one for entry in one[key]]
    nested = built["content" if kind is ChatChoice else "top_logprobs"]
    assert len(nested) == 8
    assert all(isinstance(entry, msgspec.Raw) for entry in nested)


@pytest.mark.parametrize("size", [0, 5, MAX_SLICE_BYTES, MAX_SLICE_BYTES + 1, 3 * MAX_SLICE_BYTES])
@pytest.mark.parametrize("more", [True, False])
def test_a_large_body_leaves_in_slices(size: int, more: bool) -> None:
    body, sent = bytes(range(256)) * (size // 256) + b"x" * (size % 256), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    asyncio.run(SlicedResponses(app)({"type": "http"}, receive, send))
    parts = sent[1:]
    assert b"".join(part["body"] for part in parts) == body
    assert all(len(part["body"]) <= MAX_SLICE_BYTES for part in parts)
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [more]
