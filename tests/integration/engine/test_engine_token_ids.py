"""``return_token_ids`` and ``return_tokens_as_token_ids``, as vLLM's clients use them."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

MODEL = "tiny"
PROMPT = "The ship — 吃水"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Where to?"}]}
WANTED = {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}


def post(engine: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = engine.post(path, json.dumps(body).encode())
    assert status == 200, answer
    return dict(answer)


def ids_of(engine: Any, **body: Any) -> list[int]:
    return list(post(engine, "/tokenize", {"model": MODEL, **body})["tokens"])


def text_of(engine: Any, ids: list[int]) -> str:
    return str(post(engine, "/detokenize", {"model": MODEL, "tokens": ids})["prompt"])


def names(ids: list[int]) -> list[str]:
    return [f"token_id:{one}" for one in ids]


def test_a_completion_names_the_tokens_of_prompts_and_texts(engine: Any) -> None:
    asked = {
        "model": MODEL, "prompt": [PROMPT, "A harbour"], "n": 2, "max_tokens": 6,
        "temperature": 0.9, "seed": 3, "logprobs": 1,
    }  # fmt: skip
    plain = post(engine, "/v1/completions", asked)["choices"]
    assert [(one["prompt_token_ids"], one["token_ids"]) for one in plain] == [(None, None)] * 4
    choices = post(engine, "/v1/completions", asked | WANTED)["choices"]
    prompts = [ids_of(engine, prompt=prompt) for prompt in (PROMPT, "A harbour")]
    assert [one["prompt_token_ids"] for one in choices] == [prompts[i] for i in (0, 0, 1, 1)]
    for one in choices:
        assert len(one["token_ids"]) == 6
        assert text_of(engine, one["token_ids"]) == one["text"]
        assert one["logprobs"]["tokens"] == names(one["token_ids"])
        for name, top in zip(names(one["token_ids"]), one["logprobs"]["top_logprobs"], strict=True):
            assert name in top

    streamed: list[list[int]] = [[] for _ in choices]
    seen: dict[int, list[int]] = {}
    for chunk in engine.client.completions.create(
        **{key: value for key, value in asked.items() if key != "logprobs"}, logprobs=1,
        stream=True, extra_body=WANTED,
    ):  # fmt: skip
        for part in chunk.choices:
            told = part.model_dump()
            assert ("prompt_token_ids" in told) == (part.index not in seen)
            seen.setdefault(part.index, told.get("prompt_token_ids"))
            assert part.logprobs.tokens == names(told["token_ids"])
            streamed[part.index] += told["token_ids"]
    assert streamed == [one["token_ids"] for one in choices]
    assert [seen[i] for i in range(4)] == [one["prompt_token_ids"] for one in choices]
    engine.clean()


def test_a_stop_string_takes_text_away_and_no_token(engine: Any) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0} | WANTED
    whole = post(engine, "/v1/completions", asked)["choices"][0]
    stop = whole["text"][8:12]
    cut = post(engine, "/v1/completions", asked | {"stop": stop})["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert stop not in cut["text"]
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert stop in text_of(engine, cut["token_ids"])


def test_a_chat_names_its_prompt_once(engine: Any) -> None:
    asked = {**CHAT, "max_tokens": 8, "temperature": 0, "logprobs": True}
    plain = post(engine, "/v1/chat/completions", asked)
    assert (plain["prompt_token_ids"], plain["choices"][0]["token_ids"]) == (None, None)
    whole = post(engine, "/v1/chat/completions", asked | WANTED)
    assert whole["prompt_token_ids"] == ids_of(engine, messages=CHAT["messages"])
    (choice,) = whole["choices"]
    assert [one["token"] for one in choice["logprobs"]["content"]] == names(choice["token_ids"])
    assert text_of(engine, choice["token_ids"]) == choice["message"]["content"]
    found: list[int] = []
    chunks = list(engine.client.chat.completions.create(**asked, stream=True, extra_body=WANTED))
    for number, chunk in enumerate(chunks):
        told = chunk.model_dump()
        assert told.get("prompt_token_ids") == (whole["prompt_token_ids"] if not number else None)
        for part in told["choices"]:
            found += part["token_ids"]
    assert found == choice["token_ids"]


@pytest.mark.parametrize("planned", [pytest.param(True, marks=pytest.mark.long), False])
def test_no_token_is_named_twice_over_a_restart(start_engine: Any, planned: bool) -> None:
    engine = start_engine().wait_ready()
    asked: dict[str, Any] = {
        "model": MODEL, "prompt": PROMPT, "max_tokens": 400, "temperature": 0.9, "seed": 5,
        "extra_body": WANTED,
    }  # fmt: skip
    whole = engine.client.completions.create(**asked).choices[0].model_dump()
    begun = threading.Event()

    def streamed() -> tuple[list[int], str]:
        ids: list[int] = []
        text = ""
        for chunk in engine.client.completions.create(**asked, stream=True):
            ids += chunk.choices[0].model_dump()["token_ids"]
            text += chunk.choices[0].text
            begun.set()
        return ids, text

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(streamed)
        assert begun.wait(30)
        if planned:
            engine.begin("restart", "ids")
            assert engine.finish("ids", 60)["state"] == "succeeded"
        else:
            os.kill(engine.worker_pid(), signal.SIGKILL)
        assert future.result(60) == (whole["token_ids"], whole["text"])
    engine.clean()
