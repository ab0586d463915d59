"""The weight server, and a restart in which any of the processes dies: streams go on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest

STREAMS = 4
TOKENS = 250


@pytest.fixture(scope="module")
def undisturbed(shared_engine: Any) -> list[str]:
    with shared_engine.streams(STREAMS, TOKENS) as futures:
        return [future.result(120).text for future in futures]


def pid_of(engine: Any, role: str) -> int:
    return int(next(p["pid"] for p in engine.status()["processes"] if p["role"] == role))


def texts(futures: list[Any]) -> list[str]:
    return [future.result(120).text for future in futures]


def test_weights_and_kv_pool_are_declared_once_and_are_the_weight_servers(engine: Any) -> None:
    def reported() -> Any:
        """What the worker reports; the frontend's own part of the ledger is there before."""
        seen = engine.status()
        found = [one for one in seen.get("ledger", []) if one["owner"] in ("weights", "kv_pool")]
        return found and (seen, found)

    status, kept = engine.found(reported, "report of the worker")
    assert [entry["process"] for entry in kept] == ["weight_server"] * 2
    assert all(entry["bytes"] > 1 << 20 for entry in kept)
    shared = {p["role"]: p.get("shared") for p in status["processes"]}
    assert shared["weight_server"] == sum(entry["bytes"] for entry in kept)
    assert shared["worker"] < 1 << 20, "the worker's own: what it borrows is not counted twice"


def test_a_restart_keeps_the_weight_server_by_default(engine: Any, undisturbed: list[str]) -> None:
    first = pid_of(engine, "weight_server")
    engine.begin("restart", "keep")
    assert engine.finish("keep")["state"] == "succeeded"
    assert pid_of(engine, "weight_server") == first
    with engine.streams(STREAMS, TOKENS) as futures:
        engine.begin("restart", "drop", keep_weights=False)
        operation = engine.finish("drop", 60)
        assert texts(futures) == undisturbed
    assert operation["state"] == "succeeded", operation
    assert operation["kv_handover"] == "not_asked"
    assert operation["carried_prefill_tokens"] > 0
    assert [s["name"] for s in operation["steps"]] == [
        "stop_worker", "drop_weights", "start_worker", "resubmit",
    ]  # fmt: skip
    assert pid_of(engine, "weight_server") != first
    assert not psutil.pid_exists(first)
    engine.clean()


def kill_successor(engine: Any, worker: int, server: int) -> None:
    """As soon as there is one; its epoch is not begun by then."""
    deadline = time.monotonic() + 20
    known = {worker, server}
    zygote = psutil.Process(pid_of(engine, "zygote"))
    while time.monotonic() < deadline:
        for child in zygote.children():
            if child.pid not in known:
                child.kill()
                return
        time.sleep(0.005)
    raise AssertionError("no successor")


@pytest.mark.parametrize(
    "victim", ["successor", "predecessor", pytest.param("both", marks=pytest.mark.long)]
)
def test_whoever_dies_in_a_restart_one_worker_serves_in_the_end(
    start_engine: Any, undisturbed: list[str], victim: str
) -> None:
    engine = start_engine().wait_ready()
    worker, server = pid_of(engine, "worker"), pid_of(engine, "weight_server")
    with engine.streams(STREAMS, TOKENS) as futures:
        engine.begin("restart", victim)
        if victim != "predecessor":
            kill_successor(engine, worker, server)
        if victim != "successor":
            os.kill(worker, signal.SIGKILL)
        operation = engine.finish(victim, 60)
        assert texts(futures) == undisturbed
    assert operation["state"] == "succeeded", operation
    assert operation["kv_handover"] in ("not_asked", "worker_lost", "successor_lost")
    assert operation["epoch_after"] != operation["epoch_before"]
    assert pid_of(engine, "worker") != worker
    roles = [process["role"] for process in engine.status()["processes"]]
    assert roles == ["frontend", "zygote", "weight_server", "worker"]
    engine.until(lambda: len(engine.family()) == 5, "nobody beside them")
    engine.clean()


def test_without_checkpoint_the_worker_serves_on_and_without_weight_server_it_is_replaced(
    start_engine: Any, undisturbed: list[str], tiny: Any
) -> None:
    engine = start_engine().wait_ready()
    hidden = tiny / "config.json"
    epoch = engine.status()["epoch"]
    with engine.streams(STREAMS, TOKENS) as futures:
        hidden.rename(tiny / "config.away")
        try:
            engine.begin("restart", "broken")
            operation = engine.finish("broken")
        finally:
            (tiny / "config.away").rename(hidden)
        assert texts(futures) == undisturbed
    assert operation["state"] == "failed"
    assert "config.json" in operation["error"]
    assert "the old worker continues to serve" in operation["error"]
    status = engine.status()
    assert (status["state"], status["epoch"]) == ("serving", epoch)
    engine.begin("restart", "mended")
    assert engine.finish("mended")["state"] == "succeeded"

    # The weight server's death is the worker's; both are replaced.
    server, worker = pid_of(engine, "weight_server"), pid_of(engine, "worker")
    with engine.streams(STREAMS, TOKENS) as futures:
        os.kill(server, signal.SIGKILL)
        assert texts(futures) == undisturbed
    assert pid_of(engine, "weight_server") != server
    assert pid_of(engine, "worker") != worker
    engine.clean()
