"""``prompt_logprobs``, and an echo with ``logprobs``: transformers' figures, also over restarts."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

MODEL = "tiny"
PROMPT = "The ship sails into a harbour that nobody knows — 吃水 — and stays there."
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Where to?"}]}


def post(engine: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = engine.post(path, json.dumps({"model": MODEL, **body}).encode())
    assert status == 200, answer
    return dict(answer)


def ids_of(engine: Any, **body: Any) -> list[int]:
    return list(post(engine, "/tokenize", body)["tokens"])


@pytest.fixture(scope="module")
def exact(tiny: Path) -> Any:
    """float32 [tokens - 1, vocabulary]: the log probabilities after each token but the last."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)

    @torch.inference_mode()
    def of(ids: list[int]) -> torch.Tensor:
        scores: torch.Tensor = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return scores

    return of


def check(told: list[Any], ids: list[int], exact: torch.Tensor, most: int) -> None:
    assert len(told) == len(ids)
    assert told[0] is None
    wanted = exact.gather(1, torch.tensor(ids[1:])[:, None])
    higher = (exact > wanted + 1e-3).sum(1).tolist()
    near = (exact > wanted - 1e-3).sum(1).tolist()
    tops = exact.topk(most).values.tolist()
    own = [entry[str(token)] for entry, token in zip(told[1:], ids[1:], strict=True)]
    assert [one["logprob"] for one in own] == pytest.approx(wanted[:, 0].tolist(), abs=1e-3)
    for place, entry in enumerate(told[1:]):
        best = sorted((o["logprob"] for o in entry.values() if o["rank"] <= most), reverse=True)
        assert best == pytest.approx(tops[place], abs=1e-3)
        assert most <= len(entry) <= most + 1
        assert higher[place] + 1 <= own[place]["rank"] <= max(near[place], higher[place] + 1)


@pytest.mark.parametrize("most", [0, 3])
def test_a_completion_tells_them_for_each_prompt(engine: Any, exact: Any, most: int) -> None:
    """Twice, and with a prompt that is in the prefix cache by then: its rows are computed again."""
    prompts = [PROMPT, "A harbour", "A"]
    asked = {"prompt": prompts, "n": 2, "max_tokens": 3, "prompt_logprobs": most}
    plain = post(engine, "/v1/completions", asked | {"prompt_logprobs": None})
    assert [one["prompt_logprobs"] for one in plain["choices"]] == [None] * 6
    for _ in range(2):
        choices = post(engine, "/v1/completions", asked)["choices"]
        for number, prompt in enumerate(prompts):
            ids = ids_of(engine, prompt=prompt)
            first, second = choices[2 * number : 2 * number + 2]
            check(first["prompt_logprobs"], ids, exact(ids), most)
            assert second["prompt_logprobs"] == first["prompt_logprobs"]
    words = [next(iter(one.values()))["decoded_token"] for one in first["prompt_logprobs"] if one]
    assert len(words) == len(ids) - 1
    engine.clean()


def test_a_chat_tells_them_once(engine: Any, exact: Any) -> None:
    asked = {**CHAT, "max_tokens": 3, "n": 2, "temperature": 0}
    assert post(engine, "/v1/chat/completions", asked)["prompt_logprobs"] is None
    answer = post(engine, "/v1/chat/completions", asked | {"prompt_logprobs": 2})
    ids = ids_of(engine, messages=CHAT["messages"])
    check(answer["prompt_logprobs"], ids, exact(ids), 2)
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])


def test_an_echo_has_log_probabilities(engine: Any, exact: Any) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    plain = post(engine, "/v1/completions", asked | {"logprobs": 2})["choices"][0]
    choice = post(engine, "/v1/completions", asked | {"logprobs": 2, "echo": True})["choices"][0]
    ids, told = ids_of(engine, prompt=PROMPT), choice["logprobs"]
    assert choice["text"] == PROMPT + plain["text"]
    assert choice["prompt_logprobs"] is None
    assert len(told["tokens"]) == len(told["top_logprobs"]) == len(ids) + 4
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    wanted = exact(ids)
    own = [float(wanted[place, token]) for place, token in enumerate(ids[1:])]
    assert told["token_logprobs"][1 : len(ids)] == pytest.approx(own, abs=1e-3)
    assert told["token_logprobs"][len(ids) :] == pytest.approx(
        plain["logprobs"]["token_logprobs"], abs=1e-3
    )
    assert all(2 <= len(top) <= 3 for top in told["top_logprobs"][1 : len(ids)])
    assert told["text_offset"][len(ids)] == len(PROMPT)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "A", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("completions", {"prompt": "A", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"prompt": "A", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"prompt": "A", "echo": True, "logprobs": 1, "stream": True}, "echo"),
        ("chat/completions", {**CHAT, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"prompt": [[5] * 3000] * 16, "max_tokens": 1, "prompt_logprobs": 20}, "n"),
    ],
)
def test_what_is_not_told_is_refused(
    engine: Any, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer = engine.post(f"/v1/{path}", json.dumps({"model": MODEL} | body).encode())
    assert (status, answer["error"]["param"]) == (400, param), answer


FLAGS = ("--max-num-batched-tokens", "32", "--block-size", "8", "--num-blocks", "900")
PROMPTS = [[3 + (7 * n + 5 * place) % 400 for place in range(1500 + n)] for n in range(3)]
TOKENS = 450


def generated(engine: Any) -> int:
    """Tokens of this epoch."""
    return int(engine.status()["load"].get("generation_tokens_total") or 0)


def settled(engine: Any) -> int:
    """The same of an idle engine, once it has told of all it made."""
    engine.clean()
    before = -1
    while (now := generated(engine)) != before:
        before = now
        time.sleep(1.5)  # a report comes each second
    return before


@pytest.mark.parametrize(
    ("planned", "ranks"),
    [
        pytest.param(True, (), id="planned"),
        pytest.param(False, (), id="crash", marks=pytest.mark.long),
        pytest.param(
            False,
            ("--tensor-parallel-size", "2"),
            id="crash of two ranks",
            marks=pytest.mark.long,
        ),
    ],
)
def test_they_are_whole_over_a_restart(
    start_engine: Any, exact: Any, planned: bool, ranks: tuple[str, ...]
) -> None:
    """A prompt of many chunks is cut in the middle, a text after its prompt: what was told of a
    prompt that is whole is not computed again, and its keys and values are handed over."""
    engine = start_engine(*FLAGS, *ranks).wait_ready()
    wanted = [exact(ids) for ids in PROMPTS]

    def ask(ids: list[int]) -> tuple[str, list[Any]]:
        asked = {"prompt": ids, "max_tokens": TOKENS, "prompt_logprobs": 2, "temperature": 0}
        (choice,) = post(engine, "/v1/completions", asked | {"ignore_eos": True})["choices"]
        return choice["text"], choice["prompt_logprobs"]

    with ThreadPoolExecutor(3) as pool:
        whole = [text for text, _ in pool.map(ask, PROMPTS)]
        for tokens in (0, 60):
            before = settled(engine)
            futures = [pool.submit(ask, ids) for ids in PROMPTS]
            if tokens:
                made = before + tokens
                engine.until(lambda made=made: generated(engine) > made, "tokens", 60)
            else:
                time.sleep(0.2)  # a few steps into the prompts
            if planned:
                engine.begin("restart", f"scores-{tokens}")
                operation = engine.finish(f"scores-{tokens}", 60)
                assert operation["state"] == "succeeded", operation
                assert operation["carried_requests"] == 3
                # Those whose prompt was cut are computed again.
                assert operation["carried_kv_requests"] > 0 or not tokens, operation
            else:
                os.kill(engine.worker_pid(), signal.SIGKILL)
            found = [future.result(120) for future in futures]
            assert [text for text, _ in found] == whole
            for ids, scores, (_, told) in zip(PROMPTS, wanted, found, strict=True):
                check(told, ids, scores, 2)
            engine.clean()
