"""Drafts change how many steps a text takes, and no token of it.

Tests ``core/speculation/drafting.py``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.runner import Runner, count_valid_tokens
from plimsoll_engine.core.execute.sampling import SamplingRow, plan_sampling, sample
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.core.speculation import drafting as core
from plimsoll_engine.core.speculation.drafting import NgramProposer, Speculation
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.memory.audit import kv_references_match, queues_match_requests, run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages.speculative import Speculative
from plimsoll_engine.messages.worker_ipc import Sampling, Token

NEW_TOKENS = 40
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 3.0, "seed": 11, "top_p": 0.95},
    "filtered": {"temperature": 2.0, "seed": 2, "top_k": 9, "min_p": 0.001},
    "penalized": {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": -0.3},
    "biased": {"temperature": 2.0, "seed": 5, "logit_bias": {17: 9.0}, "frequency_penalty": 2.0},
    "told": {"logprobs": 2, "temperature": 1.0, "seed": 8},
}
SIZES = {
    "roomy": {"num_blocks": 400, "budget": 512},
    "chunked": {"num_blocks": 400, "budget": 7},
    "preempted": {"num_blocks": 40, "budget": 64},
    "blocks-of-one": {"num_blocks": 400, "block_size": 1, "budget": 33},
}


class Oracle:
    """Proposes what was said without drafts, with a mistake here and there, or nothing."""

    def __init__(self, texts: dict[str, list[int]], right: float = 0.8) -> None:
        self.texts = texts
        self.right = right
        self.rng = random.Random(3)

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        found = []
        for request, most in wanted:
            begun = request.num_outputs
            rest = self.texts.get(request.request_id, [])[begun : begun + most]
            if self.rng.random() < 0.1:
                rest = []
            right = [t if self.rng.random() < self.right else (t + 1) % 500 for t in rest]
            found.append(right)
        return found


def speculation(proposer: Any, seqs: int = 8, drafts: int = 4) -> Speculation:
    return Speculation(proposer, drafts, core.compute_max_rows(seqs, drafts))


def ngram(seqs: int = 8, drafts: int = 4) -> Speculation:
    return speculation(NgramProposer(1, 3), seqs, drafts)


def texts(tokens: list[Token]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for token in tokens:
        found.setdefault(token.request_id, []).append(token.token_id)
    return found


def play(engine: Any) -> list[Token]:
    """All tokens until nothing is left; the blocks' ledgers are looked at after every step."""
    tokens: list[Token] = []
    for _ in range(5_000):
        if not engine.has_work:
            _, _, findings = run_audit(engine, Ledger())
            assert not findings, findings
            return tokens
        output = engine.step()
        assert not output.dropped, output.dropped
        tokens += output.tokens
        assert engine.pool.find_problems() == []
        for rule in (kv_references_match, queues_match_requests):
            assert not rule(engine, Ledger())
    raise AssertionError("still at work after 5000 steps")


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 500) for _ in range(37)]
    lengths = (1, 30, 61)
    found = [[rng.randrange(3, 500) for _ in range(n)] for n in lengths]
    found += [[*shared, 40 + i, 50 + i] for i in range(3)]
    return dict(zip(KINDS, found, strict=True))


@pytest.fixture(scope="module")
def expected(prompts: dict[str, list[int]], tiny_model: Any, helpers: Any) -> list[Token]:
    """The tokens without drafts, each request alone."""
    scheduler = Scheduler(BlockPool(400, 4), 8, 64, 256)
    engine = EngineCore(Runner(tiny_model, 400, 4), scheduler)
    tokens: list[Token] = []
    for name, kind in KINDS.items():
        engine.submit(helpers.submit(name, prompts[name], NEW_TOKENS, **kind))
        tokens += play(engine)
    engine.close()
    return tokens


@pytest.mark.parametrize("size", SIZES)
def test_drafts_change_no_token(
    size: str, prompts: dict[str, list[int]], expected: list[Token], make_engine: Any, helpers: Any
) -> None:
    drafts = speculation(Oracle(texts(expected)))
    engine = make_engine(**SIZES[size], speculation=drafts)
    for name, kind in KINDS.items():
        engine.submit(helpers.submit(name, prompts[name], NEW_TOKENS, **kind))
    tokens = play(engine)
    assert texts(tokens) == texts(expected)
    told = [t.logprobs for t in tokens if t.request_id == "told"]
    for ours, theirs in zip(told, (t.logprobs for t in expected if t.logprobs), strict=True):
        assert ours is not None
        assert ours.top_ids == theirs.top_ids
        assert [ours.chosen, *ours.top] == pytest.approx([theirs.chosen, *theirs.top], abs=1e-4)
    counted = drafts.counters
    assert 0 < counted.accepted_tokens < counted.draft_tokens
    if size == "preempted":
        assert engine.scheduler.preemptions_total > 0
    elif size == "roomy":
        assert engine.counters.steps < 0.9 * NEW_TOKENS


def test_cached_blocks_hold_no_rejected_draft(
    prompts: dict[str, list[int]], make_engine: Any, helpers: Any
) -> None:
    plain = make_engine(num_blocks=400)
    plain.submit(helpers.submit("r", prompts["sampled"], 2 * NEW_TOKENS))
    text = helpers.finish(plain)["r"]
    engine = make_engine(num_blocks=400, speculation=speculation(Oracle({"r": text}, 0.5)))
    engine.submit(helpers.submit("r", prompts["sampled"], NEW_TOKENS))
    assert texts(play(engine))["r"] == text[:NEW_TOKENS]
    engine.submit(helpers.submit("next", prompts["sampled"] + text[:NEW_TOKENS], NEW_TOKENS))
    assert texts(play(engine))["next"] == text[NEW_TOKENS:]
    assert engine.scheduler.prefix_hit_tokens_total >= 30 + NEW_TOKENS - 2 * engine.pool.block_size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 17, NEW_TOKENS - 1])
def test_a_carried_request_goes_on_as_if_never_interrupted(
    kind: str,
    cut: int,
    prompts: dict[str, list[int]],
    expected: list[Token],
    make_engine: Any,
    helpers: Any,
) -> None:
    """The successor has other drafts, or none where it begins."""
    whole = texts(expected)[kind]
    engine = make_engine(budget=9, speculation=speculation(Oracle({kind: whole}, 0.6)))
    engine.submit(
        helpers.submit(kind, prompts[kind], NEW_TOKENS, output_ids=whole[:cut], **KINDS[kind])
    )
    assert texts(play(engine))[kind] == whole[cut:]


def test_an_aborted_request_leaves_nothing(
    prompts: dict[str, list[int]], expected: list[Token], make_engine: Any, helpers: Any
) -> None:
    for steps in range(2, 9):
        engine = make_engine(speculation=speculation(Oracle(texts(expected), 1.0)))
        for name in ("greedy", "sampled"):
            engine.submit(helpers.submit(name, prompts[name], NEW_TOKENS, **KINDS[name]))
        tokens = [token for _ in range(steps) for token in engine.step().tokens]
        engine.abort("greedy")
        tokens += play(engine)
        assert texts(tokens)["sampled"] == texts(expected)["sampled"]
        assert engine.pool.num_used == 0
        assert not engine.live


def test_a_stop_token_among_drafts_ends_the_text_there(make_engine: Any, helpers: Any) -> None:
    prompt = [5, 9, 33]
    plain = make_engine()
    plain.submit(helpers.submit("r", prompt, NEW_TOKENS))
    whole = helpers.finish(plain)["r"]
    stop = next(t for i, t in enumerate(whole) if i > 6 and t not in whole[:i])
    engine = make_engine(speculation=speculation(Oracle({"r": whole}, 1.0)))
    engine.submit(helpers.submit("r", prompt, NEW_TOKENS, stop_token_ids=[stop]))
    tokens = play(engine)
    assert texts(tokens)["r"] == whole[: whole.index(stop) + 1]
    assert [t.finish_reason for t in tokens] == [None] * (len(tokens) - 1) + ["stop"]


@pytest.mark.parametrize("place", range(5))
def test_logits_that_are_not_finite_behind_an_accepted_draft_end_their_request_alone(
    place: int,
    prompts: dict[str, list[int]],
    expected: list[Token],
    make_engine: Any,
    helpers: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows of one step are spoilt from ``place`` on: its tokens before them are kept."""
    engine = make_engine(speculation=speculation(Oracle(texts(expected), 1.0)))
    compute = engine.runner.compute
    kept: list[int] = []

    def damage(inputs: Any, chunks: Any) -> Any:
        tokens, logits = compute(inputs, chunks)
        row = 0
        for chunk in (chunk for chunk in chunks if chunk.has_newest_token):
            rows = 1 + len(chunk.drafts)
            if chunk.request.request_id == "greedy" and rows == 5 and not kept:
                logits[row + place : row + rows] = float("nan")
                kept.append(chunk.request.num_outputs + place)
            row += rows
        return tokens, logits

    monkeypatch.setattr(engine.runner, "compute", damage)
    for name in ("greedy", "sampled"):
        engine.submit(helpers.submit(name, prompts[name], NEW_TOKENS, **KINDS[name]))
    tokens, dropped = [], []
    while engine.has_work:
        output = engine.step()
        tokens += output.tokens
        dropped += output.dropped
    assert {"greedy": [], **texts(tokens)} == {
        "greedy": texts(expected)["greedy"][: kept[0]],
        "sampled": texts(expected)["sampled"],
    }
    assert [(one.request_id, one.reason) for one in dropped] == [("greedy", "error")]
    assert engine.pool.num_used == 0
    assert not engine.live


def test_prompt_lookup_takes_fewer_steps_on_a_text_that_repeats(
    make_engine: Any, helpers: Any
) -> None:
    """A bias makes the text a single token again and again."""
    request = helpers.submit("r", [5, 9, 33], 101, logit_bias={17: 100.0}, temperature=1.0, seed=4)
    plain, engine = make_engine(), make_engine(speculation=ngram())
    for one in (plain, engine):
        one.submit(request)
    assert texts(play(engine)) == helpers.finish(plain) == {"r": [17] * 101}
    assert plain.counters.steps > 100
    assert engine.counters.steps < 30
    counted = engine.speculation.counters
    assert counted.accepted_tokens == counted.draft_tokens > 70
    assert counted.drafts < 25


def test_a_request_without_luck_pauses(make_engine: Any, helpers: Any) -> None:
    """Then its steps are launched ahead of its tokens again, and few of them bring drafts."""

    class Wrong:
        looks = 0
        asked = 0

        def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
            self.looks += 1
            self.asked += len(wanted)
            return [[0] * most for _, most in wanted]

    wrong = Wrong()
    engine = make_engine(num_blocks=400, speculation=speculation(wrong))
    for number in range(4):  # of other lengths, so that their pauses begin at other times
        engine.submit(helpers.submit(str(number), [*[5, 9, 33][:number], 7], 200, seed=number))
        for _ in range(3):
            engine.step()
    play(engine)
    assert engine.counters.generation_tokens == 800
    assert wrong.asked < 4 * 22
    assert wrong.looks < 40  # most looks are in the same step, which alone waits for its tokens


def test_a_full_batch_gets_no_drafts(
    prompts: dict[str, list[int]], expected: list[Token], make_engine: Any, helpers: Any
) -> None:
    """Its rows are all there are, and its requests are not held up for their tokens."""
    drafts = Speculation(Oracle(texts(expected)), 4, len(KINDS))
    engine = make_engine(num_blocks=400, seqs=len(KINDS), speculation=drafts)
    for name, kind in KINDS.items():
        engine.submit(helpers.submit(name, prompts[name], NEW_TOKENS, **kind))
    widest = 0
    tokens: list[Token] = []
    while engine.has_work:
        tokens += engine.step().tokens
        widest = max(widest, 0 if engine.runner.newest is None else len(engine.runner.newest))
    assert texts(tokens) == texts(expected)
    assert widest == len(KINDS)


def test_a_request_with_a_grammar_gets_no_drafts(helpers: Any) -> None:
    from plimsoll_engine.messages.worker_ipc import Grammar, Submit

    drafts = ngram()
    for grammar, wanted in ((None, True), (Grammar("regex", "a*"), False)):
        request = Request.create(Submit("r", [1], Sampling(5, grammar=grammar)))
        drafts.enable_drafts(request, 100)
        assert (request.drafting is not None) is wanted


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6), st.integers(0, 2))
def test_tokens_are_taken_up_to_the_first_wrong_draft(
    pairs: list[tuple[int, int]], last: int
) -> None:
    drafts, tokens = [d for d, _ in pairs], [t for _, t in pairs] + [last]
    right = 0
    while right < len(drafts) and drafts[right] == tokens[right]:
        right += 1
    assert count_valid_tokens(drafts, tokens) == right + 1


VOCABULARY, TRIALS = 6, 40_000
CHI_SQUARE = 66.6
"""The 99.9 % quantile with 35 degrees of freedom."""


@pytest.mark.parametrize("draft", [0, 3])
def test_the_distribution_is_the_one_without_drafts(draft: int) -> None:
    """Two tokens, the second depends on the first: each pair as often as the model says."""
    torch.manual_seed(7)
    first, then = torch.randn(VOCABULARY) * 1.5, torch.randn(VOCABULARY, VOCABULARY) * 1.5
    samplings = [Sampling(8, temperature=0.8, seed=seed) for seed in range(TRIALS)]
    rows = [SamplingRow(sampling, place) for sampling in samplings for place in (0, 1)]
    logits = torch.stack([first, then[draft]]).repeat(TRIALS, 1)
    verified = sample(logits, plan_sampling(rows)).tokens.view(TRIALS, 2).tolist()
    pairs, accepted, unfinished = [], 0, []
    for sampling, tokens in zip(samplings, verified, strict=True):
        own = tokens[: count_valid_tokens([draft], tokens)]
        accepted += len(own) - 1
        if len(own) == 2:
            pairs.append((own[0], own[1]))
        else:
            unfinished.append((sampling, own[0]))
    logits = torch.stack([then[token] for _, token in unfinished])
    seconds = sample(
        logits, plan_sampling([SamplingRow(sampling, 1) for sampling, _ in unfinished])
    ).tokens
    pairs += [(one, second) for (_, one), second in zip(unfinished, seconds.tolist(), strict=True)]
    p = torch.softmax(first.double() / 0.8, dim=-1)
    q = torch.softmax(then.double() / 0.8, dim=-1)
    counted = Counter(pairs)
    chi_square = sum(
        (counted[a, b] - TRIALS * float(p[a] * q[a, b])) ** 2 / (TRIALS * float(p[a] * q[a, b]))
        for a in range(VOCABULARY)
        for b in range(VOCABULARY)
    )
    assert chi_square < CHI_SQUARE
    # min(1, p/q) with q a point mass on the draft
    assert accepted / TRIALS == pytest.approx(float(p[draft]), abs=0.01)


def test_settings_become_a_speculation() -> None:
    assert core.create_speculation(None, 8) is None
    made = core.create_speculation(
        Speculative("ngram", 4, prompt_lookup_max=6, prompt_lookup_min=2), 8
    )
    assert made is not None
    assert (made.max_drafts, made.max_rows, made.proposer) == (4, 40, NgramProposer(2, 6))


@pytest.mark.parametrize(
    ("seqs", "drafts", "rows"), [(1, 4, 5), (64, 4, 256), (256, 4, 256), (300, 4, 300)]
)
def test_rows_of_a_step(seqs: int, drafts: int, rows: int) -> None:
    assert core.compute_max_rows(seqs, drafts) == rows
