"""What a diagnosis costs a real engine: the time of the same request, with one and without."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import urllib3

from bench.real_engines_replica import Replica
from plimsoll_sidecar.record.diagnostics import GROWTH_DIAGNOSTICS
from plimsoll_sidecar.signals.probes import Probes
from plimsoll_sidecar.signals.resident_memory import read_resident_memory
from tests.conformance.rig import Rig

TOKENS = 1200
"""Of the measured request: it lasts longer than a diagnosis, which traces for 5 s."""
STARTS_S = 0.3
"""From the start of the request to the start of the diagnosis."""
HEALTH_PAUSE_S, HEALTH_TIMEOUT_S = 0.05, 1.0
"""The timeout is that of a probe of the kubelet whose manifest says nothing."""
REST_S = 10.0
RESERVE_S = 45.0


def diagnosis_cost(replica: Replica, count: int = 20) -> None:
    """Note the duration of ``count`` pairs of requests: one in which the processes are trimmed and
    diagnosed as before a restart, and one without. Which comes first alternates."""
    rig, book = replica.rig, replica.book
    probes = Probes(rig.folder / "probe")
    until_reported = time.monotonic() + 10.0
    while time.monotonic() < until_reported:
        probes.add_reports(rig.status())
        time.sleep(0.5)
    health = _Health(rig)
    before = _read_anonymous_bytes(rig)
    try:
        for number in range(count):
            if book.left_s() < RESERVE_S:
                break
            pair: dict[str, Any] = {}
            for diagnosed in (number % 2 == 0, number % 2 == 1):
                health.begin()
                work = threading.Thread(target=_diagnose, args=(probes, pair))
                if diagnosed:
                    work.start()
                took, longest_gap = _stream_once(rig)
                if diagnosed:
                    work.join()
                key = "diagnosed" if diagnosed else "undisturbed"
                pair |= {f"{key}_s": took, f"{key}_gap_s": longest_gap}
                pair |= {f"{key}_{name}": value for name, value in health.end().items()}
                time.sleep(1.0)
            book.note("diagnosis", number=number, **pair)
        time.sleep(REST_S)
        grown = {pid: size - before.get(pid, 0) for pid, size in _read_anonymous_bytes(rig).items()}
        book.note("diagnosis-memory", grown_bytes=grown, before_bytes=before)
    finally:
        health.stop()


def _diagnose(probes: Probes, found: dict[str, Any]) -> None:
    """Trim, then collect all that a growing engine is asked for; note the seconds and sizes."""
    time.sleep(STARTS_S)
    begin = time.monotonic()
    trimmed = probes.trim(is_idle=False)
    found["trimmed_processes"] = trimmed.processes if trimmed else 0
    for kind in GROWTH_DIAGNOSTICS:
        found[f"{kind.value}_chars"] = {
            pid: len(text) for pid, text in probes.read_texts(kind).items()
        }
    found["diagnosis_s"] = round(time.monotonic() - begin, 3)


def _stream_once(rig: Rig) -> tuple[float, float]:
    """Return the duration of a streamed request, and its longest wait for a token, in seconds."""
    body = {
        "model": "tiny", "prompt": "the water line", "max_tokens": TOKENS, "ignore_eos": True,
        "stream": True, "temperature": 0,
    }  # fmt: skip
    begin = last = time.monotonic()
    longest = 0.0
    with urllib3.PoolManager(retries=False) as http:
        answer = http.request(
            "POST", f"{rig.url}/v1/completions", timeout=60.0, body=json.dumps(body),
            headers={"Content-Type": "application/json"}, preload_content=False,
        )  # fmt: skip
        for _ in answer.stream(1 << 12):
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        answer.release_conn()
    rig.answers[str(answer.status)] += 1
    return round(last - begin, 4), round(longest, 4)


def _read_anonymous_bytes(rig: Rig) -> dict[int, int]:
    """Return the anonymous memory of each process of the engine, in bytes by PID."""
    sizes = {pid: read_resident_memory(pid) for pid in rig.processes()}
    return {pid: size.anon for pid, size in sizes.items() if size is not None}


class _Health:
    """Asks ``/health`` again and again in a thread."""

    def __init__(self, rig: Rig) -> None:
        self._url = f"{rig.url}/health"
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._seconds: list[float] = []
        self._failed = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Forget the answers so far."""
        with self._lock:
            self._seconds, self._failed = [], 0

    def end(self) -> dict[str, float | int]:
        """Return the slowest answer in seconds, and how many there were and failed."""
        with self._lock:
            slowest = max(self._seconds, default=0.0)
            return {
                "health_s": round(slowest, 4),
                "health_count": len(self._seconds),
                "health_failed": self._failed,
            }

    def stop(self) -> None:
        """End the thread."""
        self._ending.set()
        self._thread.join(HEALTH_TIMEOUT_S + 1.0)

    def _run(self) -> None:
        with urllib3.PoolManager(retries=False) as http:
            while not self._ending.wait(HEALTH_PAUSE_S):
                begin = time.monotonic()
                try:
                    failed = http.request("GET", self._url, timeout=HEALTH_TIMEOUT_S).status != 200
                except urllib3.exceptions.HTTPError:
                    failed = True
                with self._lock:
                    self._seconds.append(time.monotonic() - begin)
                    self._failed += failed
