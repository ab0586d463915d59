"""What the probe costs a real engine: the time of the same work, asked and not asked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import urllib3

from bench.real_engines_replica import Replica
from plimsoll_api.supervision import Mode
from plimsoll_sidecar.signals.probe_reports import query_probes
from plimsoll_sidecar.signals.probes import REPORT_REQUEST
from tests.conformance.rig import Rig

PROMPTS, TOKENS = 32, 192
"""One request: so many sequences in step with each other, each of exactly so many tokens."""
WARM_REQUESTS = 3
RESERVE_S = 25.0
CORE_CPUS, OTHER_CPUS = 4, 4
"""Processors for the engine core alone, and for the engine's other processes."""
GRAPHS = {
    "mode": "NONE",
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 8, PROMPTS],
}
ARGUMENTS = ("--gpu-memory-utilization=0.6", f"--compilation-config={json.dumps(GRAPHS)}")
METHOD = (
    f"A pair is the same work twice: one request of {PROMPTS} sequences of exactly {TOKENS} "
    "tokens, sent when the one before has ended. In one half a supervisor asks the probe every "
    "second, in the other half another supervisor asks nothing; the one whose half it is not is "
    "stopped. Who begins alternates (ABBA). The ratio is of the seconds from request to answer. "
    "Every other engine has ended. The model has the shape of Qwen3 32B and decodes with CUDA "
    "graphs, as an engine does that has such a device for itself: of a small model without graphs, "
    "Python sets the pace, and on this machine that pace changed by 30 % from one half to the "
    "next. EngineCore, the engine's other processes, and all the rest have processors of their "
    "own. Every pair counts."
)


@dataclass(frozen=True)
class Pairs:
    """How many pairs at most, and the seconds before each half."""

    count: int
    settle_s: float = 0.5


def probe_cost(replica: Replica, pairs: Pairs) -> None:
    """Notes each pair, and the probe's own account of its cost at the end."""
    rig, book = replica.rig, replica.book
    supervisors = {
        asks: rig.supervise(f"pairs-{asks}", Mode.OBSERVE, asks) for asks in (True, False)
    }
    try:
        separate(rig)
        taken = max(_work_s(rig) for _ in range(WARM_REQUESTS))
        for number in range(pairs.count):
            if book.left_s() < 2 * (taken + pairs.settle_s) + RESERVE_S:
                break
            seconds: dict[bool, float] = {}
            for asks in (number % 2 == 0, number % 2 == 1):
                supervisors[asks].send_signal(signal.SIGCONT)
                supervisors[not asks].send_signal(signal.SIGSTOP)
                time.sleep(pairs.settle_s)
                seconds[asks] = _work_s(rig)
            book.note(
                "pair",
                number=number,
                asked_tok_s=round(PROMPTS * TOKENS / seconds[True], 2),
                unasked_tok_s=round(PROMPTS * TOKENS / seconds[False], 2),
            )
        _note_reports(replica)
    finally:
        for supervisor in supervisors.values():
            supervisor.send_signal(signal.SIGCONT)
            supervisor.terminate()
            supervisor.wait(30)


def separate(rig: Rig) -> None:
    """Gives EngineCore, the engine's other processes and the rest of this machine's processes that
    we started processors of their own, where there are enough."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < CORE_CPUS + OTHER_CPUS + 2:
        return
    core = rig.part(rig.peer.core).pid
    rest = set(cpus[CORE_CPUS + OTHER_CPUS :])
    _pin(core, set(cpus[:CORE_CPUS]))
    for pid in rig.processes() - {core}:
        _pin(pid, set(cpus[CORE_CPUS : CORE_CPUS + OTHER_CPUS]))
    for pid in (os.getpid(), *_children(os.getpid())):
        if pid not in rig.processes():
            _pin(pid, rest)


def _children(pid: int) -> Iterable[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


def _pin(pid: int, cpus: set[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cpus)


def _work_s(rig: Rig) -> float:
    """Seconds that the fixed work took. RuntimeError where the engine did less."""
    body = {
        "model": "tiny",
        "prompt": ["the water line " * 8] * PROMPTS,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    begin = time.monotonic()
    answer = urllib3.request("POST", f"{rig.url}/v1/completions", json=body, timeout=120.0)
    seconds = time.monotonic() - begin
    rig.answers[str(answer.status)] += 1
    made = json.loads(answer.data).get("usage", {}).get("completion_tokens")
    if made != PROMPTS * TOKENS:
        raise RuntimeError(f"{made} tokens instead of {PROMPTS * TOKENS}: {answer.data[:300]!r}")
    return seconds


def _note_reports(replica: Replica) -> None:
    for process in list(replica.rig.processes()):
        asked = query_probes(replica.rig.folder / "probe", [process], REPORT_REQUEST, 1.0)
        if answer := asked.get(process):
            report = json.loads(answer)
            kept = {key: report.get(key) for key in ("engine", "devices", "cost_s", "age_s")}
            replica.book.note("report", process=process, **kept)
