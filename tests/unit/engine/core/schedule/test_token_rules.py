"""Allowed tokens and bad words, in the rules themselves and in a sampled row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.sampling import SamplingRow, plan_sampling, sample
from plimsoll_engine.core.schedule.token_rules import (
    count_bad_word_lookback,
    find_banned_tokens,
    make_token_mask,
)
from plimsoll_engine.messages.worker_ipc import Sampling

MakeEngine = Callable[..., EngineCore]

tokens = st.integers(0, 200)


@given(st.sets(tokens, min_size=1))
def test_a_mask_has_the_bits_of_its_tokens(allowed: set[int]) -> None:
    found = make_token_mask(allowed)
    assert len(found) % 4 == 0
    assert {bit for bit in range(8 * len(found)) if found[bit // 8] >> bit % 8 & 1} == allowed


def test_masks_of_different_lengths_go_into_one_step() -> None:
    logits = torch.zeros(3, 70)
    logits[:, 69], logits[:, 3] = 9.0, 1.0
    rows = [
        SamplingRow(Sampling(max_tokens=1), 0, None, make_token_mask([3, 5])),
        SamplingRow(Sampling(max_tokens=1), 0, None, make_token_mask([3, 69])),
        SamplingRow(Sampling(max_tokens=1), 0),
    ]
    assert sample(logits, plan_sampling(rows)).tokens.tolist() == [3, 69, 69]


words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4)


@given(words=words, output=st.lists(st.integers(0, 3), max_size=6), token=st.integers(0, 3))
def test_a_token_is_banned_where_it_completes_a_word(
    words: list[list[int]], output: list[int], token: int
) -> None:
    ends = any([*output, token][-len(word) :] == word for word in words)
    assert (token in find_banned_tokens(words, output)) == ends
    assert (
        token
        in find_banned_tokens(
            words,
            output[-count_bad_word_lookback(words) :] if count_bad_word_lookback(words) else [],
        )
    ) == ends


def test_a_step_takes_no_banned_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert (
        sample(logits, plan_sampling([SamplingRow(Sampling(max_tokens=1), 0, banned=(1,))])).tokens[
            0
        ]
        == 2
    )


def test_named_tokens_replace_the_likeliest_ones() -> None:
    logits = torch.randn(4, 30)
    raw = logits.log_softmax(dim=-1)
    best = logits.argmax(dim=-1).tolist()
    other = [token for token in range(30) if token not in best][:3]
    rows = [
        SamplingRow(Sampling(max_tokens=1, logprobs=2), 0),
        SamplingRow(Sampling(max_tokens=1, logprobs=5, logprob_token_ids=other), 0),
        SamplingRow(Sampling(max_tokens=1), 0),
        SamplingRow(Sampling(max_tokens=1, logprobs=0, logprob_token_ids=[best[3]]), 0),
    ]
    found = sample(logits.clone(), plan_sampling(rows)).copy_to_host().get_logprobs()
    assert found.keys() == {0, 1, 3}
    assert len(found[0].top_ids) == 2
    assert found[1].top_ids == [best[1], *other]
    assert found[1].top == [raw[1, token].item() for token in found[1].top_ids]
    assert (found[3].top_ids, found[3].top) == ([best[3]], [found[3].chosen])


def output(engine: EngineCore, helpers: Any, name: str, **knobs: Any) -> list[int]:
    engine.submit(helpers.submit(name, [3, 4, 5], 12, **knobs))
    return list(helpers.finish(engine)[name])


def test_a_request_keeps_to_its_rules(make_engine: MakeEngine, helpers: Any) -> None:
    engine = make_engine()
    plain = output(engine, helpers, "plain")
    allowed = output(engine, helpers, "allowed", allowed_token_ids=[7, 8])
    assert set(allowed) <= {7, 8}
    assert len(allowed) == 12
    pair = plain[4:6]
    other = output(engine, helpers, "bad", bad_words=[pair, plain[:1]])
    assert plain[0] not in other
    assert all(other[at : at + 2] != pair for at in range(11))
    alone = output(engine, helpers, "pair", bad_words=[pair])
    assert alone[:5] == plain[:5]
    assert alone[5] != plain[5]


def test_a_carried_request_goes_on_under_its_rules(make_engine: MakeEngine, helpers: Any) -> None:
    engine = make_engine()
    plain = output(engine, helpers, "plain")
    rules: dict[str, Any] = {"bad_words": [plain[4:6]], "logit_bias": {plain[4]: 1.0}}
    whole = output(engine, helpers, "whole", **rules)
    submit = helpers.submit("rest", [3, 4, 5], 12, **rules)
    submit.output_ids = whole[:5]
    engine.submit(submit)
    assert helpers.finish(engine)["rest"] == whole[5:]
