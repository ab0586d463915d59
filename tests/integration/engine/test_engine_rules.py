"""vLLM's rules of a text on a real engine: allowed tokens, bad words, named tokens, ends, cuts.

They hold over a restart of the worker as they do without one.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

MODEL = "tiny"
PROMPT = "The ship sails"
ASK: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "ignore_eos": True}
IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}


def post(engine: Any, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    found, answer = engine.post(path, json.dumps(body).encode())
    assert found == status, answer
    return dict(answer)


def completion(engine: Any, **fields: Any) -> dict[str, Any]:
    (choice,) = post(engine, "/v1/completions", ASK | IDS | {"max_tokens": 12} | fields)["choices"]
    return dict(choice)


def tokens(engine: Any, text: str, **fields: Any) -> list[int]:
    body = {"model": MODEL, "prompt": text} | fields
    return list(post(engine, "/tokenize", body)["tokens"])


def test_only_allowed_tokens_are_chosen(engine: Any) -> None:
    allowed = [40, 41, 42]
    for sampling in ({}, {"temperature": 1.0, "seed": 5, "top_p": 0.9}):
        ids = completion(engine, allowed_token_ids=allowed, max_tokens=30, **sampling)["token_ids"]
        assert len(ids) == 30
        assert set(ids) <= set(allowed)
    ended = completion(engine, allowed_token_ids=[41], stop_token_ids=[41])
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == ("", "stop", 41)
    engine.clean()


def test_a_bad_word_does_not_come(engine: Any) -> None:
    plain = completion(engine, max_tokens=30)
    word = plain["text"].split()[2]
    assert len(tokens(engine, f" {word}")) >= 1
    without = completion(engine, max_tokens=30, bad_words=[word])
    assert word in plain["text"].split()
    assert word not in without["text"].split()


def test_named_tokens_have_their_log_probabilities(engine: Any) -> None:
    chosen = completion(engine, logprobs=20, max_tokens=1)["logprobs"]
    named = [45, 46, 45]
    found = completion(engine, logprobs=1, logprob_token_ids=named, max_tokens=1)["logprobs"]
    (own,) = chosen["tokens"]
    assert list(found["top_logprobs"][0]) == [own, "token_id:45", "token_id:46"]
    assert found["token_logprobs"] == chosen["token_logprobs"]
    chat = {
        "model": MODEL, "messages": [{"role": "user", "content": "Where to?"}], "max_tokens": 2,
        "logprobs": True, "top_logprobs": 5, "logprob_token_ids": named, "temperature": 0,
    } | IDS  # fmt: skip
    content = post(engine, "/v1/chat/completions", chat)["choices"][0]["logprobs"]["content"]
    assert len(content) == 2
    for one in content:
        assert [top["token"] for top in one["top_logprobs"]] == [
            one["token"], "token_id:45", "token_id:46",
        ]  # fmt: skip
    extra = IDS | {"logprob_token_ids": named}
    streamed = [
        entry
        for chunk in engine.client.chat.completions.create(
            **{name: value for name, value in chat.items() if name not in extra},
            stream=True, extra_body=extra,
        )
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]  # fmt: skip
    assert [one.model_dump() for one in streamed] == content
    engine.clean()


def test_a_text_ends_before_its_stop_string_or_with_it(engine: Any) -> None:
    whole = completion(engine, max_tokens=40)["text"]
    stop = whole[9:14]
    cut = completion(engine, max_tokens=40, stop=[stop])
    kept = completion(engine, max_tokens=40, stop=[stop], include_stop_str_in_output=True)
    assert (cut["text"], cut["stop_reason"]) == (whole[: whole.index(stop)], stop)
    assert kept["text"] == cut["text"] + stop
    chunks = list(
        engine.client.completions.create(
            model=MODEL, prompt=PROMPT, temperature=0, max_tokens=40, stop=[stop], stream=True,
            extra_body={"include_stop_str_in_output": True},
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks) == kept["text"]
    assert chunks[-1].choices[0].model_dump()["stop_reason"] == stop


def test_special_tokens_are_text_where_they_are_wanted(engine: Any) -> None:
    ids = {"allowed_token_ids": [1], "max_tokens": 2}  # <|im_start|>
    assert completion(engine, **ids)["text"] == ""
    assert completion(engine, skip_special_tokens=False, **ids)["text"] == "<|im_start|>" * 2


def test_a_prompt_is_cut(engine: Any) -> None:
    ids = tokens(engine, PROMPT * 4)
    left = completion(engine, prompt=ids, truncate_prompt_tokens=4)
    right = completion(engine, prompt=ids, truncate_prompt_tokens=4, truncation_side="right")
    assert (left["prompt_token_ids"], right["prompt_token_ids"]) == (ids[-4:], ids[:4])
    alone = completion(engine, prompt=ids[-4:])
    assert left["token_ids"] == alone["token_ids"]
    answer = post(
        engine, "/v1/completions", ASK | {"truncation_side": "left"}, status=400
    )["error"]  # fmt: skip
    assert answer["param"] == "truncation_side"


def test_a_message_is_continued(engine: Any) -> None:
    said = "An apple a day, keeps"
    chat = {
        "model": MODEL, "temperature": 0, "max_tokens": 8, "continue_final_message": True,
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}],
    }  # fmt: skip
    plain = post(engine, "/v1/chat/completions", chat | IDS)
    prompt = post(engine, "/detokenize", {"tokens": plain["prompt_token_ids"]})["prompt"]
    assert prompt.endswith(f"<|im_start|>assistant\n{said}")
    text = plain["choices"][0]["message"]["content"]
    echoed = post(engine, "/v1/chat/completions", chat | {"echo": True})
    assert echoed["choices"][0]["message"]["content"] == said + text
    stream = engine.client.chat.completions.create(
        **{name: value for name, value in chat.items() if name != "continue_final_message"},
        stream=True, extra_body={"continue_final_message": True, "echo": True},
    )  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == said + text


def test_chats_of_a_batch_are_answered_as_alone(engine: Any) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Ahoy", "Where to?", "Home")]
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 6, "logprobs": True}
    batch = post(engine, "/v1/chat/completions/batch", asked | {"messages": chats})
    assert [choice["index"] for choice in batch["choices"]] == [0, 1, 2]
    usage = 0
    for chat, choice in zip(chats, batch["choices"], strict=True):
        alone = post(engine, "/v1/chat/completions", asked | {"messages": chat})
        usage += alone["usage"]["total_tokens"]
        assert choice["message"] == alone["choices"][0]["message"]
        assert len(choice["logprobs"]["content"]) == 6
    assert batch["usage"]["total_tokens"] == usage
    large = [{"role": "user", "content": "x" * 200}]  # prepared in the other process
    batch = post(engine, "/v1/chat/completions/batch", asked | {"messages": [large] * 24})
    assert len({choice["message"]["content"] for choice in batch["choices"]}) == 1
    error = post(engine, "/v1/chat/completions/batch", asked | {"messages": [[]]}, status=400)
    assert error["error"]["param"] == "messages[0]"
    engine.clean()


@pytest.mark.parametrize("path", ["completions", "chat"])
def test_usage_of_a_stream_is_of_what_was_sent(engine: Any, path: str) -> None:
    common: dict[str, Any] = {
        "model": MODEL, "temperature": 0, "max_tokens": 9, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    if path == "completions":
        chunks = list(engine.client.completions.create(prompt=PROMPT, **common))
    else:
        messages = [{"role": "user", "content": "Ahoy"}]
        chunks = list(engine.client.chat.completions.create(messages=messages, **common))
        assert chunks[0].usage.completion_tokens == 0
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-2].choices[0].delta.content
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts[-1] == counts[-2] == 9
    assert counts[:-1] == sorted(set(counts))


@pytest.mark.parametrize("planned", [pytest.param(True, marks=pytest.mark.long), False])
def test_rules_hold_over_a_restart(start_engine: Any, planned: bool) -> None:
    engine = start_engine().wait_ready()
    plain = completion(engine, max_tokens=400)["token_ids"]
    pair = engine.post("/detokenize", json.dumps({"tokens": plain[350:352]}).encode())[1]["prompt"]
    rules: list[dict[str, Any]] = [
        {"allowed_token_ids": plain[:200]},
        {"bad_words": [pair, "ship"]},
        {"logprobs": 0, "logprob_token_ids": [45, 46]},
    ]
    asked = [ASK | IDS | {"max_tokens": 400, "temperature": 0.9, "seed": 3} | one for one in rules]
    whole = [post(engine, "/v1/completions", one)["choices"][0] for one in asked]
    begun = threading.Barrier(len(asked) + 1)

    def streamed(body: dict[str, Any]) -> tuple[str, list[int], list[Any]]:
        text, ids, tops = "", list[int](), list[Any]()
        own = {"model", "prompt", "temperature", "max_tokens", "seed", "logprobs"}
        extra = {name: value for name, value in body.items() if name not in own}
        with engine.client.completions.create(
            **{name: value for name, value in body.items() if name in own},
            stream=True, extra_body=extra,
        ) as chunks:  # fmt: skip
            for number, chunk in enumerate(chunks):
                (choice,) = chunk.choices
                text += choice.text
                ids += choice.model_dump()["token_ids"]
                tops += choice.logprobs.top_logprobs if choice.logprobs else []
                if number == 2:
                    begun.wait(60)
        return text, ids, tops

    with ThreadPoolExecutor(len(asked)) as pool:
        futures = [pool.submit(streamed, body) for body in asked]
        begun.wait(60)
        if planned:
            engine.begin("restart", "rules")
            assert engine.finish("rules", 60)["state"] == "succeeded"
        else:
            os.kill(engine.worker_pid(), signal.SIGKILL)
        found = [future.result(60) for future in futures]
    assert [(text, ids) for text, ids, _ in found] == [
        (one["text"], one["token_ids"]) for one in whole
    ]
    assert set(found[0][1]) <= set(plain[:200])
    tops = found[2][2]
    assert [list(one) for one in tops] == [
        list(one) for one in whole[2]["logprobs"]["top_logprobs"]
    ]
    engine.clean()
