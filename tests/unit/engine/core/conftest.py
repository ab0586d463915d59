"""One tiny checkpoint and one loaded model for all tests of the engine core."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.grammar.grammars import GrammarCompiler
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.core.speculation.drafting import Speculation
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.messages.worker_ipc import Sampling, Submit, Token
from plimsoll_engine.models import loader
from plimsoll_faults.models.tiny import write_checkpoint

MakeEngine = Callable[..., EngineCore]


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> None:
    """An engine that ends unfreezes all there is, and with it what tests/conftest.py has frozen."""
    if gc.get_freeze_count() < len(gc.get_objects()):
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint: Path) -> Any:
    config = loader.load_config(tiny_checkpoint)
    return loader.load_model(tiny_checkpoint, config, torch.float32, torch.device("cpu"))


@pytest.fixture
def make_engine(tiny_model: Any) -> Iterator[MakeEngine]:
    """Engines of any size over the tiny model; each must pass the audit's idle rules at the end."""
    engines: list[EngineCore] = []

    def make(
        num_blocks: int = 64,
        block_size: int = 4,
        seqs: int = 8,
        budget: int = 64,
        length: int = 256,
        grammars: GrammarCompiler | None = None,
        kv_dtype: torch.dtype | None = None,
        speculation: Speculation | None = None,
    ) -> EngineCore:
        runner = Runner(tiny_model, num_blocks, block_size, kv_dtype=kv_dtype)
        pool = BlockPool(num_blocks, block_size)
        scheduler = Scheduler(pool, seqs, budget, length)
        engine = EngineCore(runner, scheduler, grammars, speculation=speculation)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def submit(name: str, prompt: list[int], max_tokens: int, **sampling: Any) -> Submit:
    output = sampling.pop("output_ids", [])
    return Submit(name, prompt, Sampling(max_tokens=max_tokens, **sampling), output)


def finish(engine: EngineCore, max_steps: int = 5_000) -> dict[str, list[int]]:
    """Step until nothing is left; the tokens by request. More steps than that is a hang."""
    tokens: list[Token] = []
    for _ in range(max_steps):
        if not engine.has_work:
            break
        output = engine.step()
        assert not output.dropped, output.dropped
        tokens += output.tokens
    assert not engine.has_work, f"still at work after {max_steps} steps"
    found: dict[str, list[int]] = {}
    for token in tokens:
        found.setdefault(token.request_id, []).append(token.token_id)
    return found


@pytest.fixture(scope="session")
def helpers() -> Any:
    """The functions above for the test files (a test folder is not a package)."""

    class Helpers:
        submit = staticmethod(submit)
        finish = staticmethod(finish)

    return Helpers
