"""Greedy text of two ranks, token for token that of one, on every detour that an engine takes.

Also with prompt lookup. Rank 0 is in this process, rank 1 in one of its own; gloo carries the sums.
In float32, where the best token is ahead of the second by more than the order of a sum can move.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute import runner
from plimsoll_engine.core.execute.sampling import SampledTokens, SamplingPlan, sample
from plimsoll_engine.errors import RanksLostError
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.messages.speculative import Speculative
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_faults.models import tiny_moe
from plimsoll_faults.models.tiny import write_checkpoint
from tests.random_model import random_model
from tests.ranks import started

REQUESTS, NEW_TOKENS, VOCABULARY = 16, 64, 256


def llama(folder: Path) -> None:
    """Biases everywhere, and a head that is the embedding."""
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0,
        eos_token_id=1, pad_token_id=0, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True,
    )  # fmt: skip
    random_model(config).save_pretrained(folder)


MODELS = {"qwen3": write_checkpoint, "qwen3-moe": tiny_moe.write_checkpoint, "llama": llama}


MOE, LLAMA = (pytest.param(name, marks=pytest.mark.long) for name in ("qwen3-moe", "llama"))


@pytest.fixture(scope="module", params=["qwen3", LLAMA])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    MODELS[request.param](folder)
    return folder


def ranks(
    model: Path, run_dir: Path, size: int, drafts: Speculative | None = None, budget: int = 24
) -> Any:
    """An engine so small that requests are cut, stopped and computed again."""
    torch.set_num_threads(1)
    return started(
        WorkerConfig(
            str(model), str(run_dir), "unused", "float32", "cpu", max_num_seqs=8,
            max_model_len=200, max_num_batched_tokens=budget, block_size=4, num_blocks=100,
            tensor_parallel_size=size, speculative=drafts,
        )
    )  # fmt: skip


def prompts() -> list[list[int]]:
    """Short and long, alone and with a common beginning."""
    rng = random.Random(4)

    def some(count: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(count)]

    shared = some(26)
    return [some(n) for n in (1, 3, 5, 24, 25, 33, 64, 100)] + [
        [*shared, *some(1 + n)] for n in range(REQUESTS - 8)
    ]


def submit_all(engine: EngineCore) -> None:
    for number, prompt in enumerate(prompts()):
        sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
        assert engine.submit(Submit(str(number), prompt, sampling)) is None


def texts(engine: EngineCore) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {str(number): [] for number in range(REQUESTS)}
    submit_all(engine)
    while engine.has_work:
        output = engine.step()
        assert not output.dropped, output.dropped
        for token in output.tokens:
            found[token.request_id].append(token.token_id)
    assert engine.scheduler.preemptions_total > 0
    assert engine.scheduler.prefix_hit_tokens_total > 0
    return found


def finish(engine: EngineCore) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("checkpoint", ["qwen3", MOE, LLAMA], indirect=True)
def test_two_ranks_make_the_same_tokens(checkpoint: Path, tmp_path: Path) -> None:
    found = []
    lookup = Speculative("ngram", 3, prompt_lookup_max=3, prompt_lookup_min=1)
    for size, drafts in ((1, None), (2, None), (2, lookup)):
        with ranks(checkpoint, tmp_path, size, drafts) as (lifecycle, processes):
            engine = lifecycle.engine
            assert engine is not None
            found.append(texts(engine))
            assert engine.speculation is None or engine.speculation.counters.draft_tokens > 0
            assert run_audit(engine, lifecycle.ledger)[2] == []
            assert ("process_group" in lifecycle.stages_s) == (size > 1)
        assert [process.returncode for process in processes] == [0] * (size - 1)
    assert found[0] == found[1] == found[2]
    assert {len(tokens) for tokens in found[0].values()} == {NEW_TOKENS}
    assert sum(len(set(tokens)) for tokens in found[0].values()) / REQUESTS > 8, "loops"


@pytest.mark.parametrize("checkpoint", ["qwen3-moe"], indirect=True)
def test_long_prompts_in_two_ranks(checkpoint: Path, tmp_path: Path) -> None:
    """Steps of which one row is needed, of which none is, and with rows that are scored."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in (150, 190, 140, 170)]
    found: list[list[tuple[str, int]]] = []
    scores: list[dict[tuple[str, int], list[float]]] = []
    for size in (1, 2):
        with ranks(checkpoint, tmp_path, size, budget=160) as (lifecycle, _):
            engine = lifecycle.engine
            assert engine is not None
            found.append([])
            scores.append({})
            for number, prompt in enumerate(prompts):
                sampling = Sampling(
                    max_tokens=8, ignore_eos=True, prompt_logprobs=1 if number == 2 else None
                )
                assert engine.submit(Submit(str(number), prompt, sampling)) is None
            while engine.has_work:
                output = engine.step()
                assert not output.dropped, output.dropped
                found[-1] += [(token.request_id, token.token_id) for token in output.tokens]
                for told in output.scores:
                    chosen = torch.frombuffer(bytearray(told.chosen), dtype=torch.float32)
                    scores[-1][told.request_id, told.first] = chosen.tolist()
    assert found[0] == found[1]
    assert len(found[0]) == 8 * len(prompts)
    assert scores[0].keys() == scores[1].keys()
    for key, alone in scores[0].items():
        assert scores[1][key] == pytest.approx(alone, abs=1e-3)
    assert sum(map(len, scores[0].values())) == 139


def test_a_rank_that_dies_in_a_step_ends_the_group_at_once(
    checkpoint: Path, tmp_path: Path
) -> None:
    with ranks(checkpoint, tmp_path, 2) as (lifecycle, (process,)):
        engine = lifecycle.engine
        assert engine is not None
        submit_all(engine)
        for _ in range(3):
            engine.step()
        process.kill()
        with pytest.raises(RanksLostError, match="rank 1") as lost:
            finish(engine)
        assert lost.value.rank_exited
    assert lifecycle.engine is None


def test_a_step_that_fails_on_rank_0_ends_the_group_and_no_rank_waits(
    checkpoint: Path, tmp_path: Path
) -> None:
    with ranks(checkpoint, tmp_path, 2) as (lifecycle, (process,)):
        engine = lifecycle.engine
        assert engine is not None
        model: Any = engine.runner.model

        def fails(*_: object) -> None:
            raise MemoryError("no memory for a step")

        model.forward = fails
        submit_all(engine)
        with pytest.raises(
            RanksLostError, match="failed on rank 0: MemoryError: no memory"
        ) as lost:
            engine.step()
        assert not lost.value.rank_exited
    assert process.returncode == 1


def test_sampling_that_fails_on_rank_0_ends_its_request_and_both_ranks_go_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 still takes the tokens of the step, which rank 0 cannot sample, from rank 0."""

    def fails_for_draws(logits: torch.Tensor, plan: SamplingPlan) -> SampledTokens:
        if plan.plain.rows:
            raise ValueError("this row cannot be sampled")
        return sample(logits, plan)

    found = []
    for size in (1, 2):
        with (
            ranks(checkpoint, tmp_path, size) as (lifecycle, processes),
            monkeypatch.context() as broken,
        ):
            engine = lifecycle.engine
            assert engine is not None
            broken.setattr(runner, "sample", fails_for_draws)  # after the warm-up, which draws
            bad = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0)
            assert engine.submit(Submit("bad", [5, 6, 7], bad)) is None
            submit_all(engine)
            tokens: dict[str, list[int]] = {}
            dropped = []
            while engine.has_work:
                output = engine.step()
                dropped += output.dropped
                for token in output.tokens:
                    tokens.setdefault(token.request_id, []).append(token.token_id)
            assert [(one.request_id, one.reason) for one in dropped] == [("bad", "error")]
            assert dropped[0].message == "ValueError: this row cannot be sampled"
            assert run_audit(engine, lifecycle.ledger)[2] == []
            found.append(tokens)
        assert [process.returncode for process in processes] == [0] * (size - 1)
    assert found[0] == found[1]
    assert {len(one) for one in found[0].values()} == {NEW_TOKENS}
    assert len(found[0]) == REQUESTS
