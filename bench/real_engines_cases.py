"""What ``real_engines.py`` does with one replica: a real engine and the supervisor beside it.

Each case runs in its own process and writes each result as a row at once. Times are in seconds;
``life`` counts the engine's starts from 1.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import urllib3

from bench.real_engines_probe_cost import ARGUMENTS, Pairs, probe_cost
from plimsoll_api.engines import EngineType
from plimsoll_api.incident_record import StepOutcome
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.signals.probe.probe_socket import ask_all
from plimsoll_sidecar.signals.probe.probes import REPORT
from plimsoll_sidecar.signals.process.process_id import ProcessId, identify
from plimsoll_sidecar.signals.process.programs import PROGRAMS
from tests.conformance.peers import CHECKPOINT, LARGE, Peer
from tests.conformance.rig import START_S, Rig, until
from tests.conformance.watching import confirmed, served

MIB = 1 << 20
LEAK_BYTES_S = 2 * MIB
BUDGET = MemoryBudget(256 * MIB, 3600.0)
ENGINE_ALONE = MemoryPolicy(host=BUDGET, device=BUDGET, shared_device=True, warmup_s=60.0)
"""Several engines use one device here: judged is what each one's own allocator holds."""
WARM_S = 100.0
"""Under load before a leak: the warm-up takes once to twice ``warmup_s``."""
OLD_S, YOUNG_S = 305.0, 75.0
MISSED_S = 180.0
ENDED_S = 120.0
CURED_S = 240.0
"""From the confirmation to the end of the leaking process: most of the budget goes first, and then
SGLang needs more than its shutdown's 40 s."""
CLIENTS, TOKENS = 5, 64
LAST_S = 10.0
"""Of a case: to end its engine."""
LOGPROBS = 3


@dataclass
class Book:
    """One case's rows, and when it has to end. ``beside`` are the cases that run beside it."""

    path: Path
    beside: tuple[str, ...]
    ends_at: float

    @property
    def ended(self) -> Path:
        """There once the case has ended its engine."""
        return self.path.with_suffix(".ended")

    def alone(self) -> bool:
        """Whether every other case has ended its engine."""
        return all((self.path.parent / f"{name}.ended").exists() for name in self.beside)

    def note(self, case: str, **found: Any) -> None:
        row = {"case": case, "replica": self.path.stem, "at": round(time.time(), 1)}
        row |= {"load_1min": round(os.getloadavg()[0], 1)} | found
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def left_s(self) -> float:
        return self.ends_at - time.time()

    def step(self, what: Callable[[], object]) -> bool:
        """A step that fails is a row of its own; the next one is tried."""
        try:
            what()
        except Exception as error:  # noqa: BLE001 - the time on the device goes on
            trace = traceback.format_exc()[-1500:]
            self.note("failed", error=f"{type(error).__name__}: {error}"[-3000:], trace=trace)
            return False
        return True


class Replica:
    """A rig and the row book; ``life`` is the engine's number."""

    def __init__(self, rig: Rig, book: Book) -> None:
        self.rig, self.book = rig, book
        self.life = 0
        self.since = time.monotonic()
        self.caused: set[str] = set()
        self.injected = False

    def ready(self) -> None:
        """Waits for the engine of the next life."""
        begin = time.monotonic()
        until(self.rig.serving, START_S, f"an engine that serves: {self.rig.log('engine')}")
        self.life += 1
        self.injected = False
        self.since = time.monotonic()
        self.excuse()
        status = self.rig.status()
        self.book.note(
            "ready",
            life=self.life,
            seconds=round(time.monotonic() - begin, 1),
            version=status.version,
            processes=[p.role.value for p in status.processes],
            devices=[d.uuid for d in status.devices],
        )

    def age_s(self) -> float:
        """Of the present life, since it served."""
        return time.monotonic() - self.since

    def excuse(self) -> None:
        """What is open now was caused by the case."""
        self.caused |= {one.name for one in self.rig.incidents()} if self.life > 1 else set()

    def healthy(self, seconds: float) -> None:
        """Service under load in which nothing may be confirmed."""
        self.load()
        self.stays_healthy(lambda: served(self.rig, seconds))

    def stays_healthy(self, what: Callable[[], None], since: float | None = None) -> None:
        """Notes the time that ``what`` took, or that has passed ``since`` (monotonic), and what was
        suspected in it. A life that holds what a case leaked is ``injected``: it is no healthy
        one."""
        begin = time.monotonic() if since is None else since
        before = Counter(self.rig.answers)
        try:
            what()
        finally:
            found = [one for one in self.rig.incidents() if one.name not in self.caused]
            self.book.note(
                "healthy",
                life=self.life,
                seconds=round(time.monotonic() - begin, 1),
                answers=dict(self.rig.answers - before),
                incidents=[told(one) for one in found],
                injected=self.injected,
            )

    def load(self) -> None:
        """So many and such long requests that one is always under way."""
        until(self.rig.serving, START_S, "an engine that serves")
        self.rig.load(CLIENTS, TOKENS)

    def seen(self, kind: IncidentKind, since: float) -> Incident | None:
        """The incident as soon as it is confirmed; None after :data:`MISSED_S`."""
        deadline = time.monotonic() + MISSED_S
        while time.monotonic() < deadline:
            found = confirmed(self.rig, kind, since)
            if found is not None:
                return found
            time.sleep(0.25)
        return None


def acted(incident: Incident) -> int:
    """Steps that were sent to the engine."""
    return sum(
        step.operation_id is not None and step.outcome is not StepOutcome.WOULD
        for step in incident.timeline
    )


def told(incident: Incident) -> dict[str, Any]:
    attribution = incident.attribution
    return {
        "name": incident.name,
        "kind": incident.kind.value,
        "confirmed": incident.confirmed_at is not None,
        "actions": acted(incident),
        "phase": incident.phase.value,
        "segment": attribution.segment,
        "process": attribution.process,
        "bytes": attribution.bytes,
        "evidence": attribution.evidence[:4],
        "steps": [f"{s.step} {s.outcome.value} {s.message}"[:160] for s in incident.timeline][:12],
    }


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
    title = "frontend" if part == "frontend" else rig.peer.parts[part].partition("::")[2].lower()
    switch = rig.folder / f"{'device-' if memory == 'device' else ''}leak-{title}"
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
    asked = ask_all(rig.folder / "probe", [process], REPORT, 1.0) if rig.probe else {}
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
        return PROGRAMS[rig.peer.type].main
    return rig.peer.parts[part].partition("::")[2]


def stall(replica: Replica, orders: tuple[str, ...], serve_s: float, served_s: float = 0.0) -> None:
    """Hangs the core: the first time after ``serve_s`` of service beyond those ``served_s`` that it
    has, then after a minute of it."""
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
        os.kill(rig.part(rig.peer.core).pid, signal.SIGSTOP)
        rig.load(CLIENTS, TOKENS)
        found = replica.seen(IncidentKind.STALL, since)
        seen_at = found.confirmed_at if found else None
        if found:
            begin = time.monotonic()
            left = _left(everyone, begin + ENDED_S)
        else:
            left = 0
            os.kill(rig.part(rig.peer.core).pid, signal.SIGCONT)
        book.note(
            "stall",
            how=how,
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
    elif name == "stall-young":
        stall(replica, ("busy", "idle", "busy", "idle"), YOUNG_S)
    else:
        first, second = ("busy", "idle") if name == "stall-busy" else ("idle", "busy")
        stall(replica, (first, second, first), OLD_S)
