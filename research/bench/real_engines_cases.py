"""What ``real_engines.py`` does with one replica: a real engine and the supervisor beside it.

Each case runs in its own process and writes each result as a row at once. Times are in seconds;
``life`` counts the engine's starts from 1.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import urllib3

from bench.real_engines_diagnosis import diagnosis_cost
from bench.real_engines_probe_cost import ARGUMENTS, Pairs, probe_cost
from bench.real_engines_replica import CLIENTS, TOKENS, Book, Replica, told
from plimsoll_api.engines import EngineType
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_sidecar.signals.engine_processes import ENGINE_PROGRAMS
from plimsoll_sidecar.signals.probe_reports import query_probes
from plimsoll_sidecar.signals.probes import REPORT_REQUEST
from plimsoll_sidecar.signals.process_table import ProcessId, identify
from tests.conformance.peers import CHECKPOINT, LARGE, Peer
from tests.conformance.rig import START_S, Rig, until

MIB = 1 << 20
LEAK_BYTES_S = 2 * MIB
BUDGET = MemoryBudget(256 * MIB, 3600.0)
ENGINE_ALONE = MemoryPolicy(host=BUDGET, device=BUDGET, shared_device=True, warmup_s=60.0)
"""Several engines use one device here: judged is what each one's own allocator holds."""
WARM_S = 100.0
"""Under load before a leak: the warm-up takes once to twice ``warmup_s``."""
OLD_S, YOUNG_S = 305.0, 75.0
ENDED_S = 120.0
CURED_S = 240.0
"""From the confirmation to the end of the leaking process: most of the budget goes first, and then
SGLang needs more than its shutdown's 40 s."""
LAST_S = 10.0
"""Of a case: to end its engine."""
LOGPROBS = 3
STAIRS, STAIR_S, LANDING_S = 4, 16.0, 24.0
"""A staircase of device memory: at 2 MiB/s, four of these come to half of the budget."""
SUBSIDES_S = 60.0


# ---- cases


def leak(replica: Replica, part: str, memory: str) -> None:
    """Leaks in ``part`` again and again: of each life once, after its warm-up."""
    while replica.book.left_s() > WARM_S + 60:
        replica.healthy(WARM_S)
        if not leak_once(replica, part, memory):
            return


def leak_once(replica: Replica, part: str, memory: str) -> bool:
    """A leak from its cause to the life that follows; False where nothing was confirmed."""
    rig, book = replica.rig, replica.book
    switch = rig.folder / f"{'device-' if memory == 'device' else ''}leak-{rig.peer.role(part)}"
    kind = IncidentKind.DEVICE_GROWTH if memory == "device" else IncidentKind.HOST_GROWTH
    leaking = rig.part(part)
    reports = [_report(rig, leaking.pid)]
    since = time.time()
    switch.write_text(str(LEAK_BYTES_S))
    try:
        found = replica.seen(kind, since)
        seen_at = found.confirmed_at if found else None
        reports.append(_report(rig, leaking.pid))
        page = [] if found else _page(rig)
        if found:
            _left({leaking}, time.monotonic() + CURED_S)
    finally:
        switch.unlink()
    book.note(
        "leak",
        part=part,
        memory=memory,
        life=replica.life,
        seconds=round(seen_at - since, 1) if seen_at else None,
        segment=found.attribution.segment if found else None,
        process=found.attribution.process if found else None,
        segment_due="torch_allocated" if memory == "device" else "malloc_in_use",
        process_due=_due(rig, part),
        incident=told(found) if found else None,
        reports=reports,
        page=page,
    )
    if not found:
        replica.caused |= {one.name for one in rig.incidents()}
        replica.injected = True
        return False
    replica.ready()
    name = found.name
    ended = [one for one in rig.incidents() if one.name == name]
    book.note("cure", life=replica.life, incident=told(ended[0]) if ended else None)
    return True


def _report(rig: Rig, process: int) -> dict[str, Any]:
    """What the probe in ``process`` says of its memory, where there is one."""
    asked = query_probes(rig.folder / "probe", [process], REPORT_REQUEST, 1.0) if rig.probe else {}
    answer = asked.get(process)
    return {k: v for k, v in json.loads(answer).items() if k != "engine"} if answer else {}


def _page(rig: Rig) -> list[str]:
    """What the supervisor's metrics say of memory."""
    page = urllib3.request("GET", f"http://127.0.0.1:{rig.metrics_port}/metrics").data.decode()
    wanted = ("plimsoll_supervisor_", "plimsoll_device", "plimsoll_memory")
    return [line for line in page.splitlines() if line.startswith(wanted)]


def _due(rig: Rig, part: str) -> str:
    """What the engine calls the process of ``part``."""
    if part == "frontend":
        return ENGINE_PROGRAMS[rig.peer.type].main
    return rig.peer.parts[part].partition("::")[2]


def staircase(replica: Replica) -> None:
    """Device memory that grows in steps up to half of the budget, and then stays."""
    rig, book = replica.rig, replica.book
    replica.healthy(WARM_S)
    switch = rig.folder / f"device-leak-{rig.peer.role(rig.peer.core)}"
    for _ in range(STAIRS):
        switch.write_text(str(LEAK_BYTES_S))
        time.sleep(STAIR_S)
        switch.unlink()
        time.sleep(LANDING_S)
    time.sleep(SUBSIDES_S)
    found = [one for one in rig.incidents() if one.name not in replica.caused]
    book.note("staircase", life=replica.life, incidents=[told(one) for one in found])
    replica.injected = True
    replica.caused |= {one.name for one in found}


def stall(
    replica: Replica,
    orders: tuple[str, ...],
    serve_s: float,
    served_s: float = 0.0,
    part: str | None = None,
) -> None:
    """Hangs ``part``, or the core: the first time after ``serve_s`` of service beyond those
    ``served_s`` that it has, then after a minute of it."""
    part = part or replica.rig.peer.core
    rig, book = replica.rig, replica.book
    for how in orders:
        if book.left_s() < serve_s + 25:
            return
        replica.healthy(serve_s)
        if how == "idle":
            rig.rest()
            until(lambda: rig.status().load.inflight == 0, 60, "rest")
            time.sleep(3)
        everyone = {p for pid in rig.processes() if (p := identify(pid)) is not None}
        since = time.time()
        hung = rig.part(part)
        os.kill(hung.pid, signal.SIGSTOP)
        rig.load(CLIENTS, TOKENS)
        found = replica.seen(IncidentKind.STALL, since)
        seen_at = found.confirmed_at if found else None
        if found:
            begin = time.monotonic()
            left = _left(everyone, begin + ENDED_S)
        else:
            left = 0
            os.kill(hung.pid, signal.SIGCONT)
        book.note(
            "stall",
            how=how,
            part=part,
            life=replica.life,
            served_s=round(served_s + serve_s, 1),
            seconds=round(seen_at - since, 1) if seen_at else None,
            left=left,
            incident=told(found) if found else None,
        )
        if book.left_s() < YOUNG_S:
            return
        replica.ready()
        serve_s, served_s = YOUNG_S, 0.0


def kill(replica: Replica, parts: tuple[str, ...]) -> None:
    """Kills one process after the other, each of another life."""
    rig, book = replica.rig, replica.book
    number = 0
    while book.left_s() > 30:
        part = parts[number % len(parts)]
        number += 1
        assert rig.ask() == 200, rig.log()
        everyone = {p for pid in rig.processes() if (p := identify(pid)) is not None}
        victim = rig.part(part)
        begin = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        left = _left(everyone, begin + ENDED_S)
        seconds = round(time.monotonic() - begin, 1)
        incidents = [told(one) for one in rig.incidents() if one.name not in replica.caused]
        book.note(
            "kill", part=part, life=replica.life, processes=len(everyone), left=left,
            seconds=seconds, incidents=incidents,
        )  # fmt: skip
        if book.left_s() < 60:
            return
        replica.ready()


def _left(everyone: set[ProcessId], deadline: float) -> int:
    """How many of the processes still live at the deadline, or 0 as soon as none does."""
    while True:
        left = sum(identify(process.pid) == process for process in everyone)
        if left == 0 or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def quiet(replica: Replica, over: Callable[[], bool]) -> None:
    """Load until the end, and what the supervisor says of the device."""
    rig, book = replica.rig, replica.book
    until(rig.serving, START_S, "an engine that serves")
    begin = time.monotonic()
    status = rig.ask(logprobs=LOGPROBS)
    book.note("logprobs", status=status, seconds=round(time.monotonic() - begin, 1))
    while book.left_s() > LAST_S and not over():
        replica.healthy(min(20.0, book.left_s() - LAST_S))
    book.note("page", lines=_page(rig))


# ---- which there are

CASES = {
    "probe-cost": ENGINE_ALONE,
    "core-leak": ENGINE_ALONE,
    "worker-leak": ENGINE_ALONE,
    "device-leak": ENGINE_ALONE,
    "device-leak-2": ENGINE_ALONE,
    "device-leak-3": ENGINE_ALONE,
    "frontend-leak": ENGINE_ALONE,
    "stall-busy": ENGINE_ALONE,
    "stall-idle": ENGINE_ALONE,
    "stall-young": ENGINE_ALONE,
    "frontend-stall": ENGINE_ALONE,
    "diagnosis": ENGINE_ALONE,
    "staircase": ENGINE_ALONE,
    "kills": ENGINE_ALONE,
    "more-kills": ENGINE_ALONE,
}
"""What the supervisor judges in each."""
USUAL = [name for name in CASES if name not in ("worker-leak", "device-leak-2", "device-leak-3")]
"""Without what only some engines have: with one device, vLLM's model runs in EngineCore. And a
device leak once; the others are the same case, for runs that are to show it more often."""


def eager(peer: Peer) -> tuple[str, ...]:
    """Arguments of the engine: without CUDA graphs it starts in half the time."""
    return ("--enforce-eager",) if peer.type is EngineType.VLLM else ()


def run(name: str, peer: Peer, folder: Path, probe: Path, book: Book, pairs: Pairs) -> None:
    """One case, from the start of its engine to the end of every process."""
    memory = CASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    arguments = eager(peer)
    if name == "probe-cost" and LARGE.exists():
        words = (str(LARGE) if word == str(CHECKPOINT) else word for word in peer.command)
        peer, arguments = replace(peer, command=tuple(words)), ARGUMENTS
    rig = Rig(peer, folder, memory, probe, arguments, {"VLLM_CACHE_ROOT": str(folder / "cache")})
    replica = Replica(rig, book)
    try:
        rig.start(asks=name != "probe-cost")
        book.step(replica.ready)
        if name == "probe-cost":
            book.step(lambda: quiet(replica, book.alone))
            rig.rest()
            book.step(lambda: replica.stays_healthy(lambda: probe_cost(replica, pairs)))
        else:
            while book.left_s() > 60 and not book.step(lambda: _one(name, replica)):
                time.sleep(5.0)
                book.step(lambda: until(rig.serving, START_S, "an engine that serves"))
            book.step(lambda: quiet(replica, lambda: False))
    finally:
        rig.end()
        book.ended.touch()


def _one(name: str, replica: Replica) -> None:
    if name.startswith("device-leak"):
        leak(replica, replica.rig.peer.core, "device")
    elif name.endswith("-leak"):
        named = name.removesuffix("-leak")
        leak(replica, replica.rig.peer.core if named == "core" else named, "host")
    elif name == "kills":
        kill(replica, ("frontend", *replica.rig.peer.parts))
    elif name == "more-kills":
        kill(replica, (*replica.rig.peer.parts, "frontend"))
    elif name == "diagnosis":
        replica.healthy(WARM_S)
        replica.stays_healthy(lambda: diagnosis_cost(replica))
    elif name == "staircase":
        staircase(replica)
    elif name == "frontend-stall":
        stall(replica, ("busy", "idle", "busy", "idle"), YOUNG_S, part="frontend")
    elif name == "stall-young":
        stall(replica, ("busy", "idle", "busy", "idle"), YOUNG_S)
    else:
        first, second = ("busy", "idle") if name == "stall-busy" else ("idle", "busy")
        stall(replica, (first, second, first), OLD_S)
