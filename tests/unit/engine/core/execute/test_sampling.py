"""The draws are right, and depend on (seed, position) alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from plimsoll_engine.core.execute import sampling as module
from plimsoll_engine.core.execute.logit_edits import BANNED_BIAS
from plimsoll_engine.core.execute.sampling import (
    NO_TOKEN,
    SamplingRow,
    create_noise_key,
    plan_sampling,
    sample,
)
from plimsoll_engine.core.schedule.token_rules import TokenCounts
from plimsoll_engine.kernels.reference import ReferenceOps
from plimsoll_engine.messages.worker_ipc import Sampling

VOCABULARY = 12
REFERENCE = ReferenceOps()


def draws(logits: list[float], count: int = 4_000, **knobs: Any) -> Counter[int]:
    row = torch.tensor([logits])
    sampling = Sampling(max_tokens=1, seed=7, temperature=knobs.pop("temperature", 1.0), **knobs)
    rows = plan_sampling([SamplingRow(sampling, position) for position in range(count)])
    return Counter(sample(row.expand(count, -1), rows).tokens.tolist())


def one(logits: torch.Tensor, row: SamplingRow) -> int:
    return int(sample(logits.clone().unsqueeze(0), plan_sampling([row])).tokens[0])


@pytest.mark.parametrize("knobs", [{}, {"top_k": 4}, {"top_p": 1.0, "min_p": 1e-9}])
def test_frequencies_follow_the_softmax(knobs: dict[str, Any]) -> None:
    logits = [1.0, 0.0, 2.0, -1.0]
    expected = torch.softmax(torch.tensor(logits), dim=0).tolist()
    found = draws(logits, **knobs)
    for token, probability in enumerate(expected):
        # Six standard deviations of a binomial count: once in 10**9 draws of a seed.
        assert abs(found[token] / 4_000 - probability) < 6 * (probability / 4_000) ** 0.5


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-300])
def test_temperature_zero_is_greedy(temperature: float) -> None:
    assert set(draws([0.1, 0.3, 0.2], temperature=temperature)) == {1}


@pytest.mark.parametrize(
    ("knobs", "allowed"),
    [
        ({"top_k": 2}, {2, 0}),
        ({"top_k": 1}, {2}),
        ({"top_p": 0.5}, {2}),
        ({"top_p": 0.7}, {2, 0}),
        ({"top_k": 2, "top_p": 0.7}, {2}),  # 0.73 of what top_k leaves
        ({"min_p": 0.3}, {2, 0}),
        ({"min_p": 1.0}, {2}),
        ({"top_p": 0.0}, {2}),
        ({"top_k": 100}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_the_likeliest(knobs: dict[str, Any], allowed: set[int]) -> None:
    assert set(draws([1.0, 0.0, 2.0, -1.0], **knobs)) == allowed


def test_the_key_is_of_the_position() -> None:
    keys = {create_noise_key(1, i) for i in range(1_000)}
    assert len(keys) == 1_000
    assert create_noise_key(1, 5) == create_noise_key(1, 5) != create_noise_key(2, 5)


@pytest.mark.parametrize(
    ("vocabulary", "temperature", "count"),
    [
        (2, 1.0, 100_000),
        (50, 1.0, 100_000),
        pytest.param(50, 1.0, 1_000_000, marks=pytest.mark.long),
        pytest.param(500, 2.0, 1_000_000, marks=pytest.mark.long),
    ],
)
def test_draws_pass_a_chi_square_test(vocabulary: int, temperature: float, count: int) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)) * 2
    expected = torch.softmax(logits.double() / temperature, dim=0).numpy()
    scale = torch.tensor(1 / temperature)
    found, at_once = np.zeros(vocabulary), 50_000
    for start in range(0, count, at_once):
        keys = torch.tensor(
            [create_noise_key(11, i) for i in range(start, start + at_once)], dtype=torch.int32
        )
        drawn = REFERENCE.draw(logits.expand(at_once, -1), scale.expand(at_once), keys)
        found += np.bincount(drawn.numpy(), minlength=vocabulary)
    rare = expected * count < 5
    expected = np.append(expected[~rare], expected[rare].sum())[: vocabulary - rare.sum() + 1]
    found = np.append(found[~rare], found[rare].sum())[: len(expected)]
    kept = expected > 0
    assert chisquare(found[kept], expected[kept] * count).pvalue > 1e-3


@pytest.mark.parametrize("knobs", [{}, {"top_p": 0.95}])
def test_a_draw_is_as_sensitive_as_the_distribution(knobs: dict[str, Any]) -> None:
    """Rounding by 6e-5 changes a few draws in 100,000; a walk over the running sum changes 400."""
    chance = torch.Generator().manual_seed(5)
    logits = torch.randn(1, 4_096, generator=chance) * 0.5
    rounded = logits + torch.randn(1, 4_096, generator=chance) * 6e-5
    count = 1_500 if knobs else 3_000
    rows = plan_sampling(
        [SamplingRow(Sampling(1, temperature=1.0, **knobs), i) for i in range(count)]
    )
    one, other = (sample(x.expand(count, -1).clone(), rows).tokens for x in (logits, rounded))
    assert int((one != other).sum()) <= 2


def test_a_row_of_no_numbers_has_no_token() -> None:
    logits = torch.zeros(4, 9)
    logits[0] = logits[1] = float("nan")
    logits[2, 4] = float("inf")
    wanted = Sampling(1, temperature=1.0, logprobs=2)
    rows = [
        SamplingRow(Sampling(1), 0),
        SamplingRow(wanted, 0),
        SamplingRow(Sampling(1, temperature=1.0, top_p=0.5), 0),
    ]
    rows.append(SamplingRow(Sampling(1), 0, allowed=b""))
    assert sample(logits, plan_sampling(rows)).tokens.tolist() == [NO_TOKEN] * 4


def reference(
    logits: list[float], row: SamplingRow, prompt: list[int], output: list[int]
) -> list[float]:
    """The edited logits, written down from the definitions of OpenAI and vLLM."""
    sampling, found = row.sampling, []
    for token, logit in enumerate(logits):
        value = logit + sampling.logit_bias.get(token, 0.0)
        if row.position < sampling.min_tokens and token in sampling.stop_token_ids:
            value += BANNED_BIAS
        if token in prompt or token in output:
            repetition = sampling.repetition_penalty
            value = value / repetition if value > 0 else value * repetition
        value -= sampling.frequency_penalty * output.count(token)
        value -= sampling.presence_penalty * (token in output)
        if row.allowed is not None and not row.allowed[token // 8] >> token % 8 & 1:
            value = -math.inf
        found.append(value)
    return found


token_ids = st.integers(0, VOCABULARY - 1)
penalty = st.sampled_from([0.0, 0.5, -1.5, 2.0])
samplings = st.builds(
    Sampling,
    max_tokens=st.just(99),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.6]),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**63 - 1),
    stop_token_ids=st.lists(token_ids, max_size=2),
    presence_penalty=penalty,
    frequency_penalty=penalty,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100.0, -1.0, 5.0, 100.0]), max_size=3),
    min_tokens=st.sampled_from([0, 3]),
    logprobs=st.none() | st.integers(0, 5),
)
masks = st.none() | st.sets(token_ids, min_size=1).map(
    lambda allowed: sum(1 << token for token in allowed).to_bytes(4, "little")
)
requests = st.tuples(
    st.lists(st.floats(-8, 8, width=32), min_size=VOCABULARY, max_size=VOCABULARY),
    samplings,
    st.lists(token_ids, max_size=6),
    st.lists(token_ids, max_size=6),
    masks,
)


def create_sampling_row(request: Any) -> SamplingRow:
    _, sampling, prompt, output, mask = request
    counts = TokenCounts.create_if_needed(sampling, prompt, output)
    return SamplingRow(sampling, len(output), counts, mask)


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(requests, min_size=1, max_size=5), at_once=st.sampled_from([1, 1 << 23]))
def test_a_batch_is_its_rows_and_each_follows_the_definitions(
    batch: list[Any], at_once: int
) -> None:
    rows = [create_sampling_row(request) for request in batch]
    logits = torch.tensor([request[0] for request in batch])
    before, module.MAX_WORKSPACE_ELEMENTS = module.MAX_WORKSPACE_ELEMENTS, at_once
    try:
        sampled = sample(logits.clone(), plan_sampling(rows))
    finally:
        module.MAX_WORKSPACE_ELEMENTS = before
    tokens, logprobs = sampled.tokens.tolist(), sampled.get_logprobs()
    for number, (request, row, token) in enumerate(zip(batch, rows, tokens, strict=True)):
        assert token == one(logits[number], row)
        edited = reference(request[0], row, request[2], request[3])
        if row.sampling.temperature == 0:
            assert edited[token] >= max(edited) - 1e-4 * max(1, abs(max(edited)))
        assert edited[token] > -math.inf
        raw = logits[number].double().log_softmax(dim=-1).tolist()
        if row.sampling.logprobs is None:
            assert number not in logprobs
            continue
        found = logprobs[number]
        assert found.chosen == pytest.approx(raw[token], abs=1e-4)
        assert found.top == pytest.approx(
            sorted(raw, reverse=True)[: row.sampling.logprobs], abs=1e-4
        )
        assert [raw[i] for i in found.top_ids] == pytest.approx(found.top, abs=1e-4)


@given(
    prompt=st.lists(token_ids, max_size=9),
    output=st.lists(token_ids, max_size=9),
    cut=st.integers(0, 9),
)
def test_counts_are_the_same_when_a_request_was_carried(
    prompt: list[int], output: list[int], cut: int
) -> None:
    carried = TokenCounts(prompt, output[:cut])
    for token in output[cut:]:
        carried.add(token)
    counted = dict(zip(carried.tokens, carried.outputs, strict=True))
    assert counted == {token: output.count(token) for token in {*prompt, *output}}


def test_padding_of_the_vocabulary_is_never_allowed_by_a_grammar() -> None:
    logits = torch.zeros(40)
    logits[39] = 9.0
    mask = (0b100).to_bytes(4, "little")
    assert one(logits, SamplingRow(Sampling(max_tokens=1), 0, None, mask)) == 2


def test_a_token_that_the_model_lacks_is_nobody_elses() -> None:
    bias = SamplingRow(Sampling(max_tokens=1, logit_bias={VOCABULARY + 3: 50.0, 5: 1.0}), 0)
    logits = torch.zeros(2, VOCABULARY)
    assert sample(logits, plan_sampling([bias, bias])).tokens.tolist() == [5, 5]


def test_a_ban_of_all_that_may_follow_bans_nothing() -> None:
    mask = (0b110).to_bytes(4, "little")
    sampling = Sampling(max_tokens=9, min_tokens=9, stop_token_ids=[1, 2], temperature=1.0, seed=3)
    assert one(torch.zeros(12), SamplingRow(sampling, 0, None, mask)) in (1, 2)


def test_a_greedy_row_is_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_rows = []
    real = torch.Tensor.sort

    def counting(tensor: torch.Tensor, *args: Any, **knobs: Any) -> Any:
        sorted_rows.append(len(tensor))
        return real(tensor, *args, **knobs)

    monkeypatch.setattr(torch.Tensor, "sort", counting)
    greedy = [SamplingRow(Sampling(max_tokens=1), 0)] * 3
    drawn = [SamplingRow(Sampling(max_tokens=1, temperature=1.0), 0)] * 2
    filtered = [SamplingRow(Sampling(max_tokens=1, temperature=1.0, top_p=0.5), 0)]
    sample(torch.randn(5, 9), plan_sampling(greedy + drawn))
    assert sorted_rows == []
    sample(torch.randn(6, 9), plan_sampling(greedy + drawn + filtered))
    assert sorted_rows == [1]
