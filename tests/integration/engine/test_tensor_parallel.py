"""Two ranks by gloo, as real processes behind the HTTP API: one worker to everybody outside.

Its text is that of one rank, its processes live and end together, and a restart carries the streams
over to a whole new group.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

STREAMS, TOKENS = 4, 120
FLAGS = ("--tensor-parallel-size", "2")
ROLES = ["frontend", "zygote", "weight_server", "worker", "worker"]


@pytest.fixture(scope="module")
def undisturbed(shared_engine: Any) -> list[str]:
    """One rank's."""
    with shared_engine.streams(STREAMS, TOKENS) as futures:
        return texts(futures)


def texts(futures: list[Any]) -> list[str]:
    return [future.result(120).text for future in futures]


def ranks(engine: Any) -> list[int]:
    """The pids of the serving ranks, once they have reported."""
    processes = engine.status()["processes"]
    return [int(p["pid"]) for p in processes if p["role"] == "worker"]


def whole(engine: Any) -> None:
    """One group and nothing else of it."""
    engine.until(
        lambda: [p["role"] for p in engine.status()["processes"]] == ROLES, "two ranks' report"
    )
    engine.until(lambda: len(engine.family()) == len(ROLES) + 1, "nobody beside them")
    engine.clean()


def anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def left_behind(engine: Any) -> list[str]:
    """Files of groups that are over."""
    return sorted(path.name for path in engine.run_dir.glob("r[0-9]*"))


def test_two_ranks_say_what_one_says(start_engine: Any, undisturbed: list[str]) -> None:
    engine = start_engine(*FLAGS).wait_ready()
    with engine.streams(STREAMS, TOKENS) as futures:
        assert texts(futures) == undisturbed
    whole(engine)

    # Each holds half, and the account is of both.
    status = engine.status()
    workers = [p for p in status["processes"] if p["role"] == "worker"]
    assert all(worker["malloc_in_use"] > 1 << 20 for worker in workers)
    kept = [e["bytes"] for e in status["ledger"] if e["owner"] in ("weights", "kv_pool")]
    (server,) = [p for p in status["processes"] if p["role"] == "weight_server"]
    assert server["shared"] == sum(kept)
    assert all(worker["shared"] < 4 << 20 for worker in workers), workers
    first = ranks(engine)
    engine.begin("trim", "both")
    steps = {step["name"]: step for step in engine.finish("both")["steps"]}
    assert steps["malloc_trim"]["before_bytes"] > 1.5 * anonymous_bytes(first[0])

    # A planned restart under load: a whole group beside the serving one.
    with engine.streams(STREAMS, TOKENS) as futures:
        engine.begin("restart", "planned")
        operation = engine.finish("planned", 60)
        assert texts(futures) == undisturbed
    assert operation["state"] == "succeeded", operation
    assert operation["carried_requests"] == operation["carried_kv_requests"] == STREAMS
    assert (operation["kv_handover"], operation["carried_prefill_tokens"]) == ("handed_over", 0)
    whole(engine)
    assert not set(first) & set(ranks(engine))

    # Any rank's death is the worker's.
    for rank in (1, 0):
        before = ranks(engine)
        with engine.streams(STREAMS, TOKENS) as futures:
            os.kill(before[rank], signal.SIGKILL)
            assert texts(futures) == undisturbed
        whole(engine)
        assert not set(before) & set(ranks(engine))
        who = f"worker {before[rank]}" + (", rank 1," if rank else "")
        assert f"{who} was killed by SIGKILL" in engine.log.read_text()

    # A rank that hangs is killed with its group, and leaves its stacks.
    before = ranks(engine)
    with engine.streams(STREAMS, TOKENS) as futures:
        os.kill(before[1], signal.SIGSTOP)
        engine.begin("restart", "hung", keep_weights=False)
        operation = engine.finish("hung", 60)
        assert texts(futures) == undisturbed
    assert operation["state"] == "succeeded", operation
    whole(engine)
    assert not any(map(psutil.pid_exists, before))

    family = engine.family()
    engine.end()
    assert engine.process.returncode == 0, engine.log_tail()
    assert not [process for process in family if process.is_running()]
    assert left_behind(engine) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--tensor-parallel-size", "3"),
            "field num_attention_heads is 4, which is not divisible by",
        ),
        (
            ("--tensor-parallel-size", "4"),
            "field num_key_value_heads is 2, which is not divisible by",
        ),
        ((*FLAGS, "--kv-offload-bytes", "1Mi"), "--kv-offload-bytes is not supported with"),
    ],
)
def test_what_cannot_be_shared_out_is_named(
    start_engine: Any, flags: tuple[str, ...], said: str
) -> None:
    engine = start_engine(*flags)
    assert engine.process.wait(120) != 0
    log = engine.log.read_text()
    assert said in log
    assert "--tensor-parallel-size" in log
    assert not list(Path(engine.run_dir).glob("r[0-9]*"))
