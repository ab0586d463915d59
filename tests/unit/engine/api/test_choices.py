"""Chunks and wholes of choices: their end, its reason, the echo, and the tokens sent so far.

Tests ``api/chat_choice.py``, ``api/response_bodies.py`` and the streams of ``api/answer.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from plimsoll_api.admin import EngineState, Load
from plimsoll_engine.api import tool_families
from plimsoll_engine.api.answer import UNPARSED_CALL_WARNING, GenerationResponse
from plimsoll_engine.api.batch import Batch
from plimsoll_engine.api.chat_choice import ChatChoice
from plimsoll_engine.api.logprobs import make_completion_logprobs
from plimsoll_engine.api.reasoning import ReasoningParser
from plimsoll_engine.api.response_bodies import CompletionChoice, make_usage_object
from plimsoll_engine.frontend.observability.metrics import Metrics
from plimsoll_engine.frontend.requests.request_log import (
    Delta,
    Generation,
    RequestFailedError,
    TokenLogprobs,
)
from plimsoll_engine.http.budget import BodyBudget
from plimsoll_engine.messages.worker_ipc import Logprobs, Sampling
from tests.byte_text import bytes_text

CALL = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'


def chunks(choice: ChatChoice, *deltas: Delta) -> list[dict[str, Any]]:
    return [chunk for delta in deltas for chunk in choice.make_chunks(delta)]


def chat(**fields: Any) -> ChatChoice:
    return ChatChoice(0, str, fields.pop("parser", None), **fields)


def test_the_end_is_in_the_last_chunk_with_something_in_it() -> None:
    found = chunks(chat(), Delta("a", None, []), Delta("b", "length", []))
    assert [one["delta"] for one in found] == [{"content": "a"}, {"content": "b"}]
    assert [one["finish_reason"] for one in found] == [None, "length"]
    found = chunks(chat(), Delta("a", None, []), Delta("", "stop", []))
    assert [one["delta"] for one in found] == [{"content": "a"}, {}]
    assert [one["finish_reason"] for one in found] == [None, "stop"]


def test_reasoning_text_and_calls_end_once() -> None:
    choice = chat(
        parser=tool_families.create_parser("hermes", {}),
        include_token_ids=True,
        reasoning=ReasoningParser(),
    )
    whole = Delta(f"why</think>so{CALL}", "stop", [], [1, 2, 3])
    found = chunks(choice, whole)
    assert [list(one["delta"])[-1] for one in found] == ["reasoning", "content", "tool_calls"]
    assert [one["finish_reason"] for one in found] == [None, None, "tool_calls"]
    assert [one["token_ids"] for one in found] == [[1, 2, 3], (), ()]


@pytest.mark.parametrize(("reason", "told"), [("x", "x"), (7, 7), (2, None), (None, None)])
def test_the_reason_is_told_where_the_client_named_it(reason: Any, told: Any) -> None:
    end = Delta("a", "stop", [], [7], reason)
    for choice in (chat(stop_ids={7}), CompletionChoice(0, str, stop_ids={7})):
        (chunk,) = choice.make_chunks(end)
        assert chunk["stop_reason"] == told
        choice.add(end)
        assert choice.to_object()["stop_reason"] == told
    (chunk,) = chat().make_chunks(Delta("a", None, []))
    assert "stop_reason" not in chunk


def test_a_chat_begins_with_its_echo() -> None:
    choice = chat(echo="An apple ")
    first = choice.make_first_chunk()
    assert first is not None
    assert first["delta"] == {"role": "assistant", "content": "An apple "}
    choice.add(Delta("a day", "length", []))
    assert choice.to_object()["message"]["content"] == "An apple a day"


def test_usage_counts_what_was_sent() -> None:
    generations = [Generation(name, [1, 2], Sampling(9), bytes_text()) for name in "ab"]
    generations[0].output_ids = [5, 6, 9, 7]
    generations[1].output_ids = [5]
    told = make_usage_object(generations, 2, reasoning_end=9, sent_tokens=[1, 0])
    assert (told["prompt_tokens"], told["completion_tokens"], told["total_tokens"]) == (2, 1, 3)
    assert told["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert make_usage_object(generations, 2, 9)["completion_tokens_details"] == {
        "reasoning_tokens": 3
    }
    assert make_usage_object(generations, 2)["completion_tokens"] == 5


def test_usage_looks_at_each_token_once() -> None:
    """A stream with continuous usage asks with every chunk."""
    one = Generation("a", [1], Sampling(9), bytes_text())
    one.output_ids = Counted()
    for token in [5] * 200 + [9, 5, 5]:
        one.output_ids.append(token)
        told = make_usage_object([one], 1, reasoning_end=9)
    assert told["completion_tokens_details"] == {"reasoning_tokens": 200}
    assert one.output_ids.read <= 2 * len(one.output_ids)


class Counted(list[int]):
    """Counts the tokens that slices of it have."""

    read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.read += len(found) if isinstance(place, slice) else 1
        return found


def test_a_call_among_thoughts_that_never_end_is_a_call() -> None:
    """Small models call tools while they think; what was cut short is no wish of theirs."""
    thought = 'I ask.\n<tool_call>{"name": "tide", "arguments": {}}</tool_call>'
    for reason, calls in (("stop", 1), ("length", 0)):
        choice = chat(parser=tool_families.create_parser("hermes", {}), reasoning=ReasoningParser())
        for delta in (
            Delta(thought[:9], None, []),
            Delta(thought[9:], None, []),
            Delta("", reason, []),
        ):
            choice.add(delta)
        message = choice.to_object()["message"]
        assert message["reasoning"] == thought
        assert len(message.get("tool_calls", [])) == calls


@pytest.mark.parametrize(
    ("rest", "reason", "calls", "content"),
    [
        ("</think>", "stop", 1, None),
        ("</think>\n\n", "stop", 1, None),
        ("</think>", "length", 0, None),
        ("</think>Nine.", "stop", 0, "Nine."),
        ('</think><tool_call>{"name": "wind"}</tool_call>', "stop", 1, None),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_call_among_thoughts_that_no_answer_follows_is_a_call(
    rest: str, reason: str, calls: int, content: str | None, step: int
) -> None:
    said = 'I ask.\n<tool_call>{"name": "tide", "arguments": {}}</tool_call>' + rest
    choice = chat(parser=tool_families.create_parser("hermes", {}), reasoning=ReasoningParser())
    for at in range(0, len(said), step):
        choice.add(Delta(said[at : at + step], None, []))
    choice.add(Delta("", reason, []))
    answer = choice.to_object()
    found = [one["function"]["name"] for one in answer["message"].get("tool_calls", [])]
    assert found == ["wind" if "wind" in rest else "tide"][:calls]
    assert answer["message"]["content"] == content
    assert answer["finish_reason"] == ("tool_calls" if calls else reason)


def test_channels_of_gpt_oss_are_thoughts_a_call_and_an_answer() -> None:
    choice = chat(parser=tool_families.create_parser("openai", {}))
    said = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Nine."
    )
    for piece in said:
        choice.add(Delta(piece, None, []))
    choice.add(Delta("", "stop", []))
    message = choice.to_object()["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Nine.")


def test_candidates_with_one_text_do_not_merge() -> None:
    given = TokenLogprobs(7, Logprobs(-0.1, [7, 8, 9], [-0.1, -2.0, -3.0]), 0)
    (top,) = make_completion_logprobs([given], lambda token: "�" if token < 9 else "x", 0)[
        "top_logprobs"
    ]
    assert msgspec.json.decode(top) == {"�": -0.1, "token_id:8": -2.0, "x": -3.0}


def failed_streams(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value(
        "plimsoll_engine_stream_errors_total", {"model_name": "m"}
    )


def played(
    *choices: ChatChoice, ends: Sequence[str], stream: bool = True
) -> tuple[list[tuple[bytes, bytes]], str, Metrics]:
    """Headers, body and metrics of an answer of two tokens a choice.

    ``ends`` says how each ends.
    """
    metrics = Metrics(
        "m", lambda: EngineState.SERVING, Load, list, list, lambda: None, lambda: None, list, 0
    )
    wake = asyncio.Event()
    made = [Generation(str(n), [1], Sampling(9), bytes_text(), wake=wake) for n in range(len(ends))]
    engine: Any = SimpleNamespace(
        track_running=lambda *_: contextlib.nullcontext(), metrics=metrics
    )
    answer = GenerationResponse(
        engine, Batch("r", 1, made, wake, "m"), choices, stream=stream, include_usage=False
    )
    sent: list[dict[str, Any]] = []

    async def play() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> dict[str, str]:
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        for one in made:
            one.push(ord("a"), None)
        app = SimpleNamespace(state=SimpleNamespace(answers=BodyBudget(lambda: 1 << 20, 1)))
        scope = {"type": "http", "app": app, "client": ("c", 1), "headers": []}
        task = asyncio.create_task(answer(scope, receive, send))
        await asyncio.sleep(0.01)
        for one, end in zip(made, ends, strict=True):
            if end == "lost":
                one.fail(RequestFailedError("unavailable", "the worker is gone"))
            else:
                one.push(ord("b"), "stop")
            await asyncio.sleep(0.01)
        await asyncio.wait_for(task, 10)

    asyncio.run(play())
    body = b"".join(one.get("body", b"") for one in sent).decode()
    return sent[0]["headers"], body, metrics


def streamed(*choices: ChatChoice, ends: Sequence[str]) -> list[str]:
    """The events of a stream; one that breaks off is counted."""
    _, body, metrics = played(*choices, ends=ends)
    assert failed_streams(metrics) == body.count('{"error":')
    return [event.removeprefix("data: ") for event in body.split("\n\n") if event]


@pytest.mark.parametrize("family", ["llama3_json", "mistral"])
def test_a_call_that_cannot_be_read_is_told_in_a_header(family: str) -> None:
    """The text is what begins a call of the one family, and text of the other."""

    class Tagged(ChatChoice):
        def add(self, delta: Delta) -> None:
            super().add(delta._replace(text="[TOOL_CALLS]" if delta.finish_reason else ""))

    choice = Tagged(0, str, tool_families.create_parser(family, {}))
    headers, body, metrics = played(choice, ends=["stop"], stream=False)
    assert json.loads(body)["choices"][0]["message"]["content"] == "[TOOL_CALLS]"
    assert ((b"x-plimsoll-warning", UNPARSED_CALL_WARNING.encode()) in headers) is (
        family == "mistral"
    )
    assert failed_streams(metrics) == 0


def test_a_choice_that_fails_leaves_the_others_of_its_stream_alone() -> None:
    *chunks, error, done = streamed(chat(), chat(), ends=["lost", "stop"])
    assert json.loads(error)["error"]["code"] == "unavailable"
    assert done == "[DONE]"
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "stop"
    *_, error, done = streamed(chat(), ends=["lost"])
    assert (json.loads(error)["error"]["type"], done) == ("server_error", "[DONE]")


def test_a_fault_of_ours_ends_a_stream_with_an_error_event() -> None:
    class Broken(ChatChoice):
        def make_chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
            if delta.finish_reason is not None:
                raise UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates not allowed")
            return super().make_chunks(delta)

    *_, error, done = streamed(Broken(0, str, None), ends=["stop"])
    assert json.loads(error)["error"]["code"] == "internal_error"
    assert done == "[DONE]"
