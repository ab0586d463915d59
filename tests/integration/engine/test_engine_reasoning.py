"""``--reasoning-parser``: what a model thinks is told apart from what it answers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

MODEL, TOKENS = "tiny", 200
CLOSE = "</think>"
ASK: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "Where to?"}], "temperature": 0,
    "max_tokens": TOKENS, "ignore_eos": True,
}  # fmt: skip


def answer(engine: Any, **fields: Any) -> dict[str, Any]:
    status, found = engine.post("/v1/chat/completions", json.dumps(ASK | fields).encode())
    assert status == 200, found
    return dict(found)


def chat(engine: Any, **fields: Any) -> dict[str, Any]:
    return dict(answer(engine, **fields)["choices"][0])


class Thinking(NamedTuple):
    """A checkpoint whose text has the closing tag in place of one of its tokens, and that text."""

    folder: Path
    text: str
    thought: int
    """Tokens before the tag."""


@pytest.fixture(scope="module")
def thinking(shared_engine: Any, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Thinking:
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(tiny, folder)
    _, whole = shared_engine.post(
        "/v1/chat/completions", json.dumps(ASK | {"return_token_ids": True}).encode()
    )
    said, prompt = whole["choices"][0]["token_ids"], whole["prompt_token_ids"]
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    model = content["model"]
    words = {number: word for word, number in model["vocab"].items()}
    merges = [
        tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in model["merges"]
    ]
    parts = {part for merge in merges for part in merge}
    # A token in the middle of the text that no other one is made of, and that the prompt has not.
    place = next(
        place for place in range(40, TOKENS)
        if said[place] not in prompt and said.index(said[place]) == place
        and words[said[place]] not in parts
    )  # fmt: skip
    word = words[said[place]]
    model["vocab"] = {CLOSE if one == word else one: n for one, n in model["vocab"].items()}
    model["merges"] = [list(merge) for merge in merges if "".join(merge) != word]
    file.write_text(json.dumps(content))
    texts = [
        shared_engine.post("/detokenize", json.dumps({"tokens": [one]}).encode())[1]["prompt"]
        for one in said
    ]
    text = "".join(CLOSE if one == said[place] else t for one, t in zip(said, texts, strict=True))
    return Thinking(folder, text, place)


def streamed(engine: Any, first: threading.Event | None = None, **fields: Any) -> tuple[str, str]:
    reasoning = content = ""
    asked = {key: value for key, value in ASK.items() if key != "ignore_eos"}
    body = {"ignore_eos": True} | fields
    for chunk in engine.client.chat.completions.create(**asked, stream=True, extra_body=body):
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            assert delta.get("reasoning") == delta.get("reasoning_content")
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            if first is not None and reasoning:
                first.set()
    return reasoning, content


@pytest.mark.parametrize("parser", ["qwen3", pytest.param("deepseek_r1", marks=pytest.mark.long)])
def test_reasoning_and_answer_come_apart(
    start_engine: Any, thinking: Thinking, parser: str
) -> None:
    engine = start_engine("--reasoning-parser", parser, model=thinking.folder).wait_ready()
    reasoning, _, content = thinking.text.partition(CLOSE)
    choice = chat(engine, return_token_ids=True, logprobs=True)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)
    assert message["reasoning"] == reasoning
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == TOKENS
    assert streamed(engine) == (reasoning, content)

    for fields, tokens in (({}, thinking.thought), ({"max_tokens": 5}, 5), ({"n": 2}, None)):
        told = answer(engine, **fields)["usage"]["completion_tokens_details"]
        assert told == {"reasoning_tokens": 2 * thinking.thought if tokens is None else tokens}

    cut = chat(engine, max_tokens=5)["message"]
    assert cut["content"] is None
    assert reasoning.startswith(cut["reasoning_content"])
    hidden = chat(engine, include_reasoning=False)["message"]
    assert (hidden["reasoning_content"], hidden["content"]) == (None, content)
    assert streamed(engine, include_reasoning=False) == ("", content)
    off = chat(engine, chat_template_kwargs={"enable_thinking": False})["message"]
    assert off == {"role": "assistant", "content": thinking.text}
    schema = {"structured_outputs": {"choice": ["port", "starboard"]}, "ignore_eos": False}
    assert chat(engine, **schema)["message"]["content"] in ("port", "starboard")

    for stream in (False, True):
        asked = {"input": "Where to?", "max_output_tokens": TOKENS, "temperature": 0.0}
        whole = engine.client.responses.create(
            model=MODEL, stream=stream, extra_body={"ignore_eos": True}, **asked
        )
        if stream:
            whole = list(whole)[-1].response
        thought, message = whole.output
        assert (thought.type, thought.content[0].text) == ("reasoning", reasoning)
        assert whole.output_text == content
        assert whole.usage.output_tokens_details.reasoning_tokens == thinking.thought
    back = [item.model_dump(exclude_none=True) for item in (thought, message)]
    again = engine.client.responses.create(
        model=MODEL, input=[*back, {"role": "user", "content": "And then?"}], max_output_tokens=3
    )
    assert again.output[0].type == "reasoning"

    # In the middle of the reasoning, and after a crash.
    for number in range(2):
        first = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(streamed, engine, first)
            assert first.wait(30)
            if number:
                os.kill(engine.worker_pid(), signal.SIGKILL)
            else:
                engine.begin("restart", "thinking")
                assert engine.finish("thinking", 60)["state"] == "succeeded"
            assert future.result(60) == (reasoning, content)
    engine.clean()


def test_without_the_flag_a_text_is_whole(start_engine: Any, thinking: Thinking) -> None:
    engine = start_engine(model=thinking.folder).wait_ready()
    message = chat(engine)["message"]
    assert message == {"role": "assistant", "content": thinking.text}
    assert streamed(engine) == ("", thinking.text)
