"""A draft model guesses what the large one says, and changes no token of it.

Tests ``core/speculation/draft_model.py`` and ``models/draft.py``.
"""

from __future__ import annotations

import json
import random
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.forward import Forward
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.core.speculation import drafting as core
from plimsoll_engine.core.speculation.draft_model import DraftModel
from plimsoll_engine.core.speculation.drafting import Proposer, Speculation
from plimsoll_engine.errors import DeviceLostError, FatalWorkerError, LoadError, RanksLostError
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages.speculative import Speculative
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import draft as draft_models
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_faults.models.write_fp8 import write_fp8
from tests.draft_checkpoint import write_draft_checkpoint

NEW_TOKENS, DRAFTS, BLOCK = 40, 4, 4
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 3.0, "seed": 11, "logprobs": 1},
    "penalized": {"repetition_penalty": 1.4, "frequency_penalty": 0.7},
    "biased": {"temperature": 2.0, "seed": 5, "logit_bias": {17: 9.0}},
}


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    rng = random.Random(5)
    lengths = (1, 30, 61, 100)
    found = [[rng.randrange(3, 500) for _ in range(length)] for length in lengths]
    return dict(zip(KINDS, found, strict=True))


@pytest.fixture(scope="module")
def expected(prompts: dict[str, list[int]], tiny_model: Any, helpers: Any) -> dict[str, list[int]]:
    engine = EngineCore(Runner(tiny_model, 400, 4), Scheduler(BlockPool(400, 4), 8, 512, 256))
    for name, kind in KINDS.items():
        engine.submit(helpers.submit(name, prompts[name], NEW_TOKENS, **kind))
    found: dict[str, list[int]] = helpers.finish(engine)
    engine.close()
    return found


@pytest.fixture(scope="module")
def worse(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose head says something else now and then, and that knows more tokens."""
    folder = tmp_path_factory.mktemp("worse") / "model"
    write_draft_checkpoint(tiny_checkpoint, folder)
    return folder


class Engines:
    """Engines over the tiny model with a draft model."""

    def __init__(self, large: Any) -> None:
        self.large = large

    def __call__(
        self, small: Any, num_blocks: int = 400, budget: int = 512, proposer: Any = None
    ) -> EngineCore:
        pool = BlockPool(num_blocks, BLOCK)
        forward = Forward(small, num_blocks, BLOCK)
        draft = DraftModel(forward, pool, budget, self.large.spec.vocabulary, small.spec.vocabulary)
        guesses: Proposer = draft if proposer is None else proposer(draft)
        speculation = Speculation(guesses, DRAFTS, core.compute_max_rows(8, DRAFTS))
        scheduler = Scheduler(pool, 8, budget, 256)
        runner = Runner(self.large, num_blocks, BLOCK)
        return EngineCore(runner, scheduler, speculation=speculation)


@pytest.fixture(scope="module")
def engines(tiny_model: Any) -> Engines:
    return Engines(tiny_model)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param({}, id="roomy"),
        pytest.param({"budget": 24}, id="chunked"),
        pytest.param({"num_blocks": 40, "budget": 64}, id="preempted"),
    ],
)
def test_drafts_of_a_model_change_no_token(
    size: dict[str, int],
    engines: Engines,
    worse: Path,
    prompts: dict[str, list[int]],
    expected: dict[str, list[int]],
    helpers: Any,
) -> None:
    small = draft_models.load_draft_model(worse, torch.float32, torch.device("cpu"))
    engine = engines(small, **size)
    for name, kind in KINDS.items():
        assert engine.submit(helpers.submit(name, prompts[name], NEW_TOKENS, **kind)) is None
    assert helpers.finish(engine) == expected
    assert engine.speculation is not None
    counted = engine.speculation.counters
    assert 0 < counted.accepted_tokens < counted.draft_tokens
    _, _, findings = run_audit(engine, Ledger())
    assert not findings
    assert engine.pool.num_used == 0


class Blurred:
    """The draft model's guesses with a wrong one in every third look, which it does not know of."""

    def __init__(self, draft: DraftModel) -> None:
        self.draft = draft
        self.looks = 0
        self.wrong = 0

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int] | None]:
        found = self.draft.propose(wanted)
        for drafts in found:
            self.looks += 1
            if drafts and self.looks % 3 == 0:
                place = self.looks % len(drafts)
                drafts[place] = (drafts[place] + 1) % 500
                self.wrong += len(drafts) - place
        return found


def test_the_same_model_is_right_whatever_was_wrong_before(
    engines: Engines,
    tiny_model: Any,
    prompts: dict[str, list[int]],
    expected: dict[str, list[int]],
    helpers: Any,
) -> None:
    """Greedy and sampled: both draw by one seed. Its keys and values are those of the text."""
    engine = engines(tiny_model, proposer=Blurred)
    for name in ("greedy", "sampled", "biased"):
        engine.submit(helpers.submit(name, prompts[name], NEW_TOKENS, **KINDS[name]))
    found = helpers.finish(engine)
    assert found == {name: expected[name] for name in found}
    assert engine.speculation is not None
    counted, blurred = engine.speculation.counters, engine.speculation.proposer
    assert isinstance(blurred, Blurred)
    assert blurred.wrong > 10
    assert counted.accepted_tokens == counted.draft_tokens - blurred.wrong
    assert engine.counters.steps < NEW_TOKENS / 2


class Watched:
    """Counts the rows that the draft model computes."""

    def __init__(self, draft: DraftModel) -> None:
        self.draft = draft
        self.rows = 0
        compute = draft.forward.compute

        def watched(inputs: Any) -> Any:
            self.rows += len(inputs.ids)
            return compute(inputs)

        draft.forward.compute = watched  # type: ignore[method-assign,assignment]

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int] | None]:
        return self.draft.propose(wanted)


def test_a_prefix_is_computed_once(engines: Engines, tiny_model: Any, helpers: Any) -> None:
    engine = engines(tiny_model, proposer=Watched)
    assert engine.speculation is not None
    watched = engine.speculation.proposer
    assert isinstance(watched, Watched)
    prompt = [5 + i % 90 for i in range(101)]
    rows = []
    for number in range(2):
        watched.rows = 0
        engine.submit(helpers.submit(str(number), [*prompt, 200 + number], 3))
        helpers.finish(engine)
        rows.append(watched.rows)
    assert rows[0] >= len(prompt)
    assert rows[1] <= len(prompt) % BLOCK + 3
    engine.pool.reset_prefix_cache()  # other contents may come into the same blocks
    watched.rows = 0
    engine.submit(helpers.submit("last", [*prompt, 200], 3))
    helpers.finish(engine)
    assert watched.rows == rows[0]


class Broken:
    def __init__(self, _: DraftModel) -> None:
        self.asked = 0

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        self.asked += 1
        raise RuntimeError("no memory for drafts")


def test_a_draft_model_that_fails_stops_no_request(
    engines: Engines,
    tiny_model: Any,
    prompts: dict[str, list[int]],
    expected: dict[str, list[int]],
    helpers: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engines(tiny_model, proposer=Broken)
    for name, kind in KINDS.items():
        engine.submit(helpers.submit(name, prompts[name], NEW_TOKENS, **kind))
    assert helpers.finish(engine) == expected
    assert "no memory for drafts" in caplog.text
    assert engine.speculation is not None
    assert isinstance(engine.speculation.proposer, Broken)
    assert engine.speculation.proposer.asked <= len(KINDS)  # each request tries once


@pytest.mark.parametrize(
    "error", [DeviceLostError("no device"), RanksLostError("rank 1 has exited")]
)
def test_what_ends_the_worker_is_no_draft_s_failure(
    engines: Engines, tiny_model: Any, helpers: Any, error: FatalWorkerError
) -> None:
    """Nor a request's: whatever is computed next fails as well."""

    def fails(*_: Any) -> Any:
        raise error

    for broken in ("drafts", "step"):
        engine = engines(tiny_model)
        engine.submit(helpers.submit("one", [5, 6, 7], NEW_TOKENS))
        engine.step()
        assert engine.speculation is not None
        if broken == "drafts":
            engine.speculation.proposer.propose = fails  # type: ignore[method-assign,assignment]
        else:
            engine.runner.launch = fails  # type: ignore[method-assign,assignment]
        with pytest.raises(type(error), match=str(error)):
            helpers.finish(engine)
        engine.close()


@pytest.fixture
def config(tiny_checkpoint: Path, worse: Path, tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(
        str(tiny_checkpoint), str(tmp_path), "unused", device="cpu", num_blocks=64, block_size=16,
        max_num_batched_tokens=64, max_num_seqs=4,
        speculative=Speculative("draft_model", DRAFTS, model=str(worse)),
    )  # fmt: skip


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_its_memory_is_in_the_ledger_and_comes_back(
    kv_cache_dtype: str, config: WorkerConfig, helpers: Any
) -> None:
    lifecycle = CoreLifecycle(msgspec.structs.replace(config, kv_cache_dtype=kv_cache_dtype))
    engine = lifecycle.start()
    engine.submit(helpers.submit("r", [5] * 70, 20))
    helpers.finish(engine)
    assert engine.speculation is not None
    draft = engine.speculation.draft_model
    assert draft is not None
    assert draft.forward.model is not None
    assert draft.forward.kv is not None
    assert engine.speculation.counters.draft_tokens > 0
    owners = {entry.owner: entry for entry in lifecycle.ledger.list_entries()}
    tensors = list(draft.forward.model.get_parameters().values())
    assert owners["draft_weights"].bytes == sum(tensor.nbytes for tensor in tensors)
    assert owners["draft_kv_pool"].bytes == draft.forward.kv_bytes == owners["kv_pool"].bytes
    assert (draft.forward.kv.dtype == torch.float8_e4m3fn) is (kv_cache_dtype == "fp8")
    _, _, findings = run_audit(engine, lifecycle.ledger)
    assert not findings
    kept = draft.forward.kv
    _, _, (finding,) = run_audit(engine, lifecycle.ledger)
    assert "1 references to the draft model's KV pool have no known owner" in finding.detail
    del kept
    alive = [weakref.ref(tensor) for tensor in [*tensors, draft.forward.kv]]
    del tensors, engine
    lifecycle.shut_down()  # without the collector's help, while somebody holds the draft model
    assert [one for one in alive if one() is not None] == []


def test_both_models_may_be_in_fp8(config: WorkerConfig, tmp_path: Path, helpers: Any) -> None:
    assert config.speculative is not None
    write_fp8(Path(config.model), tmp_path / "large")
    write_fp8(Path(config.speculative.model or ""), tmp_path / "small")
    plain = msgspec.structs.replace(
        config, model=str(tmp_path / "large"), kv_cache_dtype="fp8", speculative=None
    )
    drafts = msgspec.structs.replace(config.speculative, model=str(tmp_path / "small"))
    found = []
    for one in (plain, msgspec.structs.replace(plain, speculative=drafts)):
        lifecycle = CoreLifecycle(one)
        engine = lifecycle.start()
        engine.submit(helpers.submit("r", list(range(3, 40)), 20))
        found.append(helpers.finish(engine))
        counted = None if engine.speculation is None else engine.speculation.counters
        lifecycle.shut_down()
    assert found[0] == found[1]
    assert counted is not None
    assert counted.accepted_tokens > 0


def test_a_model_that_cannot_draft_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(LoadError, match="gpt2 is not supported for draft models"):
        draft_models.build_draft_model(folder, torch.float32)
