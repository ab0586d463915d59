"""Shutdown gives the KV pool and the weights back, in process, without the collector's help.

Tests ``worker/lifecycle.py``.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll_engine.core import sizes
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.errors import WarmUpError
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import loader
from plimsoll_engine.worker import lifecycle as lifecycle_module
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_engine.worker.parts import GC_THRESHOLDS

KEPT: list[Any] = []
"""What a stored exception, a hook or a global may still hold of an engine after its shutdown."""


class ForgetfulLifecycle(CoreLifecycle):
    """The real bug: shutdown drops its own references and trusts that nobody else has one."""

    def shut_down(self) -> None:
        self.heap.close()
        self._parts.clear()
        self.engine = None
        self.weights.model = None


@pytest.fixture
def config(tiny_checkpoint: Path, tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(
        str(tiny_checkpoint), str(tmp_path), "unused", device="cpu", num_blocks=64, block_size=16,
        max_num_batched_tokens=64, max_num_seqs=4,
    )  # fmt: skip


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[torch.Tensor]]]:
    """Weak references to every tensor that a lifecycle makes: weights and KV pool."""
    found: list[weakref.ref[torch.Tensor]] = []
    load, init = loader.load_model, Runner.__init__

    def watched_load(*arguments: Any) -> Any:
        model = load(*arguments)
        found.extend(weakref.ref(tensor) for tensor in model.get_parameters().values())
        return model

    def watched_init(runner: Runner, *arguments: Any) -> None:
        init(runner, *arguments)
        assert runner.kv is not None
        found.append(weakref.ref(runner.kv))
        KEPT.append(runner)

    monkeypatch.setattr(loader, "load_model", watched_load)
    monkeypatch.setattr(Runner, "__init__", watched_init)
    gc.collect()
    gc.disable()
    yield found
    gc.enable()
    KEPT.clear()


def after_success(lifecycle: CoreLifecycle, helpers: Any) -> None:
    engine = lifecycle.start()
    engine.submit(helpers.submit("a", [5] * 20, 10))
    helpers.finish(engine)


def after_a_forward_error(lifecycle: CoreLifecycle, helpers: Any) -> None:
    engine = lifecycle.start()
    model: Any = engine.runner.model
    forward = model.forward

    def fails(*arguments: Any) -> Any:
        forward(*arguments)
        raise RuntimeError("broken forward")

    model.forward = fails
    engine.submit(helpers.submit("a", [5] * 20, 10))
    assert "broken forward" in engine.step().dropped[0].message


def at_work(lifecycle: CoreLifecycle, helpers: Any) -> None:
    engine = lifecycle.start()
    engine.submit(helpers.submit("a", [5] * 20, 10))
    engine.step()


ENDS: list[Callable[[CoreLifecycle, Any], None]] = [after_success, after_a_forward_error, at_work]


def alive_after(
    lifecycle: CoreLifecycle, end: Callable[..., None], helpers: Any, tensors: Any
) -> int:
    end(lifecycle, helpers)
    lifecycle.shut_down()
    lifecycle.shut_down()
    assert len(tensors) > 30
    return sum(reference() is not None for reference in tensors)


@pytest.mark.parametrize("end", ENDS)
def test_no_tensor_survives_shutdown(
    end: Callable[..., None], config: WorkerConfig, helpers: Any, tensors: Any
) -> None:
    assert alive_after(CoreLifecycle(config), end, helpers, tensors) == 0


@pytest.mark.parametrize("end", ENDS)
def test_a_shutdown_that_only_forgets_is_caught(
    end: Callable[..., None], config: WorkerConfig, helpers: Any, tensors: Any
) -> None:
    """The real bug put back: the same check must find KV memory alive."""
    assert alive_after(ForgetfulLifecycle(config), end, helpers, tensors) > 0


@pytest.mark.parametrize(
    "stage", ["load_kernels", "resolve_sizes", "Runner", "BlockPool", "Scheduler", "warm_up"]
)
def test_a_start_that_fails_gives_everything_back(
    stage: str, config: WorkerConfig, tensors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError(f"{stage} failed")

    target = sizes if stage == "resolve_sizes" else lifecycle_module
    monkeypatch.setattr(target, stage, fails)
    frozen = gc.get_freeze_count()
    lifecycle = CoreLifecycle(config)
    with pytest.raises(RuntimeError, match=f"{stage} failed") as error:
        lifecycle.start()
    assert error.value.__traceback__ is not None
    assert [reference for reference in tensors if reference() is not None] == []
    assert gc.get_freeze_count() <= frozen


def test_a_warm_up_that_the_model_fails_gives_everything_back(
    config: WorkerConfig, tensors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(Runner, "launch", fails)
    with pytest.raises(WarmUpError, match="no kernel for this"):
        CoreLifecycle(config).start()
    assert [reference for reference in tensors if reference() is not None] == []


def test_freeze_is_paired_and_thresholds_are_put_back(config: WorkerConfig) -> None:
    gc.unfreeze()  # Python 3.12 starts with some frozen objects of its own
    before = gc.get_threshold(), 0
    lifecycle = CoreLifecycle(config)
    lifecycle.start()
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == GC_THRESHOLDS
    lifecycle.shut_down()
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_shutdown_before_start_does_nothing(config: WorkerConfig) -> None:
    CoreLifecycle(config).shut_down()
