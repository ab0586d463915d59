"""The draws are right, and depend on (seed, position) alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from plimsoll_engine.core.sampling import sample, uniform
from plimsoll_engine.ipc import Sampling


def draws(logits: list[float], count: int = 4_000, **knobs: float) -> Counter[int]:
    row = torch.tensor([logits])
    sampling = Sampling(max_tokens=1, seed=7, temperature=knobs.pop("temperature", 1.0), **knobs)  # type: ignore[arg-type]
    tokens = sample(row.expand(count, -1), [sampling] * count, range(count))
    return Counter(tokens.tolist())


def test_frequencies_follow_the_softmax() -> None:
    logits = [1.0, 0.0, 2.0, -1.0]
    expected = torch.softmax(torch.tensor(logits), dim=0).tolist()
    found = draws(logits)
    for token, probability in enumerate(expected):
        # Six standard deviations of a binomial count: once in 10**9 draws of a seed.
        assert abs(found[token] / 4_000 - probability) < 6 * (probability / 4_000) ** 0.5


def test_temperature_zero_is_greedy() -> None:
    assert set(draws([0.1, 0.3, 0.2], temperature=0.0)) == {1}


@pytest.mark.parametrize(
    ("knobs", "allowed"),
    [
        ({"top_k": 2}, {2, 0}),
        ({"top_k": 1}, {2}),
        ({"top_p": 0.5}, {2}),
        ({"top_p": 0.7}, {2, 0}),
        ({"min_p": 0.3}, {2, 0}),
        ({"min_p": 1.0}, {2}),
        ({"top_p": 0.0}, {2}),
        ({"top_k": 100}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_the_likeliest(knobs: dict[str, float], allowed: set[int]) -> None:
    assert set(draws([1.0, 0.0, 2.0, -1.0], **knobs)) == allowed


def test_a_row_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 50)
    samplings = [Sampling(max_tokens=1, temperature=0.2 * i, seed=i, top_k=i) for i in range(16)]
    together = sample(logits, samplings, range(16)).tolist()
    alone = [int(sample(logits[i : i + 1], [samplings[i]], [i])[0]) for i in range(16)]
    assert together == alone


def test_the_random_number_is_of_the_position() -> None:
    numbers = {uniform(1, i) for i in range(1_000)}
    assert len(numbers) == 1_000
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(1, 5) == uniform(1, 5) != uniform(2, 5)
