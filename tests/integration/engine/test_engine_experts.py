"""Experts behind the HTTP API: transformers' text, over a restart, and a clean audit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from plimsoll_faults.models import tiny_moe

STREAMS, TOKENS, COMPARED = 4, 300, 60
KEPT = ("weights", "kv_pool")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    tiny_moe.write_checkpoint(folder)
    return folder


def texts(futures: list[Any]) -> list[str]:
    return [future.result(120).text for future in futures]


def transformers_text(folder: Path, prompt: str) -> str:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    with torch.inference_mode():
        found = model.generate(ids, max_new_tokens=COMPARED, do_sample=False)
    text: str = tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def tensor_bytes(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118


def held(engine: Any) -> dict[str, int]:
    """Bytes that no request may change: of the ledger, and what the weight server shares."""
    engine.until(lambda: engine.status()["load"].get("kv_usage_ratio") == 0, "an idle report")
    status = engine.status()
    (server,) = [p for p in status["processes"] if p["role"] == "weight_server"]
    found = {e["owner"]: e["bytes"] for e in status["ledger"] if e["owner"] in KEPT}
    return found | {"shared": server["shared"]}


def test_experts_are_served_and_survive_a_restart(start_engine: Any, checkpoint: Path) -> None:
    engine = start_engine(model=checkpoint).wait_ready()
    with engine.streams(STREAMS, TOKENS) as futures:
        whole = texts(futures)
    theirs = transformers_text(checkpoint, "Ship number 0 sails")
    assert len(theirs) > COMPARED
    assert whole[0].startswith(theirs)
    engine.clean()
    before = held(engine)
    # Each tensor begins at a multiple of 256 bytes.
    assert 0 <= before["weights"] - tensor_bytes(checkpoint) < 64 << 10
    assert before["shared"] == before["weights"] + before["kv_pool"]

    with engine.streams(STREAMS, TOKENS) as futures:
        engine.begin("restart", "experts")
        operation = engine.finish("experts", 60)
        assert texts(futures) == whole
    assert operation["state"] == "succeeded", operation
    assert operation["carried_requests"] == operation["carried_kv_requests"] == STREAMS
    assert (operation["kv_handover"], operation["carried_prefill_tokens"]) == ("handed_over", 0)
    engine.clean()
    assert held(engine) == before

    family = engine.family()
    engine.end()
    assert engine.process.returncode == 0, engine.log_tail()
    assert not any(psutil.pid_exists(process.pid) for process in family)
