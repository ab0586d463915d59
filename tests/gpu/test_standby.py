"""A standby's device memory on one GPU: with a lease, after it, and over a crash of the worker.

Tests ``frontend/workers/standby.py`` and ``frontend/workers/standby_memory.py``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll_faults.models.tiny import write_checkpoint
from tests.integration.engine.conftest import Engine

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: these tests need one GPU"
)
MIB = 1 << 20
CLIENTS, TOKENS = 4, 600
LEAST_BYTES, MOST_BYTES = 100 * MIB, 2048 * MIB
"""What a standby takes: more than no context could do with, and less than the engine keeps free."""
ROOM_BYTES = 64 * MIB
"""Which kernels a context has loaded, and what the allocator keeps, follows from what it computed.
Far less than the context of a process that did not end."""
PAUSE_S = 3.0
"""A worker that is started anew takes longer: its imports and its context alone."""


def used() -> int:
    """Bytes of the device that anybody holds."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def settled(timeout_s: float = 30.0) -> int:
    """The same, once they have been the same for 2 s: graphs are captured while nobody asks."""
    deadline = time.monotonic() + timeout_s
    last, since = used(), time.monotonic()
    while time.monotonic() - since < 2.0:
        assert time.monotonic() < deadline, "the device's memory does not settle"
        time.sleep(0.1)
        if (now := used()) != last:
            last, since = now, time.monotonic()
    return last


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    write_checkpoint(tmp_path / "tiny")
    one = Engine(
        tmp_path / "tiny", tmp_path / "run", "--device", "cuda", "--num-blocks", "4096",
        "--standby-worker", "on-suspicion",
    )  # fmt: skip
    try:
        yield one
    finally:
        one.end()


def lease(engine: Engine, lease_s: float) -> None:
    body = {"expected_epoch": engine.status()["epoch"], "lease_s": lease_s}
    code, answer = engine.admin("POST", "/standby", body)
    assert code == 200, answer


def prepared(engine: Engine) -> int:
    """The pid of the standby, once it is there."""
    engine.until(lambda: engine.status()["standby"] == {"state": "prepared"}, "a standby", 60)
    (process,) = [p for p in engine.status()["processes"] if p.get("name") == "standby"]
    return int(process["pid"])


def gone(engine: Engine, pid: int) -> None:
    engine.until(lambda: engine.status()["standby"] == {"state": "absent"}, "an end", 30)
    engine.until(lambda: not Path(f"/proc/{pid}").exists(), "the process's end", 30)


def owned(engine: Engine) -> dict[str, int]:
    """What the ledger says of the memory that the weight server keeps on the device."""
    engine.until(lambda: "report_age_s" in engine.status(), "a report")
    entries = [e for e in engine.status()["ledger"] if e["owner"] in ("weights", "kv_pool")]
    return {entry["owner"]: entry["bytes"] for entry in entries if entry["kind"] == "device"}


def of_standby(engine: Engine) -> dict[str, Any] | None:
    ledger = engine.status()["ledger"]
    return next((e for e in ledger if e["owner"] == "standby_worker_device"), None)


def test_a_lease_takes_device_memory_and_gives_all_of_it_back(engine: Engine) -> None:
    """Once the lease is ended by its holder, and once it is over."""
    torch.zeros(1, device="cuda")  # this process's own context is there from now on
    engine.wait_ready()
    engine.until(lambda: "report_age_s" in engine.status(), "a report")
    with engine.streams(CLIENTS, TOKENS) as futures:
        assert all(future.result(120).text for future in futures)
    engine.clean()
    without = settled()
    assert engine.status()["standby"] == {"state": "absent"}
    assert of_standby(engine) is None, "nobody has asked for one"
    alone = len(engine.family())
    for lease_s in (0.0, 2.0):
        lease(engine, 60.0)
        pid = prepared(engine)
        taken = settled() - without
        assert LEAST_BYTES < taken < MOST_BYTES
        entry = engine.found(lambda: of_standby(engine), "the standby's device memory", 30)
        assert entry is not None
        assert LEAST_BYTES < entry["bytes"] <= entry["bound"]
        lease(engine, lease_s)
        gone(engine, pid)
        engine.until(lambda: len(engine.family()) == alone, "nobody beside the worker")
        engine.until(lambda: used() == without, f"the {taken} bytes", 30)
        assert settled() == without
        left = of_standby(engine)
        assert left is not None
        assert left["bytes"] == 0
    engine.clean()


def test_after_a_crash_the_standby_serves_at_once_and_nothing_is_left(engine: Engine) -> None:
    """The weights that it has mapped are compared with those of the load before it may.

    A worker that is killed says nothing of its memory, so the device does: with the engine's end
    every byte is back, and meanwhile there is no second context. The standby that serves is then
    replaced, and says that all of its own came back.
    """
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    nothing = settled()
    engine.wait_ready()
    with engine.streams(CLIENTS, TOKENS) as futures:
        undisturbed = [future.result(120).text for future in futures]
    engine.clean()
    without, ledger = settled(), owned(engine)
    assert ledger.keys() == {"weights", "kv_pool"}
    for _ in range(2):
        lease(engine, 60.0)
        pid, epoch = prepared(engine), engine.status()["epoch"]
        with engine.streams(CLIENTS, TOKENS) as futures:
            os.kill(engine.worker_pid(), signal.SIGKILL)
            found = [future.result(120) for future in futures]
        assert [stream.text for stream in found] == undisturbed
        assert max(stream.pause_s() for stream in found) < PAUSE_S
        assert engine.worker_pid() == pid
        assert engine.status()["epoch"] != epoch
        # The lease was the old epoch's: there is one worker again.
        assert engine.status()["standby"] == {"state": "absent"}
        engine.clean()
        assert abs(settled() - without) < ROOM_BYTES
        assert owned(engine) == ledger
    engine.begin("restart", "after-crashes")
    operation = engine.finish("after-crashes", 60)
    assert operation["state"] == "succeeded", operation
    stopped = next(step for step in operation["steps"] if step["name"] == "stop_worker")
    assert stopped["before_bytes"] == stopped["after_bytes"], "all of the device came back"
    engine.clean()
    engine.end()
    assert engine.process.poll() == 0, engine.log_tail()
    engine_gone = time.monotonic() + 30
    while used() != nothing:
        assert time.monotonic() < engine_gone, f"{used() - nothing} bytes are left"
        time.sleep(0.1)
