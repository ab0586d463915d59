"""GPUs behind the HTTP API, with zygote and weight server: a restart, then each rank's death."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.engine.conftest import Engine
from tests.ranks import GROUPS, write_for_four

pytestmark = pytest.mark.parametrize("size", GROUPS)
CLIENTS, TOKENS = 4, 400


@pytest.fixture(params=["never", "always"])
def engine(tmp_path: Path, size: int, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Without a standby of all ranks, and with one."""
    write_for_four(tmp_path / "tiny")
    one = Engine(
        tmp_path / "tiny", tmp_path / "run", "--device", "cuda", "--num-blocks", "4096",
        "--tensor-parallel-size", str(size), "--standby-worker", request.param,
    )  # fmt: skip
    try:
        yield one.wait_ready()
    finally:
        one.end()


def texts(engine: Engine) -> list[str]:
    with engine.streams(CLIENTS, TOKENS) as futures:
        return [future.result(120).text for future in futures]


def ranks(engine: Engine) -> list[int]:
    workers = [p for p in engine.status()["processes"] if p["role"] == "worker"]
    return [p["pid"] for p in workers if p.get("name") != "standby"]


def living(family: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; the machine with the GPUs may have no init that reaps orphans."""
    found = []
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_streams_over_a_restart_and_over_each_death(engine: Engine, size: int) -> None:
    undisturbed = texts(engine)
    engine.until(lambda: len(ranks(engine)) == size, "all ranks' report")
    status = engine.status()
    assert [device["index"] for device in status["devices"]] == list(range(size))
    assert all(device["used"] > 0 and device["torch_allocated"] > 0 for device in status["devices"])
    by_owner: dict[str, Any] = {entry["owner"]: entry for entry in status["ledger"]}
    assert by_owner["weights"]["process"] == "weight_server"

    before = ranks(engine)
    if "standby" in status:
        engine.until(
            lambda: engine.status()["standby"] == {"state": "prepared"}, "a standby of all ranks"
        )
    with ThreadPoolExecutor(1) as pool:
        streams = pool.submit(texts, engine)
        engine.begin("restart", "planned")
        operation = engine.finish("planned", 60)
        assert streams.result(180) == undisturbed
    assert operation["state"] == "succeeded", operation
    assert operation["kv_handover"] == "handed_over", operation
    stopped = next(step for step in operation["steps"] if step["name"] == "stop_worker")
    assert stopped["before_bytes"] == stopped["after_bytes"], "all of the devices came back"
    assert not set(before) & set(ranks(engine))
    engine.clean()

    for rank in reversed(range(size)):
        before = ranks(engine)
        with engine.streams(CLIENTS, TOKENS) as futures:
            os.kill(before[rank], signal.SIGKILL)
            assert [future.result(120).text for future in futures] == undisturbed
        engine.until(lambda: len(ranks(engine)) == size, "all ranks' report")
        assert not set(before) & set(ranks(engine))
        engine.clean()
    log = engine.log.read_text()
    assert all(f"rank {rank}, was killed by SIGKILL" in log for rank in range(1, size))
    print("\n".join(line for line in log.splitlines() if "process_group" in line)[-1500:])
    family = engine.family()
    engine.end()
    assert engine.process.returncode == 0
    assert living(family) == []
