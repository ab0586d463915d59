"""Makes one recording: an engine, ``plimsoll record`` beside it, clients, and what is injected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from leaklab.recording import engines, labels, split
from leaklab.recording.engines import Launch, Place
from leaklab.recording.loads import Crowd
from leaklab.recording.run import CORE, WORKER, Injection, Run
from plimsoll_api import trace
from plimsoll_api.engines import EngineType
from plimsoll_cli.local.container import Container
from plimsoll_cli.local.plan import Command
from tests.conformance.peers import Peer

START_S = float(os.environ.get("PLIMSOLL_ENGINES_START_S", "600"))
HEALTHY_S, HEALTHY_SHARE = 120.0, 0.3
"""Under load before anything is injected: that long, or that share of a shorter recording."""
STOP_S, RECORDER_S, ASK_S = 10.0, 90.0, 2.0
"""``RECORDER_S`` is for the recorder's start and end: on a crowded machine more than 20 s."""
GRACE_S = 30.0
"""Between SIGTERM and SIGKILL: the kubelet's default."""
PLAN, COUNTED = "inject.json", "injected.jsonl"
"""The same as in ``inside/plimsoll_injector.py``, which imports nothing of ours."""


async def make(
    run: Run, place: Place, peer: Peer | None, out: Path, seconds: float, adapters: Sequence[Path]
) -> dict[str, Any]:
    """Write ``out``, a trace, and its labels; return how it was made.

    RuntimeError where the engine does not start, ValueError where nothing was leaked.
    """
    launched = engines.launch(run, place, peer)
    exits: list[str] = []
    engine = Container(launched.command, exits.append)
    began = time.monotonic()
    engine.start()
    crowd = Crowd(launched.url, run.load, adapters)
    try:
        await _ready(engine, launched)
        ready_s = time.monotonic() - began
        before = busy()
        recorder = await _spawn(engines.recorder(run, place, out, seconds))
        clients = asyncio.create_task(crowd.run())
        healthy_s = min(HEALTHY_S, HEALTHY_SHARE * seconds)
        script = asyncio.create_task(_script(run, place, engine, healthy_s))
        try:
            await asyncio.wait_for(recorder.wait(), seconds + RECORDER_S)
        finally:
            for task in (clients, script):
                task.cancel()
            await asyncio.gather(clients, script, return_exceptions=True)
            if recorder.returncode is None:
                recorder.kill()
        share = _share(before, busy())
        if recorder.returncode != 0:
            log = (place.folder / "recorder.log").read_text()[-1000:]
            raise RuntimeError(f"plimsoll record ended with {recorder.returncode}: {log}")
    finally:
        await engine.stop(STOP_S)
    header, samples = trace.read(out)
    every = list(samples)
    counted = place.folder / COUNTED
    lines = counted.read_text().splitlines() if counted.exists() else []
    made = labels.labels(run, header, every, lines)
    about = {
        "engine": run.engine.value,
        "version": header.engine.version,
        "started_at": header.started_at,
        "command": engines.told(launched.command, place),
        "load": [[phase.seconds, phase.per_s, phase.shape] for phase in run.load],
        "restarts_s": list(run.restarts),
        "mechanism": run.mechanism,
        "part": split.part(run.mechanism),
        "shared_device": place.shared,
        "ready_s": round(ready_s, 1),
        "recorded_s": round(every[-1].t - every[0].t, 1),
        "samples": len(every),
        "unanswered_samples": sum(not sample.scrape_ok for sample in every),
        "clients": dict(crowd.counts),
        "last_error": crowd.last_error,
        "machine_busy_ratio": share,
        "exits": exits,
    }
    write(out, made)
    return about


def write(out: Path, made: labels.Labels) -> None:
    """Write the labels of the trace ``out`` beside it."""
    stem = out.name.removesuffix(".jsonl.gz")
    text = json.dumps(labels.plain(made), indent=1)
    out.with_name(f"{stem}.labels.json").write_text(text + "\n")


async def _script(run: Run, place: Place, engine: Container, healthy_s: float) -> None:
    """What happens at its time, from the start of the recording on."""
    began = time.monotonic()
    if isinstance(run.cause, Injection):
        await asyncio.sleep(healthy_s)
        plan = {
            "process": WORKER if run.cause.worker else CORE[run.engine],
            "pid": engine.pid if run.cause.frontend else 0,
            "mechanism": run.mechanism,
            "driver": run.cause.driver,
            "bytes": run.cause.bytes,
            "piece": run.cause.piece,
            "shape": run.cause.shape,
            "speed": run.cause.speed,
            "beside": run.cause.beside,
        }
        new = place.folder / f"{PLAN}.new"
        new.write_text(json.dumps(plan))
        new.rename(place.folder / PLAN)
    for at in run.restarts:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        await end(engine)


async def end(engine: Container, grace_s: float = GRACE_S) -> None:
    """End the engine's process as the kubelet does; it starts again.

    vLLM's server goes on answering 500 on a connection that is open while requests come on it.
    """
    pid = engine.pid
    if pid is None:
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        if engine.pid != pid:
            return
    os.kill(pid, signal.SIGKILL)


async def _ready(engine: Container, launched: Launch) -> None:
    deadline = time.monotonic() + START_S
    async with httpx.AsyncClient(timeout=ASK_S, trust_env=False) as client:
        while time.monotonic() < deadline:
            engine.raise_start_error()
            if engine.last_exit is not None:
                break
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(launched.url + launched.ready)).status_code == 200:
                    return
            await asyncio.sleep(0.5)
    raise RuntimeError(f"the engine does not serve: {engine.last_exit}\n{engine.read_log_tail()}")


async def _spawn(command: Command) -> asyncio.subprocess.Process:
    with command.log.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *command.argv, env=dict(command.env), stdout=log, stderr=log
        )


def busy() -> tuple[float, float]:
    """Processor time of this machine since it started: all of it, and idle. Any unit."""
    fields = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    values = [float(field) for field in fields]
    return sum(values), values[3] + values[4]


def _share(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    """The share of all processors that was busy; None where no time has passed."""
    whole, idle = after[0] - before[0], after[1] - before[1]
    return round(1.0 - idle / whole, 3) if whole > 0 else None


def needs_peer(run: Run) -> bool:
    """Whether the engine is somebody else's."""
    return run.engine is not EngineType.PLIMSOLL
