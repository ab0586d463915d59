"""The engine's text equals transformers' own, whatever happens to a request on the way.

Tests ``core/engine_core.py``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from plimsoll_engine.core.execute import runner
from plimsoll_engine.core.execute.sampling import SampledTokens, SamplingPlan, sample
from plimsoll_engine.distributed.group import Group

NEW_TOKENS = 48


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 500) for _ in range(37)]
    lengths = (1, 2, 30, 61)
    own = {f"own-{n}": [rng.randrange(3, 500) for _ in range(n)] for n in lengths}
    return own | {f"shared-{i}": [*shared, 40 + i, 50 + i] for i in range(4)}


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    found = {}
    for name, prompt in prompts.items():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        found[name] = out[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize(
    "size",
    [
        pytest.param({"num_blocks": 400, "budget": 512}, id="roomy"),
        pytest.param({"num_blocks": 400, "budget": 7}, id="chunked"),
        pytest.param({"num_blocks": 32, "budget": 64}, id="preempted"),
        pytest.param({"num_blocks": 30, "budget": 5, "seqs": 3}, id="chunked-and-preempted"),
        pytest.param({"num_blocks": 400, "block_size": 1, "budget": 33}, id="blocks-of-one"),
    ],
)
def test_greedy_text_equals_transformers(
    size: dict[str, int],
    prompts: dict[str, list[int]],
    expected: dict[str, list[int]],
    make_engine: Any,
    helpers: Any,
    request: pytest.FixtureRequest,
) -> None:
    engine = make_engine(**size)
    names = list(prompts)
    for name in names[:-1]:
        assert engine.submit(helpers.submit(name, prompts[name], NEW_TOKENS)) is None
    found = helpers.finish(engine)
    engine.submit(helpers.submit(names[-1], prompts[names[-1]], NEW_TOKENS))  # a prefix hit
    found |= helpers.finish(engine)
    assert found == expected
    if engine.pool.block_size > 1:
        assert engine.scheduler.prefix_hit_tokens_total > 0
    if "preempted" in request.node.callspec.id:
        assert engine.scheduler.preemptions_total > 0


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 3.0, "seed": 11, "top_p": 0.95},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": -0.3},
        {"temperature": 2.0, "seed": 5, "logit_bias": {17: 9.0}, "frequency_penalty": 2.0},
    ],
)
@pytest.mark.parametrize("cut", [1, 17, NEW_TOKENS - 1])
def test_a_carried_request_goes_on_as_if_never_interrupted(
    sampling: dict[str, Any],
    cut: int,
    prompts: dict[str, list[int]],
    make_engine: Any,
    helpers: Any,
) -> None:
    prompt = prompts["own-30"]
    whole_engine, successor = make_engine(), make_engine(budget=9)
    whole_engine.submit(helpers.submit("r", prompt, NEW_TOKENS, **sampling))
    whole = helpers.finish(whole_engine)["r"]
    successor.submit(helpers.submit("r", prompt, NEW_TOKENS, output_ids=whole[:cut], **sampling))
    assert helpers.finish(successor)["r"] == whole[cut:]


def test_the_tokens_of_a_batch_are_those_of_each_request_alone(
    prompts: dict[str, list[int]], make_engine: Any, helpers: Any
) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 3.0, "seed": 1},
        {"temperature": 2.0, "seed": 2, "top_k": 9, "min_p": 0.001},
        {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.9},
        {"frequency_penalty": 1.5, "logit_bias": {30: 8.0}},
        {},
    ]
    together, alone = make_engine(num_blocks=40, budget=16), make_engine(num_blocks=400)
    expected: dict[str, list[int]] = {}
    for (name, prompt), kind in zip(prompts.items(), kinds, strict=False):
        together.submit(helpers.submit(name, prompt, 24, **kind))
        alone.submit(helpers.submit(name, prompt, 24, **kind))
        expected |= helpers.finish(alone)
    assert helpers.finish(together) == expected
    assert together.scheduler.preemptions_total > 0


def test_logprobs_and_min_tokens_of_a_request(
    prompts: dict[str, list[int]], expected: dict[str, list[int]], make_engine: Any, helpers: Any
) -> None:
    tokens = expected["own-30"]
    engine = make_engine()
    stops = {"stop_token_ids": [tokens[2]], "min_tokens": 9, "logprobs": 2}
    engine.submit(helpers.submit("r", prompts["own-30"], 12, **stops))
    found = []
    while engine.has_work:
        found += engine.step().tokens
    assert [token.token_id for token in found[:2]] == tokens[:2]
    assert tokens[2] not in [token.token_id for token in found[:9]]
    for token in found[:2]:
        assert token.logprobs.top_ids[0] == token.token_id
        assert token.logprobs.chosen == token.logprobs.top[0] <= 0
    third = found[2]  # the banned token was the likeliest, and its own probability is told
    assert third.logprobs.top_ids[0] == tokens[2]
    assert third.logprobs.chosen < third.logprobs.top[0]


def test_seeds_differ(prompts: dict[str, list[int]], make_engine: Any, helpers: Any) -> None:
    engine = make_engine()
    for seed in (1, 2):
        engine.submit(helpers.submit(str(seed), prompts["own-2"], 30, temperature=4.0, seed=seed))
    found = helpers.finish(engine)
    assert found["1"] != found["2"]


def test_stop_tokens_end_a_request_unless_ignored(
    prompts: dict[str, list[int]], expected: dict[str, list[int]], make_engine: Any, helpers: Any
) -> None:
    tokens = expected["own-30"]
    stop = tokens[9]
    engine = make_engine()
    for name, ignore in (("stops", False), ("ignores", True)):
        engine.submit(
            helpers.submit(
                name, prompts["own-30"], NEW_TOKENS, stop_token_ids=[stop], ignore_eos=ignore
            )
        )
    reasons = {}
    while engine.has_work:
        for token in engine.step().tokens:
            if token.finish_reason:
                reasons[token.request_id] = (token.finish_reason, token.token_id)
    assert reasons == {"stops": ("stop", stop), "ignores": ("length", tokens[-1])}


def test_max_model_len_ends_a_request(make_engine: Any, helpers: Any) -> None:
    engine = make_engine(length=40)
    engine.submit(helpers.submit("r", [5] * 30, 1_000))
    assert len(helpers.finish(engine)["r"]) == 10


def test_a_request_that_can_never_fit_is_refused_by_name(make_engine: Any, helpers: Any) -> None:
    engine = make_engine(num_blocks=4)
    big = helpers.submit("big", [5] * 10, 100)
    big.attempt = 4
    dropped = engine.submit(big)
    assert (dropped.request_id, dropped.attempt, dropped.reason) == ("big", 4, "invalid")
    assert "KV blocks" in dropped.message
    assert not engine.has_work


def test_a_failing_request_leaves_its_neighbours(
    prompts: dict[str, list[int]],
    expected: dict[str, list[int]],
    make_engine: Any,
    helpers: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(num_blocks=200)
    launch = engine.runner.launch

    def fails_on_poison(chunks: Any) -> Any:
        if any(chunk.request.request_id == "poison" and chunk.has_newest_token for chunk in chunks):
            raise RuntimeError("this prompt breaks the model")
        return launch(chunks)

    engine.runner.launch = fails_on_poison
    good = ["own-30", "shared-1", "own-61"]
    for name in [*good[:2], "poison", good[2]]:
        engine.submit(helpers.submit(name, prompts.get(name, [7] * 9), NEW_TOKENS))
    tokens: dict[str, list[int]] = {}
    dropped = []
    while engine.has_work:
        output = engine.step()
        dropped += output.dropped
        for token in output.tokens:
            tokens.setdefault(token.request_id, []).append(token.token_id)
    assert tokens == {name: expected[name] for name in good}
    assert [(d.request_id, d.reason) for d in dropped] == [("poison", "error")]
    assert "this prompt breaks the model" in dropped[0].message
    assert "requests failed; retrying each request alone: RuntimeError: this prompt" in caplog.text


def test_a_deadline_ends_running_and_waiting_requests(make_engine: Any, helpers: Any) -> None:
    engine = make_engine(seqs=1)
    for name, deadline_s in (("runs", 5.0), ("waits", 6.0), ("patient", 60.0)):
        submit = helpers.submit(name, [ord(name[0])] * 9, 20)
        submit.arrived, submit.deadline_s = time.monotonic(), deadline_s
        submit.attempt = round(deadline_s)
        engine.submit(submit)
    engine.step()
    (started,) = [token.started for token in engine.step().tokens]
    assert 0 <= started.queued_s < 5
    assert started.cached_tokens == 0
    assert engine.end_expired_requests(time.monotonic() + 4) == []
    dropped = engine.end_expired_requests(time.monotonic() + 7)
    assert [(d.request_id, d.attempt, d.reason) for d in dropped] == [
        ("runs", 5, "deadline"),
        ("waits", 6, "deadline"),
    ]
    assert ["after 1 output tokens" in d.message for d in dropped] == [True, False]
    assert list(helpers.finish(engine)) == ["patient"]
    late = helpers.submit("late", [5] * 9, 400)
    late.arrived, late.deadline_s = time.monotonic() - 9, 8.0
    engine.submit(late)
    dropped = []
    while engine.has_work and not dropped:  # deadlines are looked at often, not after each step
        dropped = engine.step().dropped
    assert [d.request_id for d in dropped] == ["late"]
    assert not engine.has_work


def test_sampling_that_fails_is_its_request_s_and_the_ranks_go_on(
    make_engine: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever leaves the block in which the ranks compute together ends them all."""
    engine = make_engine()
    steps = list[BaseException | None]()
    told = list[int]()

    @contextmanager
    def together(_: Any) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            steps.append(error)
            raise
        steps.append(None)

    class Ranks(Group):
        def broadcast(self, x: torch.Tensor) -> torch.Tensor:
            told.append(len(x))
            return x

    def fails_with_a_seed(logits: torch.Tensor, made: SamplingPlan) -> SampledTokens:
        if made.plain.rows:
            raise ValueError("out of memory, say")
        return sample(logits, made)

    monkeypatch.setattr(engine.runner, "_run_on_ranks", together)
    monkeypatch.setattr(engine.runner, "group", Ranks())
    monkeypatch.setattr(runner, "sample", fails_with_a_seed)
    engine.submit(helpers.submit("good", [5] * 9, 20))
    engine.submit(helpers.submit("bad", [6] * 9, 20, temperature=1.0))
    dropped, tokens = [], []
    while engine.has_work:
        output = engine.step()
        dropped += output.dropped
        tokens += output.tokens
    assert [(one.request_id, one.reason) for one in dropped] == [("bad", "error")]
    assert len(tokens) == 20
    assert set(steps) == {None}
    assert len(told) == len(steps), "each step told the other ranks its tokens"
    assert not engine.live, "no cycle keeps a request"


def test_a_row_of_no_numbers_ends_its_own_request(
    prompts: dict[str, list[int]],
    expected: dict[str, list[int]],
    make_engine: Any,
    helpers: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From its fourth token on, the logits of one request are not numbers."""
    engine = make_engine(num_blocks=200)
    compute = engine.runner.compute

    def damage(inputs: Any, chunks: Any) -> Any:
        tokens, logits = compute(inputs, chunks)
        ending = [chunk.request for chunk in chunks if chunk.has_newest_token]
        for row, request in enumerate(ending):
            if request.request_id == "bad" and request.num_outputs + request.in_flight.tokens >= 3:
                logits[row] = float("nan")
        return tokens, logits

    monkeypatch.setattr(engine.runner, "compute", damage)
    bad = helpers.submit("bad", prompts["own-30"], NEW_TOKENS)
    bad.attempt = 2
    for submit in (helpers.submit("own-61", prompts["own-61"], NEW_TOKENS), bad):
        engine.submit(submit)
    engine.submit(helpers.submit("shared-1", prompts["shared-1"], NEW_TOKENS))
    tokens: dict[str, list[int]] = {}
    dropped = []
    for _ in range(4 * NEW_TOKENS):
        output = engine.step()
        dropped += output.dropped
        for token in output.tokens:
            tokens.setdefault(token.request_id, []).append(token.token_id)
    assert not engine.has_work
    assert tokens == {
        "own-61": expected["own-61"],
        "shared-1": expected["shared-1"],
        "bad": expected["own-30"][:3],
    }
    assert not engine.live, "no cycle keeps a request"
    assert [(one.request_id, one.attempt, one.reason) for one in dropped] == [("bad", 2, "error")]
    assert "not finite" in dropped[0].message
    assert engine.counters.errors == 1
