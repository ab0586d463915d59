"""A standby worker: made ahead of need, replaced after use, and nobody notices its end."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.draft_checkpoint import write_draft_checkpoint

STREAMS = 4
TOKENS = 300
FEW_TOKENS = 150
ROLES = ["frontend", "zygote", "weight_server", "worker", "worker"]


@pytest.fixture(scope="module")
def undisturbed(shared_engine: Any) -> list[str]:
    """Of an engine without a standby."""
    with shared_engine.streams(STREAMS, TOKENS) as futures:
        return texts(futures)


def texts(futures: list[Any]) -> list[str]:
    return [future.result(120).text for future in futures]


def of_workers(engine: Any, standby: bool) -> list[dict[str, Any]]:
    """The ranks of the standby, or of the worker that serves."""
    workers = [p for p in engine.status()["processes"] if p["role"] == "worker"]
    return [p for p in workers if (p.get("name") == "standby") == standby]


def standby_of(engine: Any) -> dict[str, Any] | None:
    found = of_workers(engine, standby=True)
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


def ends_clean(engine: Any) -> None:
    """Nothing is found, and no process is left."""
    engine.clean()
    family = engine.family()
    engine.end()
    assert engine.process.poll() == 0
    assert psutil.wait_procs(family, 5)[1] == []


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
    ends_clean(engine)


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
    ends_clean(engine)


@pytest.mark.parametrize(
    "kind", [pytest.param("ngram", marks=pytest.mark.long), "draft_model", "fp8_pool"]
)
def test_it_takes_over_with_drafts_and_with_a_pool_in_fp8(
    start_engine: Any, tiny: Path, tmp_path: Path, kind: str
) -> None:
    """In a planned restart with the keys and values, after a crash without them."""
    config: dict[str, Any] = {"method": kind, "num_speculative_tokens": 4}
    if kind == "ngram":
        config |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if kind == "draft_model":
        write_draft_checkpoint(tiny, tmp_path / "draft")
        config["model"] = str(tmp_path / "draft")
    flags = ["--speculative-config", json.dumps(config)]
    if kind == "fp8_pool":
        flags = ["--kv-cache-dtype", "fp8"]
    engine = start_engine("--standby-worker", "always", *flags).wait_ready()
    with engine.streams(STREAMS, FEW_TOKENS) as futures:
        expected = texts(futures)
    standby = prepared(engine)
    with engine.streams(STREAMS, FEW_TOKENS) as futures:
        engine.begin("restart", kind)
        operation = engine.finish(kind, 60)
        assert texts(futures) == expected
    assert (operation["kv_handover"], operation["carried_prefill_tokens"]) == ("handed_over", 0)
    assert engine.worker_pid() == standby["pid"]
    standby = prepared(engine, standby["pid"])
    with engine.streams(STREAMS, FEW_TOKENS) as futures:
        os.kill(engine.worker_pid(), signal.SIGKILL)
        assert texts(futures) == expected
    assert engine.worker_pid() == standby["pid"]
    engine.clean()


def lease(engine: Any, lease_s: float, epoch: str | None = None) -> tuple[int, Any]:
    body = {"expected_epoch": epoch or engine.status()["epoch"], "lease_s": lease_s}
    code, answer = engine.admin("POST", "/standby", body)
    return int(code), answer


def test_with_leases_there_is_a_standby_on_suspicion_alone(
    start_engine: Any, undisturbed: list[str]
) -> None:
    engine = start_engine("--standby-worker", "on-suspicion").wait_ready()
    engine.until(lambda: "report_age_s" in engine.status(), "a report")
    before = engine.status()
    assert (before["standby"], "standby" in before["capabilities"]) == ({"state": "absent"}, True)
    alone = len(engine.family())
    with engine.streams(STREAMS, TOKENS) as futures:
        for _ in range(2):  # again renews it, and makes no second one
            code, status = lease(engine, 60.0)
            assert (code, status["epoch"]) == (200, before["epoch"])
        standby = prepared(engine)
        assert len(engine.family()) == alone + 2, "the standby and its server for grammars"
        engine.begin("restart", "suspected")
        operation = engine.finish("suspected", 60)
        assert texts(futures) == undisturbed
    assert (operation["state"], operation["kv_handover"]) == ("succeeded", "handed_over")
    assert engine.worker_pid() == standby["pid"]
    steps = {step["name"]: step.get("detail", "") for step in operation["steps"]}
    assert steps["prepare_worker"] == "used the standby worker"
    assert re.fullmatch(r"stopped \(.* s\)", steps["stop_worker"]), steps

    # The lease has ended with its epoch: nobody makes another one, and nobody may ask for it there.
    assert lease(engine, 60.0, before["epoch"])[0] == 409
    engine.until(lambda: "report_age_s" in engine.status(), "a report of the new worker")
    engine.until(lambda: len(engine.family()) == alone, "nobody beside the worker")
    assert engine.status()["standby"] == {"state": "absent"}

    # A supervisor that disappears, one that prepares itself, and one that is given back.
    for lease_s, given_back in ((3.0, False), (60.0, False), (60.0, True)):
        assert lease(engine, lease_s)[0] == 200
        if lease_s == 60.0:
            engine.until(lambda: standby_of(engine) is not None, "a standby")
            if given_back:
                prepared(engine)
            assert lease(engine, 0.0)[0] == 200
        engine.until(lambda: len(engine.family()) == alone, "nobody beside the worker")
    (entry,) = [e for e in engine.status()["ledger"] if e["owner"].startswith("standby")]
    assert entry["bytes"] == 0, "what it explained has gone with it"
    assert entry["bound"] > 1 << 20
    engine.clean()


def test_leases_are_for_engines_that_take_them(engine: Any) -> None:
    status = engine.status()
    assert "standby" not in status["capabilities"]
    assert "standby" not in status
    code, answer = lease(engine, 60.0)
    assert (code, answer["code"]) == (409, "NotPossible")
    assert "started with never" in answer["message"]
    for body in ({"lease_s": 1.0}, {"expected_epoch": status["epoch"], "lease_s": -1}):
        assert engine.admin("POST", "/standby", body)[0] == 400


def pids_of(processes: list[dict[str, Any]]) -> list[int]:
    return [int(process["pid"]) for process in processes]


def both(engine: Any, other_than: list[int]) -> list[int]:
    """The pids of a standby's two ranks, once it is prepared."""

    def ready() -> list[int] | None:
        if engine.status()["standby"] != {"state": "prepared"}:
            return None
        found = pids_of(of_workers(engine, standby=True))
        return found if len(found) == 2 and not set(found) & set(other_than) else None

    found: list[int] = engine.found(ready, "a standby of two ranks", 60)
    return found


@pytest.mark.long
def test_a_standby_of_two_ranks_takes_over_as_a_whole(
    start_engine: Any, undisturbed: list[str]
) -> None:
    engine = start_engine("--standby-worker", "always", "--tensor-parallel-size", "2").wait_ready()
    standby = both(engine, [])
    alone = len(engine.family())
    (entry,) = [e for e in engine.status()["ledger"] if e["owner"].startswith("standby")]
    private = [process["private"] for process in of_workers(engine, standby=True)]
    assert all(size > 1 << 20 for size in private)
    assert (entry["owner"], entry["bytes"]) == ("standby_worker_host", sum(private))
    with engine.streams(STREAMS, TOKENS) as futures:
        engine.begin("restart", "both")
        operation = engine.finish("both", 60)
        assert texts(futures) == undisturbed
    assert (operation["kv_handover"], operation["carried_prefill_tokens"]) == ("handed_over", 0)
    steps = {step["name"]: step.get("detail") for step in operation["steps"]}
    assert steps["prepare_worker"] == "used the standby worker"
    assert pids_of(of_workers(engine, standby=False)) == standby
    engine.until(lambda: "report_age_s" in engine.status(), "a report of the new worker")
    assert pids_of(of_workers(engine, standby=False)) == standby
    reported = of_workers(engine, standby=False)
    assert all(process["malloc_in_use"] > 1 << 20 for process in reported), reported

    # Without one of its ranks it is none, and nobody else notices.
    standby = both(engine, standby)
    epoch = engine.status()["epoch"]
    for rank in (1, 0):
        with engine.streams(STREAMS, TOKENS) as futures:
            os.kill(standby[rank], signal.SIGKILL)
            assert texts(futures) == undisturbed
        standby = both(engine, standby)
    assert engine.status()["epoch"] == epoch

    # After the death of a serving rank it serves.
    with engine.streams(STREAMS, TOKENS) as futures:
        os.kill(pids_of(of_workers(engine, standby=False))[1], signal.SIGKILL)
        assert texts(futures) == undisturbed
    assert pids_of(of_workers(engine, standby=False)) == standby
    both(engine, standby)
    engine.until(lambda: len(engine.family()) == alone, "nobody beside them")
    ends_clean(engine)
