"""What a supervisor costs: its memory, its processor time, and what a hundred thousand samples add.

    python -m bench.supervisor_cost

A real engine (tiny model, on the CPU) serves a request a second. For ``--seconds`` the launcher
and the supervisor watch it at 1 Hz, as in a pod; their memory and processor time are read from
/proc. Then another supervisor takes ``--samples`` samples of the same engine without sleeping,
with a clock that goes on by one second each, and the engine serves a request now and then (see
``supervisor_growth.py``).

``rss_mib`` and ``anon_mib`` are of the supervisor's process after its warm-up; the launcher, whose
file pages are mostly the same, is told beside it. ``pss_mib`` is both, shared pages counted once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.result import publish
from bench.running import Engine, running
from bench.supervisor_growth import SERVE
from plimsoll_api import supervisor_config
from plimsoll_api.engines import EngineType
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.names import SUPERVISOR_MODULE
from plimsoll_api.supervision import Supervision
from plimsoll_api.supervisor_config import EngineEndpoint, ServiceRef, SupervisorConfig

HERE = Path(__file__).parent
MIB = 1 << 20
REQUEST_EVERY_S = 1.0
SCRAPE_EVERY_S = 15.0
WARM_UP_S = 30.0
READ_EVERY_S = 1.0
TOLD_S = 1.2
"""Twice the time within which an engine's worker reports to its frontend, and a little."""
BODY = {"model": "bench", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}


def configure(folder: Path, engine: Engine) -> list[str]:
    """Writes ``supervisor.json``; the arguments of a supervisor of ``engine``."""
    config = SupervisorConfig(
        service=ServiceRef(name="bench"),
        engine=EngineEndpoint(
            type=EngineType.PLIMSOLL,
            admin_url=f"http://127.0.0.1:{engine.admin_port}",
            serving_url=f"http://127.0.0.1:{engine.port}",
        ),
        memory=MemoryPolicy(
            host=MemoryBudget(growth_bytes=256 * MIB, window_s=86_400.0), warmup_s=10.0
        ),
        supervision=Supervision(),
    )
    file = folder / "supervisor.json"
    file.write_bytes(supervisor_config.encode_config(config))
    state_dir = folder / "state"
    return ["--config", str(file), "--run-dir", str(engine.run_dir), "--state-dir", str(state_dir)]


def complete(port: int) -> None:
    """One short completion."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(BODY).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        answer.read()


@contextlib.contextmanager
def requests(engine: Engine) -> Iterator[None]:
    """A short completion each second, from a thread."""
    ending = threading.Event()

    def send() -> None:
        while not ending.wait(REQUEST_EVERY_S):
            complete(engine.port)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(60)


def memory(pid: int) -> dict[str, int]:
    """``Rss``, ``Pss`` and ``Anonymous`` of a process in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    values = {key.rstrip(":"): int(size) * 1024 for key, size, *_ in map(str.split, lines)}
    return {key: values[key] for key in ("Rss", "Pss", "Anonymous")}


def cpu_s(pid: int) -> float:
    """Processor time of a process and of those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def child_of(pid: int) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if found:
            return int(found[0])
        time.sleep(0.05)
    raise RuntimeError("the launcher did not start a supervisor within 20 s")


def watch(arguments: list[str], metrics_port: int, seconds: float) -> dict[str, Any]:
    """Figures of a launcher and its supervisor at 1 Hz."""
    ports = ["--metrics-port", str(metrics_port), "--probe-port", str(metrics_port + 1)]
    command = [sys.executable, "-m", SUPERVISOR_MODULE, *arguments, *ports]
    launcher = subprocess.Popen([*command, "--host", "127.0.0.1"], stderr=subprocess.DEVNULL)
    try:
        pid = child_of(launcher.pid)
        time.sleep(WARM_UP_S)
        began, spent = time.monotonic(), cpu_s(pid) + cpu_s(launcher.pid)
        scrape_at = began
        readings: list[tuple[dict[str, int], dict[str, int]]] = []
        while time.monotonic() - began < seconds:
            if time.monotonic() >= scrape_at:
                scrape_at += SCRAPE_EVERY_S
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{metrics_port}/metrics", timeout=10
                ) as answer:
                    text = answer.read()
            readings.append((memory(pid), memory(launcher.pid)))
            time.sleep(READ_EVERY_S)
        wall = time.monotonic() - began
        spent = cpu_s(pid) + cpu_s(launcher.pid) - spent
        assert child_of(launcher.pid) == pid, "the supervisor was started anew"
        samples = next(
            float(line.split()[1])
            for line in text.decode().splitlines()
            if line.startswith("plimsoll_supervisor_samples_total ")
        )
    finally:
        launcher.terminate()
        launcher.wait(30)
    own, its_launcher = ([pair[i] for pair in readings] for i in (0, 1))
    return {
        "rss_mib": max(one["Rss"] for one in own) / MIB,
        "anon_mib": max(one["Anonymous"] for one in own) / MIB,
        "launcher_rss_mib": max(one["Rss"] for one in its_launcher) / MIB,
        "launcher_anon_mib": max(one["Anonymous"] for one in its_launcher) / MIB,
        "pss_mib": max(a["Pss"] + b["Pss"] for a, b in readings) / MIB,
        "cpu_core_ratio": spent / wall,
        "watched_s": wall,
        "watched_samples_count": samples,
    }


def grow(arguments: list[str], samples: int, port: int) -> tuple[dict[str, Any], list[int]]:
    """Figures of ``samples`` samples without sleeping, and the readings they come from."""
    command = [sys.executable, str(HERE / "supervisor_growth.py"), *arguments]
    told: dict[str, Any] = {}
    readings: list[int] = []
    with subprocess.Popen(
        [*command, "--samples", str(samples)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as growing:
        assert growing.stdin is not None
        assert growing.stdout is not None
        for line in growing.stdout:
            if line.strip() == SERVE:
                complete(port)
                time.sleep(TOLD_S)
                growing.stdin.write("\n")
                growing.stdin.flush()
            elif line.strip().isdecimal():
                readings.append(int(line))
            else:
                told = json.loads(line)
    if growing.returncode:
        raise subprocess.CalledProcessError(growing.returncode, command)
    tenth = len(readings) // 10
    first, last = readings[tenth : 2 * tenth], readings[-tenth:]
    figures = {
        "growth_bytes": statistics.median(last) - statistics.median(first),
        "growth_samples_count": samples,
        "sample_s": told["took_s"] / samples,
    }
    return figures, readings


def main() -> None:
    parse = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parse.add_argument("--name", default="supervisor-cost")
    parse.add_argument("--seconds", type=float, default=180.0)
    parse.add_argument("--samples", type=int, default=100_000)
    parse.add_argument("--metrics-port", type=int, default=19464, help="and the one after it")
    flags = parse.parse_args()
    with tempfile.TemporaryDirectory(prefix="supervisor-cost") as name:
        folder = Path(name)
        model = folder / "model"
        subprocess.run([sys.executable, "-m", "plimsoll_faults.models.tiny", model], check=True)
        options = ["--device", "cpu", "--dtype", "float32", "--num-blocks", "256"]
        with running(model, folder / "run", *options) as engine:
            engine.wait_ready()
            arguments = configure(folder, engine)
            with requests(engine):
                figures = watch(arguments, flags.metrics_port, flags.seconds)
            growth, readings = grow(arguments, flags.samples, engine.port)
    shown = readings[:: max(1, len(readings) // 100)]
    publish(flags.name, figures | growth, {"anon_bytes_by_sample": shown})


if __name__ == "__main__":
    main()
