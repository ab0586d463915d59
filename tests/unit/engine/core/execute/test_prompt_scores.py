"""Log probabilities of prompts: whole, right and told before the first token, whatever happens.

Tests ``core/execute/prompt_scores.py`` and ``frontend/requests/prompt_scores.py``.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.frontend.requests.prompt_scores import BYTES_PER_NUMBER, PromptScores
from plimsoll_engine.messages import worker_ipc


def exact(model: Any, make_engine: Any, helpers: Any, ids: list[int]) -> torch.Tensor:
    """[tokens - 1, vocabulary]: what an engine says of the next token after each beginning."""
    engine = make_engine(num_blocks=128)
    rows: list[torch.Tensor] = []
    logits = model.compute_logits

    def keeps(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(logits(hidden))
        return rows[-1]

    model.compute_logits = keeps
    try:
        for end in range(1, len(ids)):
            assert engine.submit(helpers.submit(f"{end}", ids[:end], 1)) is None
            helpers.finish(engine)
    finally:
        del model.compute_logits
    found: torch.Tensor = torch.cat(rows).log_softmax(-1)
    return found


def prompt(length: int, seed: int = 1) -> list[int]:
    return [random.Random(seed).randrange(3, 400) for _ in range(length)]


def run(engine: EngineCore, wanted: dict[str, PromptScores]) -> dict[str, list[int]]:
    """Finish; each message goes to its request's scores, as in the frontend."""
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        output = engine.step()
        assert not output.dropped, output.dropped
        for message in output.scores:
            assert 1 <= message.first <= 1 + len(wanted[message.request_id]), "a gap"
            wanted[message.request_id].add(message)
        for token in output.tokens:
            assert wanted[token.request_id].is_complete, "the first token came before the scores"
            tokens.setdefault(token.request_id, []).append(token.token_id)
    return tokens


def told(scores: PromptScores, length: int) -> list[Any]:
    assert scores.is_complete
    return [scores.get_score(place) for place in range(1, length)]


def check(scores: PromptScores, ids: list[int], wanted: torch.Tensor) -> None:
    for (logprob, rank, top_ids, top), target, row in zip(
        told(scores, len(ids)), ids[1:], wanted, strict=True
    ):
        assert logprob == pytest.approx(float(row[target]), abs=1e-3)
        assert rank == 1 + int((row > row[target]).sum())
        assert top == pytest.approx(row.topk(scores.top_count).values.tolist(), abs=1e-3)
        assert float((row[top_ids] - torch.tensor(top)).abs().max() if top else 0) < 1e-3


@pytest.mark.parametrize("budget", [5, 64])
def test_each_token_of_a_prompt_has_its_own(
    make_engine: Any, tiny_model: Any, helpers: Any, budget: int
) -> None:
    """In one piece and in chunks, again once its blocks are in the prefix cache."""
    ids = prompt(37)
    wanted = exact(tiny_model, make_engine, helpers, ids)
    engine = make_engine(budget=budget)
    for name, most in (("first", 3), ("again", 0), ("more", 20)):
        scores = PromptScores(len(ids), most)
        assert engine.submit(helpers.submit(name, ids, 2, prompt_logprobs=most)) is None
        run(engine, {name: scores})
        check(scores, ids, wanted)
        assert scores.nbytes == 36 * (8 + 8 * most)
    plain = helpers.submit("plain", ids, 2)
    assert engine.submit(plain) is None
    assert helpers.finish(engine)["plain"]
    assert engine.scheduler.prefix_hit_tokens_total == 36


def test_one_token_has_none(make_engine: Any, helpers: Any) -> None:
    engine = make_engine()
    scores = PromptScores(1, 2)
    assert scores.is_complete
    assert engine.submit(helpers.submit("one", [7], 2, prompt_logprobs=2)) is None
    assert len(run(engine, {"one": scores})["one"]) == 2
    assert len(scores) == 0


def test_they_survive_preemptions_beside_others(
    make_engine: Any, tiny_model: Any, helpers: Any
) -> None:
    """Blocks are short, so that requests are stopped in their prompts and after them."""
    prompts = {f"{n}": prompt(20 + 7 * n, seed=n) for n in range(6)}
    engine = make_engine(num_blocks=26, budget=11)
    scores = {}
    for name, ids in prompts.items():
        scores[name] = PromptScores(len(ids), 2)
        asked = helpers.submit(name, ids, 30, ignore_eos=True, prompt_logprobs=2)
        assert engine.submit(asked) is None
    tokens = run(engine, scores)
    assert engine.scheduler.preemptions_total > 2
    assert {len(one) for one in tokens.values()} == {30}
    for name, ids in prompts.items():
        alone = make_engine(num_blocks=128)
        wanted = PromptScores(len(ids), 2)
        assert alone.submit(helpers.submit(name, ids, 1, prompt_logprobs=2)) is None
        run(alone, {name: wanted})
        for found, other in zip(told(scores[name], len(ids)), told(wanted, len(ids)), strict=True):
            assert found.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert found.top == pytest.approx(other.top, abs=1e-3)


def message(first: int, values: list[float]) -> worker_ipc.PromptScores:
    count = len(values)
    floats, ints = struct.pack(f"{count}f", *values), struct.pack(f"{count}i", *range(count))
    return worker_ipc.PromptScores("r", 1, first, floats, ints, ints, floats)


def test_what_is_told_again_is_taken_in_once_and_a_gap_not_at_all() -> None:
    scores = PromptScores(6, 1)
    scores.add(message(3, [9.0]))
    assert len(scores) == 0
    scores.add(message(1, [-1.0, -2.0]))
    scores.add(message(1, [-1.0, -2.0]))
    scores.add(message(2, [-2.0, -3.0, -4.0]))
    assert [scores.get_score(place).logprob for place in (1, 2, 3, 4)] == [-1.0, -2.0, -3.0, -4.0]
    assert not scores.is_complete
    scores.add(message(0, [5.0]))
    scores.add(message(5, [-5.0, -6.0, -7.0]))  # more than the prompt has
    assert scores.is_complete
    assert scores.get_score(5) == (-5.0, 0, [0], [-5.0])
    assert scores.nbytes == 5 * 4 * BYTES_PER_NUMBER
