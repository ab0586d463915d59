"""The engine on published tokenizers and a published model, against transformers.

Tests ``frontend/requests/detokenize.py``, ``core/execute/sampling.py`` and ``models/decoder.py``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from plimsoll_engine.frontend.requests.request_log import Generation, StopRules
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_engine.messages.worker_ipc import Logprobs, Sampling
from tests.conformance import published
from tests.integration.engine.conftest import MODEL, Engine

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not published.ready(), reason="not made: make engines"),
]

TEXTS = [
    "hi₿a", "a 🦭 b", "👨‍👩‍👧‍👦!", "𝔘𝔫𝔦code", "ẞ鬱ß", "한국어 텍스트", "🇩🇪🇫🇷", "héllo",
    "日本の首都",
    " two  spaces ", "tab\tand\nline", "Ελληνικά", "עברית", "हिन्दी पाठ", "ไทย", "ﷺ“quoted”",
]  # fmt: skip
PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):\n", "SELECT name FROM ships",
    "La mer est", "Il était une fois", "Die Ebbe kommt", "Das Schiff fährt", "El puerto de",
    "La marea sube", "Il mare è", "La nave parte", "日本の首都は", "潮汐是由",
    "🦭 is a seal, 🐋 is",
    "#include <stdio.h>\nint main", "{\"name\": \"Leith\", \"depth\":", "1, 1, 2, 3, 5, 8,",
    "Water boils at", "Question: What is a buoy?\nAnswer:",
]  # fmt: skip
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "boolean"},
    {"enum": ["Hull", "Leith", "北京", "🦭"]},
    {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 9},
        "minItems": 2,
        "maxItems": 4,
    },
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"const": {"a": [1, None, "é"]}},
    {"anyOf": [{"type": "null"}, {"enum": [1, 2]}]},
    {
        "type": "object",
        "properties": {"kind": {"const": "ship"}, "deep": {"type": "boolean"}},
        "required": ["kind"],
        "additionalProperties": False,
    },
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "enum": ['a"b', "c\\d"]},
    {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 3},
    {
        "type": "object",
        "properties": {
            "inner": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "required": ["inner"],
        "additionalProperties": False,
    },
    {
        "$defs": {"port": {"enum": ["Hull", "Leith"]}},
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/port"}, "to": {"$ref": "#/$defs/port"}},
        "required": ["from", "to"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"tag": {"type": "string", "maxLength": 8}},
        "additionalProperties": False,
    },
    {  # as in draft 7, which fastjsonschema reads
        "type": "array",
        "items": [{"type": "boolean"}, {"enum": ["n"]}],
        "additionalItems": False,
        "minItems": 2,
    },
]


def generated(
    tokenizer: Tokenizer, prompt: str, ids: Sequence[int], stop: str = ""
) -> tuple[str, list[int]]:
    """The streamed text of an answer of ``ids``, and where its tokens begin in it."""
    before = tokenizer.encode(prompt)
    rules = StopRules([stop] if stop else [])
    one = Generation(
        "a", before, Sampling(len(ids)), tokenizer.create_detokenizer_factory(before)(), rules
    )
    pieces, offsets = [], []
    for number, token in enumerate(ids):
        one.push(token, "length" if number == len(ids) - 1 else None, Logprobs(-1.0, [], []))
        if (delta := one.take()) is not None:
            pieces.append(delta.text)
            offsets += [token.offset for token in delta.logprobs]
        if one.is_done:
            break
    return "".join(pieces), offsets


@pytest.mark.parametrize(
    "folder", [*map(published.mistral, published.MISTRAL), published.SMOLLM2], ids=lambda f: f.name
)
def test_a_streamed_text_is_what_the_tokens_decode_to(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    for text in TEXTS:
        whole = tokenizer.encode("Say" + text)
        start = len(tokenizer.encode("Say"))
        if whole[:start] != tokenizer.encode("Say"):  # a token of both: the answer cannot be told
            continue
        expected = tokenizer.decode(whole[1:]).removeprefix(tokenizer.decode(whole[1:start]))
        found, offsets = generated(tokenizer, "Say", whole[start:])
        assert found == expected, text
        assert offsets == sorted(offsets)
        for place, token in zip(offsets, whole[start:], strict=True):
            alone = tokenizer.decode_token(token)
            if "\ufffd" not in alone:
                assert found[place:].startswith(alone), (text, alone)
        stop = expected[len(expected) // 2 :][:2]
        cut, _ = generated(tokenizer, "Say", whole[start:], stop)
        assert cut == expected[: expected.index(stop)], text


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    found = Engine(published.SMOLLM2, tmp_path_factory.mktemp("smollm2")).wait_ready()
    yield found
    found.process.terminate()
    found.process.wait(60)


def post(engine: Engine, **body: Any) -> dict[str, Any]:
    status, answer = engine.post("/v1/completions", json.dumps({"model": MODEL} | body).encode())
    assert status == 200, answer
    return dict(answer["choices"][0])


def test_greedy_texts_and_log_probabilities_are_those_of_transformers(engine: Engine) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(published.SMOLLM2, dtype=torch.float32)
    tokenizer = Tokenizer(published.SMOLLM2)
    chats = [tokenizer.render([{"role": "user", "content": prompt}]) for prompt in PROMPTS[:18]]
    long = [" ".join(PROMPTS) * times for times in (2, 6)]
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    ids += [tokenizer.encode_rendered(chat) for chat in chats]
    ids += [tokenizer.encode(text) for text in long]
    count = 16
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(
                lambda one: post(
                    engine,
                    prompt=one,
                    max_tokens=count,
                    temperature=0,
                    ignore_eos=True,
                    return_token_ids=True,
                    logprobs=3,
                    prompt_logprobs=1,
                ),
                ids,
            )
        )
    for prompt, answer in zip(ids, found, strict=True):
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )[0].tolist()
            logprobs = model(torch.tensor([out])).logits[0].log_softmax(-1)
        assert answer["token_ids"] == out[len(prompt) :]
        for place, value in enumerate(answer["logprobs"]["token_logprobs"], len(prompt)):
            assert value == pytest.approx(float(logprobs[place - 1, out[place]]), abs=1e-4)
        for place in range(1, len(prompt)):
            told = answer["prompt_logprobs"][place][str(prompt[place])]["logprob"]
            assert told == pytest.approx(float(logprobs[place - 1, prompt[place]]), abs=1e-4)


def seeded(number: int, tokens: int = 32) -> dict[str, Any]:
    return {
        "prompt": f"Chapter {number}.", "max_tokens": tokens, "seed": number, "ignore_eos": True,
        "temperature": 1 + number % 2,
    }  # fmt: skip


BODIES = [seeded(number) for number in range(64)]


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[str]:
    """Each of the seeded texts by itself."""
    return [post(engine, **body)["text"] for body in BODIES]


def differ(one: list[str], other: list[str]) -> list[int]:
    return [n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def over(engine: Engine, event: Callable[[], None]) -> list[str]:
    """The seeded texts, 32 at a time, with ``event`` in their midst."""
    with ThreadPoolExecutor(32) as pool:
        before = engine.status()["load"]["requests_total"]
        waiting = [pool.submit(post, engine, **body) for body in BODIES]
        engine.until(lambda: engine.status()["load"]["requests_total"] >= before + 33, "turns", 120)
        event()
        return [one.result()["text"] for one in waiting]


def restart(engine: Engine, name: str) -> None:
    engine.begin("restart", name)
    assert engine.finish(name, 120)["state"] == "succeeded"


def test_seeded_texts_hold_beside_others_and_over_a_restart(
    engine: Engine, alone: list[str]
) -> None:
    assert len(differ(alone, over(engine, lambda: None))) <= 1
    assert len(differ(alone, over(engine, lambda: restart(engine, "seeded")))) <= 1


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_seeded_texts_hold_with_drafts_over_restarts_and_crashes_with_a_standby(
    alone: list[str], tmp_path: Path, method: str
) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
    if method == "draft_model":
        config["model"] = str(published.SMOLLM2)  # right for as long as both draw alike
    engine = Engine(
        published.SMOLLM2, tmp_path / "run", "--standby-worker", "always",
        "--speculative-config", json.dumps(config),
    ).wait_ready()  # fmt: skip

    def standby() -> None:
        prepared = {"state": "prepared"}
        engine.until(lambda: engine.status()["standby"] == prepared, "a standby", 300)

    try:
        standby()
        assert len(differ(alone, over(engine, lambda: restart(engine, "drafted")))) <= 1
        standby()
        crash = partial(os.kill, engine.worker_pid(), signal.SIGKILL)
        assert len(differ(alone, over(engine, crash))) <= 1
        assert engine.status()["worker_starts"] == 3
        engine.clean()
    finally:
        engine.end()


def test_answers_match_their_schemas(engine: Engine) -> None:
    sys.path.append(str(published.PACKAGES))
    try:
        validate = import_module("fastjsonschema").validate
    finally:
        sys.path.remove(str(published.PACKAGES))
    valid = 0
    for number, schema in enumerate(SCHEMAS):
        for temperature in (0, 1):
            answer = post(
                engine, prompt="As JSON: ", max_tokens=200, temperature=temperature, seed=number,
                structured_outputs={"json": schema},
            )  # fmt: skip
            if answer["finish_reason"] == "stop":
                validate(schema, json.loads(answer["text"]))
                valid += 1
    assert valid >= len(SCHEMAS), "the others reached max_tokens first"
