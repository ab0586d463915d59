"""A second thread makes the context and maps the weights while the first one goes on.

Tests ``worker/lifecycle.py``, ``core/warmup.py`` and which layers load the kernels.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from plimsoll_engine.core import warmup
from plimsoll_engine.core.execute import sampling
from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.kernels.reference import ReferenceOps
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import loader
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.worker import lifecycle as lifecycle_module
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_engine.worker.parts import QUEUES_VARIABLE

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
    monkeypatch.setattr(lifecycle_module, "create_context", makes)
    lifecycle.prepare()
    assert devices == [torch.device("cpu")]
    assert helpers() == []
    lifecycle.shut_down()


@pytest.mark.parametrize("where", ["loader.choose_device", "create_context"])
def test_what_fails_in_the_other_thread_fails_here(
    lifecycle: CoreLifecycle, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(f"plimsoll_engine.worker.lifecycle.{where}", fails)
    with pytest.raises(RuntimeError, match="the device is lost"):
        lifecycle.prepare()
    assert helpers() == []
    assert lifecycle.measure_allocated_device_bytes() is None


@pytest.mark.parametrize(
    ("ranks", "users", "expected"), [(1, None, None), (2, None, "1"), (2, "4", "4")]
)
def test_ranks_have_one_hardware_queue_each_unless_the_user_says_otherwise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    users: str | None,
    expected: str | None,
) -> None:
    """Seen when CUDA is initialised, since the driver reads the variable then."""
    monkeypatch.setenv(QUEUES_VARIABLE, users or "0")
    if users is None:
        monkeypatch.delenv(QUEUES_VARIABLE)
    seen = []

    def choose(*_: object) -> None:
        seen.append(os.environ.get(QUEUES_VARIABLE))
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(loader, "choose_device", choose)
    leader = Leader(tmp_path, 1, ranks) if ranks > 1 else None
    config = WorkerConfig("no such model", str(tmp_path), "unused", tensor_parallel_size=ranks)
    with pytest.raises(Exception, match=r"lost|no such model"):
        CoreLifecycle(config, ranks=leader).prepare()
    if leader is not None:
        leader.close()
    assert seen == [expected]


def test_a_sampled_step_is_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, ...]] = []
    draw = sampling._draw

    def draws(logits: torch.Tensor, *knobs: torch.Tensor) -> torch.Tensor:
        drawn.append(tuple(logits.shape))
        return draw(logits, *knobs)

    monkeypatch.setattr(sampling, "_draw", draws)
    warmup.load_sampling_kernels(1000, torch.bfloat16, torch.device("cpu"))
    assert drawn == [(warmup.SMALL_DECODE_ROWS, 1000)]


def test_kernels_are_loaded_by_the_first_layers_alone(
    lifecycle: CoreLifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = set()
    attend = ReferenceOps.attend

    def noted(self: Any, query: torch.Tensor, plan: Any, layer: int, *rest: Any) -> torch.Tensor:
        layers.add(layer)
        return attend(self, query, plan, layer, *rest)

    monkeypatch.setattr(ReferenceOps, "attend", noted)
    lifecycle.prepare()
    assert layers == {0, 1}
    assert lifecycle.model.kv.layers == 4
    lifecycle.shut_down()


EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
SLIDING = ["full_attention"] * 3 + ["sliding_attention"]


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"model_type": "llama"}, 2),
        ({"model_type": "llama", "num_hidden_layers": 1}, 1),
        (EXPERTS | {"mlp_only_layers": [1]}, 2),
        (EXPERTS | {"mlp_only_layers": [2, 3]}, 3),
        ({"model_type": "mistral", "layer_types": SLIDING, "sliding_window": 8}, 4),
    ],
)
def test_the_first_layers_are_of_every_kind(fields: dict[str, Any], needed: int) -> None:
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    model = Decoder(AutoConfig.for_model(**sizes | fields), torch.float32)
    few = model.truncate(model.num_representative_layers)
    assert (
        few.spec.layers
        == few.kv.layers
        == len(few.spec.windows)
        == model.num_representative_layers
        == needed
    )
    assert model.spec.layers == model.kv.layers == (sizes | fields)["num_hidden_layers"]
