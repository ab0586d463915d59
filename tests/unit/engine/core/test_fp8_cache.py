"""A KV pool in FP8: what it holds, what it costs, and that nothing forgets its scales.

Tests ``kvcache/pool_memory.py``, ``kernels/reference.py`` and ``core/sizes.py``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from plimsoll_engine import settings
from plimsoll_engine.core import sizes
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.handover import export, inheritance
from plimsoll_engine.core.handover.inheritance import Inheritance
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.errors import SettingsError
from plimsoll_engine.kernels.quantized import FP8, dequantize
from plimsoll_engine.kernels.reference import ReferenceOps
from plimsoll_engine.kernels.step_plan import KVShape, StepPlan
from plimsoll_engine.kvcache.block_copies import BlockCopier
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.kvcache.offload import Offload
from plimsoll_engine.kvcache.pool_memory import PoolTensors, compute_pool_sums, make_pool_tensors
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages.handover import HandoverOutcome, HandoverRefusedError, PoolLayout
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from tests.logits import recorded
from tests.lora import SIZES
from tests.random_model import random_model

CPU = torch.device("cpu")
KV = KVShape(3, 2, 8)
BLOCK, BLOCKS = 4, 10
SLOTS = BLOCK * BLOCKS
OPS = ReferenceOps()


def plan_of(pool: PoolTensors) -> StepPlan:
    """Two sequences that decode and one prompt, all of whose tokens are in the step's pool."""

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return StepPlan(
        pool.pairs[0], pool.pairs[1], BLOCK, torch.tensor([5, 33, 12, 13, 14, 15, 0]),
        ints([[7, 1, 0], [2, 8, 0], [3, 0, 0]]), ints([6, 6, 5]), ints([0, 1, 2, 7]), decodes=2,
        longest=5, scales=pool.scales,
    )  # fmt: skip


def filled() -> PoolTensors:
    """A pool whose every slot was written through the operations."""
    torch.manual_seed(5)
    pool = make_pool_tensors(KV, SLOTS, FP8, CPU)
    everything = plan_of(pool)
    everything.write_slots = torch.arange(SLOTS)
    for layer in range(KV.layers):
        key, value = (torch.randn(SLOTS, KV.heads, KV.dim) * 3**layer for _ in range(2))
        OPS.store(key, value, everything, layer)
    return pool


def meant(pool: PoolTensors) -> PoolTensors:
    """The pool in float32; in its own, a head's scales of a block lie together."""
    assert pool.scales is not None
    scales = pool.scales.view(2, KV.layers, BLOCKS, KV.heads, BLOCK).transpose(-1, -2)
    scales = scales.reshape(pool.scales.shape)
    return PoolTensors(dequantize(pool.pairs, scales.unsqueeze(-1)), None)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_that_of_what_the_pool_means(window: int | None) -> None:
    pool = filled()
    wide = meant(pool)
    key, value = torch.randn(7, KV.heads, KV.dim), torch.randn(7, KV.heads, KV.dim)
    query = torch.randn(7, 4, KV.dim)
    before = pool.pairs.clone()
    narrow = plan_of(pool)
    OPS.store(key, value, narrow, 1)
    wide = meant(pool)
    found = OPS.attend(query, narrow, 1, 0.3, window)
    torch.testing.assert_close(found, OPS.attend(query, plan_of(wide), 1, 0.3, window))
    for rows, stored in zip((key, value), wide.pairs[:, 1], strict=True):
        written = stored[narrow.write_slots]
        assert not torch.equal(written, rows)
        largest = rows.abs().amax(dim=-1, keepdim=True)
        room = torch.maximum(rows.abs(), largest / 448 * 2**-6) / 16
        assert bool(((written - rows).abs() <= room * 1.001).all())
    others = [slot for slot in range(SLOTS) if slot not in narrow.write_slots.tolist()]
    assert torch.equal(
        pool.pairs[:, 1, others].view(torch.uint8), before[:, 1, others].view(torch.uint8)
    )
    assert torch.equal(pool.pairs[:, 0].view(torch.uint8), before[:, 0].view(torch.uint8))


def test_a_scale_is_part_of_a_blocks_sum() -> None:
    pool = filled()
    assert pool.scales is not None
    before = compute_pool_sums(pool, BLOCK, range(BLOCKS))
    assert compute_pool_sums(meant(pool), BLOCK, range(BLOCKS)) != before
    pool.scales[1, 2, 3 * BLOCK + 1, 0] *= 2
    after = compute_pool_sums(pool, BLOCK, range(BLOCKS))
    assert [a != b for a, b in zip(before, after, strict=True)] == [n == 3 for n in range(BLOCKS)]


def test_memory_that_is_mapped_holds_both() -> None:
    memory = torch.zeros(SLOTS * KV.compute_bytes_per_token(FP8), dtype=torch.uint8)
    pool, source = make_pool_tensors(KV, SLOTS, FP8, CPU, memory), filled()
    assert pool.scales is not None
    assert source.scales is not None
    assert pool.nbytes == source.nbytes == len(memory) == SLOTS * 2 * 3 * 2 * (8 + 4)
    pool.pairs.copy_(source.pairs)
    pool.scales.copy_(source.scales)
    again = make_pool_tensors(KV, SLOTS, FP8, CPU, memory)
    assert compute_pool_sums(again, BLOCK, range(BLOCKS)) == compute_pool_sums(
        source, BLOCK, range(BLOCKS)
    )
    assert torch.equal(meant(again).pairs, meant(source).pairs)


def test_blocks_go_to_the_host_and_back_with_their_scales() -> None:
    pool = filled()
    copies = BlockCopier(pool.pairs, BLOCK, 3, pool.scales)
    assert copies.nbytes == 3 * pool.nbytes // BLOCKS
    sums = compute_pool_sums(pool, BLOCK, [4])
    assert copies.store([(4, 2)]).is_done()
    assert copies.load([(6, 2)]).is_done()
    assert compute_pool_sums(pool, BLOCK, [6]) == compute_pool_sums(pool, BLOCK, [4]) == sums
    copies.close()
    assert copies.nbytes == 0


def texts(engine: EngineCore, helpers: Any) -> dict[str, list[int]]:
    for number in range(6):
        prompt = [40 + number * 5 + place for place in range(3 + 9 * number)]
        assert engine.submit(helpers.submit(str(number), prompt, 40)) is None
    return dict(helpers.finish(engine))


def test_the_text_does_not_depend_on_the_schedule(make_engine: Any, helpers: Any) -> None:
    """Cut prompts, preempted requests and shared prefixes read the same rounded keys and values."""
    expected = texts(make_engine(num_blocks=64, block_size=4, kv_dtype=FP8), helpers)
    engine = make_engine(num_blocks=40, block_size=4, budget=16, kv_dtype=FP8)
    assert texts(engine, helpers) == expected
    assert engine.scheduler.preemptions_total > 0
    assert texts(engine, helpers) == expected
    assert engine.scheduler.prefix_hit_tokens_total > 0
    assert run_audit(engine, Ledger())[2] == []


def test_logits_are_near_those_of_float32(helpers: Any, record_property: Any) -> None:
    """With random weights of gain 1, and the same tokens for both."""
    config = AutoConfig.for_model(**SIZES, model_type="llama")
    exact = random_model(config)
    model = Decoder(config, torch.float32)
    state = {name: 0.5 * x if x.dim() == 2 else x for name, x in exact.state_dict().items()}
    model.bind(
        {
            name: torch.cat([state[source] for source, _ in part.sources])
            for name, part in model.parts.items()
        }
    )
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(2, 256, (60,), generator=generator).tolist()
    found = []
    for dtype in (torch.float32, FP8):
        runner = Runner(model, 100, 8, kv_dtype=dtype)
        engine = EngineCore(runner, Scheduler(BlockPool(100, 8), 8, 64, 200))
        seen = recorded(engine)
        for count in range(1, len(ids)):
            assert (
                engine.submit(helpers.submit(str(count), ids[:count], 1, ignore_eos=True)) is None
            )
        helpers.finish(engine)
        engine.close()
        found.append(torch.stack([seen[str(count), 0] for count in range(1, len(ids))]))
    wide, narrow = found
    agreement = float((wide.argmax(-1) == narrow.argmax(-1)).float().mean())
    figures = {
        "mean_difference": float((wide - narrow).abs().mean()),
        "max_difference": float((wide - narrow).abs().max()),
        "deviation_of_logits": float(wide.std()), "top1_agreement": agreement,
        "relative": float((wide - narrow).norm() / wide.norm()),
    }  # fmt: skip
    for name, value in figures.items():
        record_property(name, value)
        print(f"{name} {value:.4f}")
    assert 0 < figures["relative"] < 0.1
    assert agreement > 0.85


def test_evicted_blocks_come_back(make_engine: Any, helpers: Any) -> None:
    plain = make_engine(num_blocks=64, kv_dtype=FP8)
    engine = make_engine(num_blocks=16, block_size=4, budget=16, kv_dtype=FP8)
    kv, scales = engine.runner.kv, engine.runner.kv_scales
    block_bytes = engine.runner.kv_bytes // 16
    assert block_bytes * 16 == kv.nbytes + scales.nbytes
    engine.scheduler.offload = Offload.create(engine.pool, kv, 64 * block_bytes + 1, scales)
    assert engine.scheduler.offload.slots == 64
    del kv, scales
    for turn in range(2):
        for number in range(6):
            prompt = [number * 7 % 50 + k for k in range(21)]
            for one in (plain, engine):
                assert one.submit(helpers.submit(f"r{number}", prompt, 6)) is None
            assert helpers.finish(engine) == helpers.finish(plain)
            for _ in range(4):
                engine.poll(is_idle=True)
                assert run_audit(engine, Ledger())[2] == []
        assert (engine.scheduler.offload.loaded_total > 0) == bool(turn)


def test_a_kept_scale_is_found(make_engine: Any) -> None:
    engine = make_engine(kv_dtype=FP8)
    assert run_audit(engine, Ledger())[2] == []
    kept = engine.runner.kv_scales
    rules = [finding.rule for finding in run_audit(engine, Ledger())[2]]
    assert rules == ["kv_pool_has_its_owners_alone"]
    del kept
    assert run_audit(engine, Ledger())[2] == []


def test_a_successor_goes_on_with_keys_values_and_scales(tiny_model: Any, helpers: Any) -> None:
    memory = torch.zeros(64 * 4 * tiny_model.kv.compute_bytes_per_token(FP8), dtype=torch.uint8)
    layout = PoolLayout(b"w", b"m", str(FP8), tuple(tiny_model.kv), 4, 64, 1)

    def engine_of(tables: Any = ()) -> EngineCore:
        runner = Runner(tiny_model, 64, 4, memory, None, FP8)
        pool = BlockPool(64, 4, [table.blocks for table in tables])
        engine = EngineCore(runner, Scheduler(pool, 8, 64, 256))
        engine.inheritance = Inheritance(tables, pool) if tables else None
        return engine

    prompt = list(range(40, 60))
    whole = engine_of()
    assert whole.submit(helpers.submit("a", prompt, 30)) is None
    expected = helpers.finish(whole)["a"]
    whole.close()
    old = engine_of()
    assert old.submit(helpers.submit("a", prompt, 30)) is None
    said = [token.token_id for _ in range(9) for token in old.step().tokens]
    said += [token.token_id for token in old.quiesce().tokens]
    data = export.export_tables(old, layout)
    used = sorted(old.pool.count_references())
    old.close()
    runner = Runner(tiny_model, 64, 4, memory, None, FP8)
    assert runner.kv_scales is not None
    scale = runner.kv_scales[1, -1, used[0] * 4 + 2]
    kept = scale.clone()
    scale *= 1.5
    with pytest.raises(
        HandoverRefusedError, match=rf"1 of \d+ KV blocks .* block {used[0]}$"
    ) as refused:
        inheritance.validate_tables(data, layout, runner, 8)
    assert refused.value.outcome is HandoverOutcome.BAD_CONTENTS
    scale.copy_(kept)
    new = engine_of(inheritance.validate_tables(data, layout, runner, 8))
    runner.close()
    assert new.submit(helpers.submit("a", prompt, 30, output_ids=said)) is None
    before = new.counters.prompt_tokens
    assert said + helpers.finish(new)["a"] == expected
    assert new.counters.prompt_tokens == before
    new.close()


def test_an_engine_starts_serves_and_ends(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = WorkerConfig(
        str(tiny_checkpoint), str(tmp_path), "unused", device="cpu", num_blocks=64, block_size=16,
        max_num_batched_tokens=64, max_num_seqs=4, kv_cache_dtype="fp8", kv_offload_bytes=1 << 20,
    )  # fmt: skip
    lifecycle = CoreLifecycle(config)
    engine = lifecycle.start()
    entries = {entry.owner: entry for entry in lifecycle.ledger.list_entries()}
    per_token = 2 * 4 * 2 * (16 + 4)
    assert entries["kv_pool"].bytes == entries["kv_pool"].bound == 64 * 16 * per_token
    assert entries["kv_offload"].bytes == (1 << 20) // (16 * per_token) * 16 * per_token
    assert run_audit(engine, lifecycle.ledger)[2] == []
    del engine
    lifecycle.shut_down()
    assert lifecycle.engine is None


def test_as_much_memory_holds_more_tokens() -> None:
    kv = KVShape(32, 8, 128)
    assert kv.compute_bytes_per_token(torch.bfloat16) / kv.compute_bytes_per_token(FP8) == 256 / 132
    config = WorkerConfig("m", "/x", "/x", max_num_seqs=256)
    found = {
        dtype: sizes.resolve_sizes(config, kv, 8192, dtype, CPU, None, 10 << 30).num_blocks
        for dtype in (torch.bfloat16, FP8)
    }
    assert found[FP8] / found[torch.bfloat16] == pytest.approx(256 / 132, rel=1e-3)


def test_the_names_of_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizes.choose_cache_dtype("auto", torch.bfloat16, CPU) == torch.bfloat16
    assert sizes.choose_cache_dtype("fp8", torch.bfloat16, CPU) == FP8
    assert sizes.choose_cache_dtype("fp8_e4m3", torch.float32, CPU) == FP8
    message = "--kv-cache-dtype must be auto, fp8, fp8_e4m3, got int8"
    with pytest.raises(SettingsError, match=message):
        sizes.choose_cache_dtype("int8", torch.bfloat16, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(
        SettingsError, match=r"--kv-cache-dtype fp8 requires a GPU .* 8\.9 or higher"
    ):
        sizes.choose_cache_dtype("fp8", torch.bfloat16, torch.device("cuda"))


def test_the_flag(tiny_checkpoint: Path, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    common = ["--model", str(tiny_checkpoint), "--run-dir", str(tmp_path)]
    for flags, expected in (([], "auto"), (["--kv-cache-dtype", "fp8"], "fp8")):
        found = settings.create_settings(parser.parse_args([*common, *flags]), {})
        assert found.worker.kv_cache_dtype == expected
