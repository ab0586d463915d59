"""A second thread makes the context and maps the weights while the first one goes on.

Tests ``memory/core_lifecycle.py`` and ``core/warmup.py``.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll_engine.core import sampling, warmup
from plimsoll_engine.memory import core_lifecycle
from plimsoll_engine.memory.core_lifecycle import CoreLifecycle
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import loader

TIMEOUT_S = 30


@pytest.fixture
def lifecycle(tiny_checkpoint: Path, tmp_path: Path) -> CoreLifecycle:
    return CoreLifecycle(
        WorkerConfig(
            str(tiny_checkpoint), str(tmp_path), "unused", device="cpu", num_blocks=64,
            block_size=16, max_num_batched_tokens=64, max_num_seqs=4,
        )
    )  # fmt: skip


def helpers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("device")]


def test_the_config_is_read_while_the_context_is_made(
    lifecycle: CoreLifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = threading.Event()
    load, devices = loader.load_config, []

    def reads(folder: Path) -> Any:
        found = load(folder)
        read.set()
        return found

    def makes(device: torch.device) -> None:
        assert read.wait(TIMEOUT_S), "the context is waited for first"
        devices.append(device)

    monkeypatch.setattr(loader, "load_config", reads)
    monkeypatch.setattr(core_lifecycle, "make_context", makes)
    lifecycle.prepare()
    assert devices == [torch.device("cpu")]
    assert helpers() == []
    lifecycle.shutdown()


@pytest.mark.parametrize("where", ["loader.choose_device", "make_context"])
def test_what_fails_in_the_other_thread_fails_here(
    lifecycle: CoreLifecycle, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(f"plimsoll_engine.memory.core_lifecycle.{where}", fails)
    with pytest.raises(RuntimeError, match="the device is lost"):
        lifecycle.prepare()
    assert helpers() == []
    assert lifecycle.device_allocated() is None


def test_a_sampled_step_is_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, ...]] = []
    draw = sampling._draw

    def draws(logits: torch.Tensor, *knobs: torch.Tensor) -> torch.Tensor:
        drawn.append(tuple(logits.shape))
        return draw(logits, *knobs)

    monkeypatch.setattr(sampling, "_draw", draws)
    warmup.load_sampling(1000, torch.bfloat16, torch.device("cpu"))
    assert drawn == [(warmup.SMALL_WIDTH, 1000)]
