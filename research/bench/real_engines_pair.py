"""Two replicas of a real engine behind a balancer: one leaks again and again, the other one serves.

Then a stall of the replica that has served all the while, and kills of every process of both.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import urllib3

from bench.real_engines_balancer import Backend, Balancer
from bench.real_engines_cases import ENGINE_ALONE, WARM_S, eager, kill, leak_once, stall
from bench.real_engines_replica import Book, Replica, told
from plimsoll_sidecar.act.readiness import is_ready
from tests.conformance.peers import Peer
from tests.conformance.rig import START_S, Rig, until

CLIENTS, TOKENS, PAUSE_S = 3, 24, 0.2
ANSWER_S = 90.0
LAPS = 6
"""Leak restarts at most."""
LAP_S = 200.0
"""Of one: warm-up, detection, drain and start."""
KILLS_S = 180.0
"""Kept for kills at the end."""
PAIRS = {"pair": "idle", "pair-2": "busy", "pair-3": "idle"}
"""The cases, and how the replica that does not leak is stalled at last."""


class Clients:
    """Ask the balancer for completions, each over a connection of its own. ``answers`` counts HTTP
    statuses, 0 for a connection that broke."""

    def __init__(self, port: int) -> None:
        self.answers: Counter[str] = Counter()
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(ANSWER_S)

    def _ask(self) -> None:
        body = {"model": "tiny", "prompt": "the water line", "max_tokens": TOKENS}
        while not self._ending.wait(PAUSE_S):
            with urllib3.PoolManager(retries=False) as http:
                try:
                    answer = http.request(
                        "POST", self._url, timeout=ANSWER_S,
                        body=json.dumps(body | {"ignore_eos": True}),
                        headers={"Content-Type": "application/json", "Connection": "close"},
                    )  # fmt: skip
                    self.answers[str(answer.status)] += 1
                except urllib3.exceptions.HTTPError:
                    self.answers["0"] += 1


def pair(
    case: str,
    peer: Peer,
    rows: Path,
    probe: Path,
    ends_at: float,
    laps: int = LAPS,
    victims: Sequence[str] = (),
) -> None:
    """Both replicas, from their start to their end; each has rows of its own. ``laps`` leaks at
    most; what time they leave is for kills of ``victims`` in turn, or of every part."""
    replicas = []
    for name in (f"{case}-a", f"{case}-b"):
        (rows / name).mkdir(parents=True, exist_ok=True)
        rig = Rig(peer, rows / name, ENGINE_ALONE, probe, eager(peer), _environment(rows / name))
        replicas.append(Replica(rig, Book(rows / f"{name}.jsonl", (), ends_at)))
    leaking, serving = replicas
    parts = ("frontend", *peer.parts)
    turn = list(PAIRS).index(case) % len(parts)
    parts = parts[turn:] + parts[:turn]
    try:
        for replica in replicas:
            replica.rig.start()
        for replica in replicas:
            replica.book.step(replica.ready)
        leaking.book.step(lambda: leaks(leaking, serving, parts, laps))
        serving.book.step(lambda: stall(serving, (PAIRS[case],), 5.0, serving.age_s()))
        both = [threading.Thread(target=_kills, args=(one, victims or parts)) for one in replicas]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
    finally:
        for replica in replicas:
            replica.rig.end()
        (rows / f"{case}.ended").touch()


def leaks(leaking: Replica, serving: Replica, parts: Sequence[str], laps: int) -> None:
    """Leaks in one process after the other, while clients ask both replicas."""
    balancer = Balancer([_backend(replica.rig) for replica in (leaking, serving)])
    clients = None
    try:
        until(lambda: balancer.ready == 2, START_S, "two ready replicas")
        clients = Clients(balancer.port)
        for part in itertools.islice(itertools.cycle(parts), laps):
            if leaking.book.left_s() < LAP_S + KILLS_S:
                break
            begin, before = time.monotonic(), Counter(clients.answers)
            leaking.stays_healthy(lambda: _serves(leaking, WARM_S))
            cured = leak_once(leaking, part, "host")
            if cured:
                until(lambda: balancer.ready == 2, START_S, "two ready replicas")
            serving.stays_healthy(lambda: None, since=begin)
            serving.book.note(
                "leak_restart",
                part=part,
                restarted=cured,
                answers=dict(clients.answers - before),
                incidents=[told(one) for one in serving.rig.incidents()],
            )
            if not cured:
                break
    finally:
        if clients is not None:
            clients.end()
        balancer.close()


def _serves(replica: Replica, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert replica.rig.serving(), replica.rig.log()
        time.sleep(1.0)


def _kills(replica: Replica, parts: Sequence[str]) -> None:
    replica.rig.rest()
    while replica.book.left_s() > 60 and not replica.book.step(lambda: kill(replica, tuple(parts))):
        time.sleep(5.0)


def _backend(rig: Rig) -> Backend:
    """Ready as its pod would be: the engine's and the supervisor's probes both say so."""
    state = str(rig.folder / "state")
    return Backend(rig.port, lambda: is_ready(state) and _answers(rig.url))


def _answers(url: str) -> bool:
    with urllib3.PoolManager(retries=False) as http:
        try:
            return http.request("GET", f"{url}/v1/models", timeout=5.0).status == 200
        except urllib3.exceptions.HTTPError:
            return False


def _environment(folder: Path) -> dict[str, str]:
    return {"VLLM_CACHE_ROOT": str(folder / "cache")}
