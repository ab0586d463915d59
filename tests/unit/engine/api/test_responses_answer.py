"""The events of a response build up the response, however its text is cut."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll_engine.api import tool_families
from plimsoll_engine.api.reasoning import ReasoningParser
from plimsoll_engine.api.responses_answer import ResponseOutput
from plimsoll_engine.api.tool_arguments import END_HERMES_TAG as END_HERMES
from plimsoll_engine.api.tool_arguments import HERMES_TAG as HERMES
from plimsoll_engine.frontend.requests.request_log import Delta, TokenLogprobs
from plimsoll_engine.messages.worker_ipc import Logprobs

CALL = HERMES + '\n{"name": "f", "arguments": {"a": 1}}\n' + END_HERMES
PARTS = [
    CALL, CALL[:9], CALL[9:], CALL[:-16], CALL[-16:] + "text", "text", "\n", HERMES, "", "</think>",
    "</thi",
]  # fmt: skip
PIECES = st.lists(st.sampled_from(PARTS), max_size=7)


def played(
    pieces: list[str], reason: str, thinks: bool = False, family: str = "hermes"
) -> tuple[ResponseOutput, list[dict[str, Any]]]:
    output = ResponseOutput(
        "x", str, tool_families.create_parser(family, {}), ReasoningParser() if thinks else None
    )
    token = TokenLogprobs(7, Logprobs(-0.5, [7], [-0.5]))
    deltas = [Delta(piece, None, [token]) for piece in pieces] + [Delta("", reason, [])]
    events = []
    for delta in deltas:
        for event in output.stream(delta):
            kind, data = event.decode().splitlines()[:2]
            events.append(json.loads(data.removeprefix("data: ")))
            assert kind == f"event: {events[-1]['type']}"
    return output, events


@given(PIECES, st.sampled_from(["stop", "length"]), st.booleans())
def test_events_build_up_the_items(pieces: list[str], reason: str, thinks: bool) -> None:
    output, events = played(pieces, reason, thinks)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    built: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    for event in events:
        kind, at = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            assert at == len(built), "each item opens after the one before it is done"
            built.append(event["item"])
            texts[event["item"]["id"]] = ""
            continue
        assert at == len(built) - 1
        if kind.endswith(".delta"):
            texts[event["item_id"]] += event["delta"]
        elif kind == "response.output_item.done":
            built[at] = event["item"]
    assert built == json.loads(json.dumps(output.items, default=lambda raw: json.loads(bytes(raw))))
    assert built, "there is always something that ended"
    for item in built:
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert text == texts[item["id"]]
        assert item["status"] in ("completed", "incomplete")


def test_reasoning_is_an_item_before_the_message() -> None:
    output, _ = played(["<think>why", "</think>", "so", CALL], "stop", thinks=True)
    kinds = [item["type"] for item in output.items]
    assert kinds == ["reasoning", "message", "function_call"]
    assert output.items[0]["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert output.items[1]["content"][0]["text"] == "so"
    (cut,) = played(["why"], "length", thinks=True)[0].items
    assert (cut["type"], cut["status"]) == ("reasoning", "incomplete")


def test_text_behind_a_streamed_call_is_a_message_of_its_own() -> None:
    output, _ = played([CALL[:-16], CALL[-16:] + "text"], "stop")
    call, message = output.items
    assert (call["arguments"], call["status"]) == ('{"a": 1}', "completed")
    assert message["content"][0]["text"] == "text"


def test_thoughts_behind_an_answer_are_an_item_of_their_own() -> None:
    answer = "<|channel|>final<|message|>a<|end|>"
    thought = "<|start|>assistant<|channel|>analysis<|message|>b<|end|>"
    output, events = played([answer, thought], "stop", family="openai")
    assert [item["content"][0]["text"] for item in output.items] == ["a", "b"]
    items = [event["type"].rpartition(".")[2] for event in events if "item" in event]
    assert items == ["added", "done"] * 2


def test_every_token_has_its_log_probability() -> None:
    output, events = played(["one", "two"], "length")
    (item,) = output.items
    assert item["status"] == "incomplete"
    assert len(item["content"][0]["logprobs"]) == 2
    told = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert [len(tokens) for tokens in told] == [1, 1]
    assert told[0][0]["token"] == "7"


def test_a_failure_closes_the_open_item_with_what_it_has() -> None:
    for piece, kind in (("one", "message"), ("<think>why", "reasoning"), (CALL[:-16], "call")):
        output = ResponseOutput(
            "x", str, tool_families.create_parser("hermes", {}), ReasoningParser()
        )
        list(output.stream(Delta(piece if kind == "reasoning" else f"</think>{piece}", None, [])))
        *_, last = output.close_items("incomplete")
        done = json.loads(last.decode().splitlines()[1].removeprefix("data: "))
        assert done["type"] == "response.output_item.done"
        assert done["item"] == output.items[-1]
        assert done["item"]["status"] == "incomplete"
        assert done["item"].get("arguments") or done["item"]["content"][0]["text"]
        assert list(output.close_items("incomplete")) == []
