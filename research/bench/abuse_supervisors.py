"""Abuse of the supervisor itself: killed while it remediates, and told garbage by its engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

from bench.abuse_others import Others
from bench.abuse_replica import OTHER, Replica, restarts, started
from bench.abuse_scene import Played, exchange
from leaklab import replicas
from leaklab.replicas import Policy
from plimsoll_cli.local import runner
from plimsoll_cli.local.container import Container
from plimsoll_cli.local.plan import Plan

CHILD = "plimsoll_sidecar.main"
LIVES_S = 0.7
"""How long a supervisor lives between two kills: some samples, some of them in mid-action."""
IN_A_ROW = 4
"""Kills of the child by one launcher, whose pauses double; then the launcher dies as well."""
ENDS_S = 600.0
"""Each kill ends an observation, and the detector confirms growth that lasts for 110 s."""
LEAKY = Policy(growth_mib=32, warmup="2s", stall="30s", interval_s=0.25,
               ladder=("Trim", "WorkerRestart"))  # fmt: skip
FAULT = "mmap_growth:bytes_per_s=4Mi"
GARBAGE = (
    b"", b"<html>502</html>", b"[" * 1_000_000, b'{"x":' * 200_000, b"\xff" * 1000,
    b'{"state":"serving","epoch":"aa:1","version":"1","model":"m","uptime_s":1e999}',
    b'{"state":"serving","epoch":' + b"9" * 100_000 + b"}", b" " * (8 << 20),
    b"plimsoll 1e999\n" * 10_000,
)  # fmt: skip


async def killed(root: Path, model: Path, kills: int, limit_s: float) -> tuple[Played, Others, int]:
    """(what was played, the others, restarts beyond the one that the leak asks for)."""
    plan = replicas.engine("leaky", root, model, LEAKY, os.environ, FAULT)
    async with started(plan) as replica:
        others = Others(replica.scene(OTHER), streams=2, small=1)
        # A supervisor that is dead for a moment answers no scrape: that is not the engine's others.
        async with others.busy():
            before = await replica.epoch()
            played = Played()
            deadline = time.monotonic() + limit_s
            while not replica.incidents() and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            while played.attempts < kills and time.monotonic() < deadline:
                played.attempts += await _kill(replica, played.attempts)
            ends = time.monotonic() + ENDS_S
            while time.monotonic() < ends and not _ended(replica):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            after = await replica.epoch()
    for what in [name for name in others.failures if name.startswith(("scrape", "probe"))]:
        played.figures[f"{what.partition(':')[0]}s_unanswered_count"] = others.failures.pop(what)
    found = replica.incidents()
    played.figures["incidents_count"] = len(found)
    played.figures["incidents_resolved_count"] = sum("Resolved" in one for one in found)
    return played, others, max(0, restarts(before, after) - 1)


async def _kill(replica: Replica, number: int) -> int:
    """Kills the supervisor, or every fifth time its launcher; how many died."""
    await asyncio.sleep(LIVES_S)
    top = replica.local.supervisor.pid
    if top is None:
        return 0
    with contextlib.suppress(psutil.Error, OSError):
        tree = psutil.Process(top).children(recursive=True)
        child = [one for one in tree if CHILD in one.cmdline()]
        victims = child if (number + 1) % (IN_A_ROW + 1) else [psutil.Process(top)]
        if child and time.time() - child[0].create_time() > LIVES_S:
            for victim in victims:
                victim.send_signal(signal.SIGKILL)
            return 1
    return 0


def _ended(replica: Replica) -> bool:
    found = replica.incidents()
    return bool(found) and all("Resolved" in one for one in found)


class Liar(BaseHTTPRequestHandler):
    """Answers every request with the garbage of the moment; counts what would change something."""

    body = b""
    orders = 0

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(self.body)

    def do_POST(self) -> None:
        Liar.orders += 1
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        return


@contextlib.contextmanager
def _lying(ports: list[int]) -> Iterator[None]:
    servers = [ThreadingHTTPServer(("127.0.0.1", port), Liar) for port in ports]
    threads = [threading.Thread(target=server.serve_forever, daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


async def lied_to(root: Path, model: Path, each_s: float) -> tuple[Played, int, int]:
    """(what was played, scrapes and probes that failed, orders that it gave)."""
    plan: Plan = replicas.engine("lied-to", root, model, LEAKY, os.environ)
    Liar.orders = 0
    with runner._lock_run_dir(plan.root):
        runner._write_files(plan)
        supervisor = Container(plan.supervisor, lambda line: None)
        played, failed = Played(), 0
        with _lying([plan.layout.port, plan.layout.admin_port]):
            supervisor.start()
            try:
                await _answers(plan, 60)
                for body in GARBAGE:
                    Liar.body = body
                    played.attempts += 1
                    await asyncio.sleep(each_s)
                    failed += not await _answers(plan, 10)
            finally:
                await supervisor.stop(10)
    log = plan.supervisor.log.read_text(errors="replace")
    played.unclear += ["a traceback in the supervisor's log"] * log.count("Traceback")
    played.figures["supervisor_deaths_count"] = log.count("supervisor exited with status")
    return played, failed, Liar.orders


async def _answers(plan: Plan, limit_s: float) -> bool:
    """Whether probe and metrics port answer 200 within ``limit_s``."""
    deadline = time.monotonic() + limit_s
    wanted = ((plan.layout.probe_port, "/ready"), (plan.layout.metrics_port, "/metrics"))
    while time.monotonic() < deadline:
        answers = [
            await exchange(port, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode(), 5.0)
            for port, path in wanted
        ]
        if all(answer.status == 200 for answer in answers):
            return True
        await asyncio.sleep(0.2)
    return False
