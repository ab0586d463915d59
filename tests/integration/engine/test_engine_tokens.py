"""A checkpoint whose tokens are as those of published ones: added and special ones, several ends.

Its config, tokenizer and generation_config disagree. Tests ``plimsoll_engine/checkpoint.py``,
``api/logprobs.py`` and ``api/forced_calls.py``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll_faults.models import tiny_text
from tests.integration.engine.conftest import MODEL, Engine

ADDED = ("<tool_call>", "</tool_call>", "<漢>", "<|turn|>", "<|pad|>")
SPECIAL = ("<|turn|>", "<|pad|>")
TEXT = "😀é漢𓀀 <漢></tool_call> <|turn|>\n\t👩‍👧"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "tide",
        "parameters": {
            "type": "object",
            "properties": {
                "port": {"enum": [f'{{"a": "{TEXT}', "</tool_call>"]},
                "depth": {"type": "integer"},
            },
            "required": ["port", "depth"],
            "additionalProperties": False,
        },
    },
}
MAX_NEW = 20
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "How deep?"}]}


@pytest.fixture(scope="module")
def tokens() -> dict[str, int]:
    """The numbers of the added tokens and of the ends, once the checkpoint is made."""
    return {}


@pytest.fixture(scope="module")
def engine(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, tokens: dict[str, int]
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("tokens") / "checkpoint"
    shutil.copytree(tiny, folder)
    tokens |= tiny_text.add_tokens(folder, ADDED, SPECIAL)
    tokens["end"] = json.loads((folder / "config.json").read_text())["eos_token_id"]
    told = {"eos_token_id": [tokens["<|turn|>"]], "top_k": 1, "max_new_tokens": MAX_NEW}
    (folder / "generation_config.json").write_text(json.dumps(told))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["eos_token"] = "<|pad|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    made = Engine(folder, tmp_path_factory.mktemp("run"), warm=True).wait_ready()
    yield made
    made.end()


def post(engine: Engine, path: str, **body: Any) -> dict[str, Any]:
    status, answer = engine.post(path, json.dumps({"model": MODEL} | body).encode())
    assert status == 200, answer
    return dict(answer["choices"][0])


def test_each_end_that_generation_config_or_tokenizer_names_ends_a_text(
    engine: Engine, tokens: dict[str, int]
) -> None:
    for name, ends in (("<|turn|>", True), ("<|pad|>", True), ("<漢>", False)):
        found = post(
            engine, "/v1/completions", prompt="a", max_tokens=3, allowed_token_ids=[tokens[name]]
        )
        assert found["finish_reason"] == ("stop" if ends else "length")
        assert found["text"] == ("" if ends else name * 3)


def test_the_generation_config_is_the_default(engine: Engine) -> None:
    ask: dict[str, Any] = {"prompt": "The ship", "max_tokens": 9, "temperature": 2, "seed": 1}
    plain, given, without = (
        post(engine, "/v1/completions", **ask, **more)["text"]
        for more in ({}, {"top_k": 1}, {"top_k": -1})
    )
    assert plain == given != without


def test_bytes_and_offsets_of_tokens_are_those_of_the_text(engine: Engine) -> None:
    choice = {"structured_outputs": {"choice": [TEXT]}, "max_tokens": 200}
    found = post(engine, "/v1/chat/completions", **CHAT, **choice, logprobs=True, top_logprobs=5)
    listed = found["logprobs"]["content"]
    assert found["message"]["content"] == TEXT
    assert b"".join(bytes(one["bytes"]) for one in listed).decode() == TEXT
    assert all(len(one["top_logprobs"]) == 5 for one in listed)
    for echo, before in ((False, ""), (True, "é漢 ")):
        found = post(
            engine, "/v1/completions", **choice, prompt="é漢 ", logprobs=5, echo=echo
        )  # fmt: skip
        text, told = found["text"], found["logprobs"]
        assert text == before + TEXT
        offsets = told["text_offset"]
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(text)
        whole = [
            (offset, token)
            for offset, token in zip(offsets, told["tokens"], strict=True)
            if "\ufffd" not in token and token not in SPECIAL
        ]
        assert len(whole) > 5
        for offset, token in whole:
            assert text[offset:].startswith(token) or offset == len(text), (offset, token)
        # Each candidate has a name of its own, also where it is a part of a character.
        assert {len(top) for top in told["top_logprobs"] if top} <= {5, 6}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tide"}}])
def test_a_forced_call_with_added_tokens_comes_in_pieces(engine: Engine, choice: Any) -> None:
    ask = {**CHAT, "tools": [TOOL], "tool_choice": choice, "max_tokens": 400, "temperature": 1}
    for seed in range(3):
        whole = post(
            engine, "/v1/chat/completions", **ask, seed=seed, parallel_tool_calls=False
        )  # fmt: skip
        assert whole["finish_reason"] == "tool_calls"
        (call,) = whole["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["port"] in TOOL["function"]["parameters"]["properties"]["port"]["enum"]
        pieces: list[Any] = []
        client: Any = engine.client
        for chunk in client.chat.completions.create(
            **ask, seed=seed, parallel_tool_calls=False, stream=True
        ):
            for one in chunk.choices:
                assert not one.delta.content
                pieces += one.delta.tool_calls or []
        assert [piece.function.name for piece in pieces if piece.id] == ["tide"]
        given = "".join(piece.function.arguments for piece in pieces)
        assert given == call["function"]["arguments"]
        assert len(pieces) > 1


def test_a_chat_without_a_limit_has_that_of_the_checkpoint(engine: Engine) -> None:
    endless = {**CHAT, "ignore_eos": True}
    for fields, wanted in (({}, MAX_NEW), ({"max_tokens": MAX_NEW + 2}, MAX_NEW + 2)):
        status, answer = engine.post(
            "/v1/chat/completions", json.dumps({"model": MODEL, **endless, **fields}).encode()
        )
        assert (status, answer["usage"]["completion_tokens"]) == (200, wanted)
        assert answer["choices"][0]["finish_reason"] == "length"


def test_a_forced_call_that_is_cut_says_so(engine: Engine) -> None:
    ask = {**CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 40}
    found = post(engine, "/v1/chat/completions", **ask)
    (call,) = found["message"]["tool_calls"]
    assert found["finish_reason"] == "length"
    assert call["function"]["name"] == "tide"
    status, answer = engine.post(
        "/v1/responses",
        json.dumps(
            {"model": MODEL, "input": "How deep?", "max_output_tokens": 40,
             "tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "required"}
        ).encode(),
    )  # fmt: skip
    assert (status, answer["status"]) == (200, "incomplete")
    (item,) = answer["output"]
    assert (item["type"], item["status"], item["name"]) == ("function_call", "incomplete", "tide")
    engine.clean()
