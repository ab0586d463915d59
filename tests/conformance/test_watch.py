"""``plimsoll watch`` beside real vLLM with a published model: as a process, and started by it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conformance import published, table
from tests.conformance.peers import PEERS, Peer
from tests.conformance.rig import START_S
from tests.desk import LIMIT_S, Desk

PEER = PEERS["vllm-0.32.0"]
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not (PEER.ready and published.ready()), reason="not made: make engines"),
]
BUDGET = ("--host-budget=64Mi", "--window=1h")
LEAK_BYTES_S = 4 << 20


class Served(Desk):
    """With vLLM, whose EngineCore leaks while there is a file that says so."""

    def __init__(self, folder: Path, peer: Peer) -> None:
        super().__init__(folder, peer.home / "bin")
        more = {"PLIMSOLL_CONFORMANCE_DIR": str(folder)}
        self.environment |= peer.environment | more
        self.environment.pop("PYTHONPATH", None)
        self.leak = folder / "leak-enginecore"
        self.command = [
            "vllm", "serve", str(published.SMOLLM2), "--served-model-name=smollm2",
            "--dtype=float32", "--max-model-len=2048", "--enforce-eager", f"--port={self.port}",
            "--gpu-memory-utilization=0.2",  # of this machine's memory: others need theirs
        ]  # fmt: skip

    def asks(self) -> int:
        """The status of a completion."""
        body = {"model": "smollm2", "prompt": "The water line", "max_tokens": 4}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        return httpx.post(url, json=body, timeout=LIMIT_S).status_code


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Served]:
    one = Served(tmp_path, PEER)
    yield one
    one.end()


def record(case: str, seconds: float, told: str) -> None:
    table.write(table.Ran(PEER.type.value, PEER.version, case, round(seconds, 1), told))


def test_a_leak_of_a_running_vllm_is_explained(desk: Served) -> None:
    engine = desk.start(*desk.command)
    desk.until(desk.answers, START_S)
    begun = time.monotonic()
    watching = desk.watch(str(engine.pid), "--warmup=30s", *BUDGET)
    desk.until(lambda: "memory by segment: " in desk.told())
    first_s = time.monotonic() - begun
    assert first_s < 60
    assert "engine type vllm, API at " in desk.told()
    desk.until(lambda: "warm-up has ended: " in desk.told(), 2 * LIMIT_S)

    desk.leak.write_text(str(LEAK_BYTES_S))
    since = time.monotonic()
    where = ": HostGrowth in anonymous_other of the EngineCore"
    desk.until(lambda: where in desk.told(), 3 * LIMIT_S)
    told_s = time.monotonic() - since
    assert "HostGrowth" in httpx.get(desk.page()).text
    desk.until(lambda: " Suppressed (Observed): " in desk.told(), 2 * LIMIT_S)
    ended_s = time.monotonic() - begun
    desk.leak.unlink()
    assert desk.asks() == 200, "it serves on"

    watching.send_signal(signal.SIGINT)
    assert watching.wait(30) == 0, desk.told()
    assert engine.poll() is None, "what is watched runs on"
    (name,) = set(re.findall(r"incident (\S+) ", desk.told()))
    story = desk.run("explain", name, "--local")
    assert "in anonymous_other of the EngineCore" in story
    assert "plimsoll watch --recover -- COMMAND" in story
    record("`plimsoll watch PID`: first figures", first_s, "from the start of the command")
    told = f"64 MiB budget, 4 MiB/s; {ended_s:.0f} s from the start of the command to its end"
    record("`plimsoll watch PID`: a leak is reported", told_s, told)


def test_a_leaking_vllm_of_its_own_is_restarted(desk: Served) -> None:
    desk.leak.write_text(str(LEAK_BYTES_S))
    desk.watch("--warmup=20s", *BUDGET, "--recover", "--", *desk.command)
    desk.until(lambda: "memory by segment: " in desk.told())
    desk.until(lambda: ": HostGrowth in anonymous_other" in desk.told(), 2 * START_S)
    since = time.monotonic()
    desk.until(lambda: ", restarting" in desk.told(), 3 * LIMIT_S)  # by SIGKILL if it is slow
    desk.leak.unlink()
    desk.until(desk.answers, START_S)
    served_s = time.monotonic() - since
    assert desk.asks() == 200
    desk.until(lambda: " Resolved (EngineRestart): HostGrowth" in desk.told(), 4 * LIMIT_S)
    record(
        "`plimsoll watch --recover`: a leak is cured", served_s,
        "from the incident until a new vLLM answers",
    )  # fmt: skip
