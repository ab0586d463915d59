"""A standby worker: made ahead of need, replaced after use, and nobody notices its end."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

STREAMS = 4
TOKENS = 300
ROLES = ["frontend", "zygote", "weight_server", "worker", "worker"]


@pytest.fixture(scope="module")
def undisturbed(shared_engine: Any) -> list[str]:
    """Of an engine without a standby."""
    with shared_engine.streams(STREAMS, TOKENS) as futures:
        return texts(futures)


def texts(futures: list[Any]) -> list[str]:
    return [future.result(120).text for future in futures]


def standby_of(engine: Any) -> dict[str, Any] | None:
    found = [p for p in engine.status()["processes"] if p.get("name") == "standby"]
    assert len(found) <= 1
    return found[0] if found else None


def prepared(engine: Any, other_than: int = 0) -> dict[str, Any]:
    """The standby, once there is one and the serving worker has reported."""

    def ready() -> Any:
        status = engine.status()
        standby = standby_of(engine)
        fresh = standby is not None and standby["pid"] != other_than
        done = status["standby"] == {"state": "prepared"}
        return standby if fresh and done and len(status["processes"]) == len(ROLES) else None

    found: dict[str, Any] = engine.found(ready, "a standby", 60)
    assert [process["role"] for process in engine.status()["processes"]] == ROLES
    return found


def step_s(operation: dict[str, Any], name: str) -> float:
    return float(next(s["duration_s"] for s in operation["steps"] if s["name"] == name))


def test_a_standby_takes_over_and_another_one_is_made(
    start_engine: Any, undisturbed: list[str]
) -> None:
    engine = start_engine("--standby-worker", "always").wait_ready()
    first = prepared(engine)
    (entry,) = [e for e in engine.status()["ledger"] if e["owner"].startswith("standby")]
    assert (entry["owner"], entry["kind"]) == ("standby_worker_host", "host")
    assert 1 << 20 < entry["bytes"] <= entry["bound"] < 1 << 30
    assert first["private"] == entry["bytes"]
    assert first["malloc_in_use"] > 1 << 20
    alone = len(engine.family())

    for number in range(2):
        with engine.streams(STREAMS, TOKENS) as futures:
            engine.begin("restart", f"ready-{number}")
            operation = engine.finish(f"ready-{number}", 60)
            assert texts(futures) == undisturbed
        assert operation["state"] == "succeeded", operation
        assert operation["carried_kv_requests"] == STREAMS
        assert (operation["kv_handover"], operation["carried_prefill_tokens"]) == ("handed_over", 0)
        assert engine.worker_pid() == first["pid"], "the standby serves"
        assert step_s(operation, "prepare_worker") < 0.05
        first = prepared(engine, first["pid"])
        engine.until(lambda: len(engine.family()) == alone, "nobody beside them")
    engine.clean()

    # Its death is nobody's loss: the streams go on, the epoch stays, and there is another one.
    epoch = engine.status()["epoch"]
    with engine.streams(STREAMS, TOKENS) as futures:
        os.kill(first["pid"], signal.SIGKILL)
        assert texts(futures) == undisturbed
    assert engine.status()["epoch"] == epoch
    first = prepared(engine, first["pid"])

    # After the serving worker's crash the standby serves, with the streams computed again.
    with engine.streams(STREAMS, TOKENS) as futures:
        os.kill(engine.worker_pid(), signal.SIGKILL)
        assert texts(futures) == undisturbed
    assert engine.worker_pid() == first["pid"]
    first = prepared(engine, first["pid"])

    # A restart without the weights needs their memory: nobody may map them.
    with engine.streams(STREAMS, TOKENS) as futures:
        engine.begin("restart", "drop", keep_weights=False)
        operation = engine.finish("drop", 60)
        assert texts(futures) == undisturbed
    assert operation["state"] == "succeeded", operation
    assert step_s(operation, "drop_weights") < 5
    prepared(engine, first["pid"])
    engine.until(lambda: len(engine.family()) == alone, "nobody beside them")
    engine.clean()
    family = engine.family()
    engine.end()
    assert engine.process.poll() == 0
    assert psutil.wait_procs(family, 5)[1] == []


def test_restarts_and_crashes_before_the_standby_is_there(
    start_engine: Any, undisturbed: list[str]
) -> None:
    """Whoever comes while it is forked or prepares itself either waits for it or ends it."""
    engine = start_engine("--standby-worker", "always").wait_ready()
    with engine.streams(STREAMS, TOKENS) as futures:
        for number in range(3):
            engine.begin("restart", f"soon-{number}")
            assert engine.finish(f"soon-{number}", 60)["state"] == "succeeded"
        os.kill(engine.worker_pid(), signal.SIGKILL)
        assert texts(futures) == undisturbed
    prepared(engine)
    engine.clean()
    family = engine.family()
    engine.end()
    assert engine.process.poll() == 0
    assert psutil.wait_procs(family, 5)[1] == []


def test_a_standby_for_several_ranks_is_refused(start_engine: Any) -> None:
    engine = start_engine("--standby-worker", "always", "--tensor-parallel-size", "2")
    assert engine.process.wait(60) == 2
    assert "--standby-worker always: a standby has one GPU" in engine.log.read_text()
