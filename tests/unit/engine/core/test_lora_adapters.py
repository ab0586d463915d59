"""LoRA adapters in the worker: tokens as of a merged checkpoint, errors, and their memory.

Tests ``models/lora.py`` and ``core/execute/loaded_adapters.py``.
"""

from __future__ import annotations

import json
import random
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.loaded_adapters import LoadedAdapters
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.handover import export, inheritance
from plimsoll_engine.core.handover.inheritance import Inheritance
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.core.sizes import check_adapter_support
from plimsoll_engine.errors import LoadError, SettingsError
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages.handover import PoolLayout
from plimsoll_engine.messages.worker_ipc import Submit
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import loader
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from tests.lora import MODELS, merge, write_adapter, write_model

BLOCKS, BLOCK, SEQS, BUDGET, NEW_TOKENS = 70, 4, 8, 24, 40
CPU = torch.device("cpu")
FIRST, SECOND = 7, 8
RULE = "adapters_are_held"


def load(folder: Path) -> Any:
    torch.set_num_threads(1)
    return loader.load_model(folder, loader.load_config(folder), torch.float32, CPU)


def engine_of(
    model: Any,
    most: int = 2,
    max_rank: int = 8,
    memory: torch.Tensor | None = None,
    pool: BlockPool | None = None,
) -> EngineCore:
    runner = Runner(model, BLOCKS, BLOCK, memory)
    runner.adapters = LoadedAdapters(model, most, max_rank)
    return EngineCore(runner, Scheduler(pool or BlockPool(BLOCKS, BLOCK), SEQS, BUDGET, 200))


def adapters_of(engine: EngineCore) -> LoadedAdapters:
    assert engine.runner.adapters is not None
    return engine.runner.adapters


def prompts() -> list[list[int]]:
    rng = random.Random(4)

    def some(count: int) -> list[int]:
        return [rng.randrange(2, 256) for _ in range(count)]

    shared = some(26)
    return [some(1), some(5), some(33), some(60), shared, *([*shared, *some(3)] for _ in range(3))]


def submit(name: str, prompt: list[int], adapter: int, tokens: int, helpers: Any) -> Submit:
    asked: Submit = helpers.submit(name, prompt, tokens, ignore_eos=True)
    return msgspec.structs.replace(asked, adapter=adapter)


def texts(engine: EngineCore, numbers: list[int], helpers: Any) -> dict[str, list[int]]:
    """Of every prompt with every adapter, all in one batch."""
    for place, prompt in enumerate(prompts()):
        for number in numbers:
            asked = submit(f"{place} {number}", prompt, number, NEW_TOKENS, helpers)
            assert engine.submit(asked) is None
    return dict(helpers.finish(engine))


@pytest.mark.parametrize("name", [*MODELS])
def test_tokens_are_those_of_a_merged_checkpoint(name: str, tmp_path: Path, helpers: Any) -> None:
    base = write_model(tmp_path / "base", name)
    first = write_adapter(tmp_path / "first", base, seed=1)
    second = write_adapter(
        tmp_path / "second", base, rank=8, seed=2, use_rslora=True,
        modules=("v_proj", "o_proj", "up_proj"),
    )  # fmt: skip
    engine = engine_of(load(base))
    adapters_of(engine).load("first", FIRST, first)
    adapters_of(engine).load("second", SECOND, second)
    found = texts(engine, [0, FIRST, SECOND], helpers)
    assert engine.scheduler.preemptions_total > 0
    assert engine.scheduler.prefix_hit_tokens_total > 0
    assert run_audit(engine, Ledger())[2] == []
    merged = {
        0: base,
        FIRST: merge(tmp_path / "base+first", base, first),
        SECOND: merge(tmp_path / "base+second", base, second),
    }
    for number, folder in merged.items():
        alone = engine_of(load(folder))
        for text, tokens in texts(alone, [0], helpers).items():
            assert found[f"{text[:-1]}{number}"] == tokens, (number, text)
        alone.close()
    for place in range(len(prompts())):
        assert len({tuple(found[f"{place} {number}"]) for number in merged}) == 3
    engine.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lora") / "base", "qwen3")


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    return load(base)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", base)


def hits(engine: EngineCore, number: int, helpers: Any) -> int:
    """Tokens that one more request with this adapter finds in the prefix cache."""
    before = engine.scheduler.prefix_hit_tokens_total
    assert engine.submit(submit("one", list(range(2, 34)), number, 2, helpers)) is None
    helpers.finish(engine)
    return engine.scheduler.prefix_hit_tokens_total - before


def test_no_prefix_is_shared_between_adapters(model: Any, adapter: Path, helpers: Any) -> None:
    engine = engine_of(model)
    adapters = adapters_of(engine)
    adapters.load("first", FIRST, adapter)
    adapters.load("second", SECOND, adapter)
    for number in (0, FIRST, SECOND):
        assert hits(engine, number, helpers) == 0, number
    for number in (0, FIRST, SECOND):
        assert hits(engine, number, helpers) > 0, number
    adapters.unload(FIRST)
    adapters.load("first", 9, adapter)
    assert hits(engine, 9, helpers) == 0, "another loading may be of other files"
    engine.close()


@pytest.mark.parametrize("seed", [1, 2], ids=["the same files", "other files"])
def test_keys_and_values_are_handed_over_to_an_adapter_of_the_same_files_alone(
    seed: int, model: Any, base: Path, tmp_path: Path, helpers: Any
) -> None:
    """A worker that takes over loads each adapter again, from a folder that may have changed."""
    folder = write_adapter(tmp_path / "adapter", base, seed=1)
    nbytes = BLOCKS * BLOCK * model.kv.compute_bytes_per_token(torch.float32)
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    kv = model.kv
    shape = (kv.layers, kv.heads, kv.dim)
    layout = PoolLayout(b"weights", b"memory", "torch.float32", shape, BLOCK, BLOCKS, 1)
    asked = submit("one", list(range(2, 34)), FIRST, 20, helpers)
    alone = submit("none", list(range(2, 34)), 0, 20, helpers)

    old = engine_of(model, memory=memory)
    adapters_of(old).load("first", FIRST, folder)
    for one in (asked, alone):
        assert old.submit(one) is None
    output = {one.request_id: list[int]() for one in (asked, alone)}
    for step in range(8):
        for token in (old.step() if step < 7 else old.quiesce()).tokens:
            output[token.request_id].append(token.token_id)
    data = export.export_tables(old, layout)

    shutil.rmtree(folder)
    write_adapter(folder, base, seed=seed)
    runner = Runner(model, BLOCKS, BLOCK, memory)
    tables = inheritance.validate_tables(data, layout, runner, SEQS)
    new = engine_of(model, memory=memory, pool=BlockPool(BLOCKS, BLOCK, [t.blocks for t in tables]))
    adapters_of(new).load("first", FIRST, folder)
    new.inheritance = Inheritance(tables, new.pool)
    for one in (asked, alone):
        carried = msgspec.structs.replace(one, output_ids=output[one.request_id])
        assert new.submit(carried) is None
    settled = new.release_unclaimed_tables()
    assert settled is not None
    assert settled.adopted == (["one", "none"] if seed == 1 else ["none"])
    new.close()
    old.close()


def test_an_unloaded_adapter_goes_with_its_last_request(
    model: Any, adapter: Path, helpers: Any
) -> None:
    engine = engine_of(model, most=1)
    adapters = adapters_of(engine)
    ledger = Ledger([engine])
    assert adapters.bytes == 0
    adapters.load("first", FIRST, adapter)
    loaded = adapters.bytes
    assert 0 < loaded <= adapters.bytes_bound
    for name in ("one", "two"):
        assert engine.submit(submit(name, [5, 6, 7], FIRST, 8, helpers)) is None
    engine.step()
    adapters.unload(FIRST)
    refusal = engine.submit(submit("late", [5, 6, 7], FIRST, 8, helpers))
    assert refusal is not None
    assert "not loaded" in getattr(refusal, "message", "")
    assert adapters.bytes == loaded, "two requests use it"
    assert run_audit(engine, ledger)[2] == []
    with pytest.raises(LoadError, match="--max-loras"):
        adapters.load("second", SECOND, adapter)
    ended = [engine.requests["one"], engine.requests["two"]]
    assert engine.abort("one")
    assert adapters.bytes == loaded, "one request uses it"
    assert len(helpers.finish(engine)["two"]) == 8
    assert adapters.bytes == 0, "not even while an ended request is still looked at"
    ended.clear()
    idle, rules, findings = run_audit(engine, ledger)
    assert (idle, findings) == (True, [])
    assert RULE in rules
    adapters.load("second", SECOND, adapter)
    engine.close()
    assert adapters.bytes == 0


def test_the_audit_finds_an_adapter_that_nobody_holds(model: Any, adapter: Path) -> None:
    engine = engine_of(model)
    adapters = adapters_of(engine)
    adapters.load("first", FIRST, adapter)
    kept = adapters.get(FIRST)
    assert run_audit(engine, Ledger())[2] == []
    adapters.unload(FIRST)
    findings = run_audit(engine, Ledger())[2]
    assert [finding.rule for finding in findings] == [RULE]
    assert "first" in findings[0].detail
    del kept
    assert run_audit(engine, Ledger())[2] == []
    engine.close()


def config_of(folder: Path, max_loras: int) -> WorkerConfig:
    return WorkerConfig(
        str(folder), str(folder), "unused", device="cpu", num_blocks=64, max_num_seqs=4,
        max_num_batched_tokens=64, max_loras=max_loras, max_lora_rank=8,
    )  # fmt: skip


def test_the_ledger_has_them_and_shutdown_lets_go(base: Path, adapter: Path) -> None:
    lifecycle = CoreLifecycle(config_of(base, 3))
    adapters = adapters_of(lifecycle.start())
    adapters.load("first", FIRST, adapter)
    (entry,) = (e for e in lifecycle.ledger.list_entries() if e.owner == "lora_adapters")
    kept = weakref.ref(next(iter(adapters.living)))
    halves = load_file(adapter / WEIGHTS).values()
    assert entry.bytes == sum(tensor.nbytes for tensor in halves)
    assert entry.bound == 3 * 2 * entry.bytes, "three of twice the rank"
    lifecycle.shut_down()
    assert kept() is None
    assert adapters.bytes == 0


def test_an_engine_without_adapters_has_no_owner_and_takes_none(base: Path, helpers: Any) -> None:
    lifecycle = CoreLifecycle(config_of(base, 0))
    engine = lifecycle.start()
    assert engine.runner.adapters is None
    assert "lora_adapters" not in {entry.owner for entry in lifecycle.ledger.list_entries()}
    refusal = engine.submit(submit("one", [5, 6, 7], FIRST, 8, helpers))
    assert "not loaded" in getattr(refusal, "message", "")
    assert run_audit(engine, lifecycle.ledger)[::2] == (True, [])
    lifecycle.shut_down()


@pytest.mark.parametrize("kind", ["llava", "whisper", "gpt_neox"])
def test_other_models_take_no_adapters(kind: str, base: Path) -> None:
    with pytest.raises(SettingsError, match=f"--enable-lora is set, but models of type {kind} "):
        check_adapter_support(config_of(base, 1), AutoConfig.for_model(kind))
    check_adapter_support(config_of(base, 0), AutoConfig.for_model(kind))


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q_A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
EMBED_A = "base_model.model.model.embed_tokens.lora_A.weight"


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text()) | fields
    (folder / CONFIG).write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: f.rename(f.with_name("moved")), "adapter does not exist"),
    (lambda f: (f / CONFIG).unlink(), rf"{CONFIG} does not exist"),
    (lambda f: (f / CONFIG).write_text("{"), CONFIG),
    (lambda f: edit(f, r="four"), rf"{CONFIG}: .*int.*\$\.r"),
    (lambda f: edit(f, r=0), "field r must be at least 1, got 0"),
    (lambda f: edit(f, r=9), "field r is 9, which exceeds --max-lora-rank 8"),
    (
        lambda f: edit(f, r=5),
        r"mismatched.*has the shape \(4, 96\) in the file, but \(5, 96\) in the model",
    ),
    (lambda f: edit(f, bias="all"), "field bias must be 'none', got 'all'"),
    (lambda f: edit(f, use_dora=True), "field use_dora"),
    (lambda f: edit(f, modules_to_save=["lm_head"]), "field modules_to_save"),
    (
        lambda f: edit(f, init_lora_weights="pissa_niter_4"),
        ("value 'pissa_niter_4' of the field init_lora_weights"),
    ),
    (lambda f: edit(f, peft_type="LOHA"), "field peft_type must be LORA, got LOHA"),
    (lambda f: edit(f, rank_pattern={"q_proj": 2}), "field rank_pattern"),
    (
        lambda f: edit(f, target_modules=["q_proj", "lm_head"]),
        ("field target_modules may contain only .*, got lm_head"),
    ),
    (lambda f: (f / WEIGHTS).unlink(), rf"{WEIGHTS} does not exist"),
    (lambda f: (f / WEIGHTS).write_bytes(b"\x10" * 99), rf"{WEIGHTS}: "),
    (lambda f: edit_tensors(f, lambda t: t.pop(Q_A)), f"1 missing tensors: {Q_A}"),
    (lambda f: edit_tensors(f, lambda t: t.update({Q_A: torch.ones(4, 5)})), f"mismatched.*{Q_A}"),
    (lambda f: edit_tensors(f, lambda t: t.update({EMBED_A: torch.ones(4, 5)})), EMBED_A),
    (
        lambda f: edit_tensors(f, lambda t: t.update({Q_A: t[Q_A].to(torch.int8)})),
        f"{Q_A} .*must have the dtype F32",
    ),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_a_broken_adapter_is_named(
    damage: Callable[[Path], Any], message: str, model: Any, adapter: Path
) -> None:
    damage(adapter)
    adapters = LoadedAdapters(model, 1, 8)
    with pytest.raises(LoadError, match=message):
        adapters.load("broken", FIRST, adapter)
    assert adapters.get(FIRST) is None
    assert adapters.bytes == 0
