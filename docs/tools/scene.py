"""A leak on this machine, watched by a real Prometheus: what pictures and long tests are made from.

``plimsoll run --local`` runs the leaky example, streams keep it busy until its incident has ended
by a worker restart, and Prometheus scrapes supervisor and engine all along.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from plimsoll_cli.local.runner import choose_free_ports

ROOT = Path(__file__).resolve().parents[2]
SCRAPE_S = 2
START_S, LEAK_S, SETTLE_S = 240.0, 240.0, 40.0
STREAMS = 2
TOKENS = 160
READY = re.compile(
    r"ready: the OpenAI API is at (http://\S+)/v1, and metrics are at (http://\S+)/metrics"
)


@dataclass(frozen=True)
class Prometheus:
    """The HTTP API of a running server."""

    url: str

    def query_range(self, expression: str, begin: float, end: float) -> list[dict[str, Any]]:
        """The series of an expression; ValueError with Prometheus' own message."""
        values = {"query": expression, "start": begin, "end": end, "step": SCRAPE_S}
        return self._get("query_range", values)["result"]  # type: ignore[no-any-return]

    def query(self, expression: str, at: float) -> list[dict[str, Any]]:
        return self._get("query", {"query": expression, "time": at})["result"]  # type: ignore[no-any-return]

    def _get(self, path: str, values: Mapping[str, Any]) -> dict[str, Any]:
        body = httpx.get(
            f"{self.url}/api/v1/{path}", params=values, timeout=30, trust_env=False
        ).json()
        if body["status"] != "success":
            raise ValueError(f"{body['error']}: {values['query']}")
        return body["data"]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Scene:
    """After the incident. Times are Unix seconds."""

    began: float
    ended: float
    supervisor: str
    engine: str
    run_dir: Path
    prometheus: Prometheus


@dataclass(frozen=True)
class Replica:
    """A service that runs here under load, and the Prometheus that scrapes it. ``began`` is in
    Unix seconds."""

    began: float
    supervisor: str
    engine: str
    run_dir: Path
    prometheus: Prometheus
    process: subprocess.Popen[bytes]

    def until(self, expression: str, limit_s: float) -> list[dict[str, Any]]:
        """The series of an expression once there are any. RuntimeError where the service ends or
        the time is over."""
        ask = self.prometheus.query
        found: list[dict[str, Any]] = _until(
            lambda: ask(expression, time.time()), limit_s, self.process, expression
        )
        return found


@contextlib.contextmanager
def replica(
    work: Path, manifest: Path, extra: Mapping[str, str] | None = None, tokens: int = TOKENS
) -> Iterator[Replica]:
    """Runs the service of ``manifest`` under :data:`STREAMS` clients until the caller is done.

    ``extra`` are further scrape targets, job -> ``host:port``.
    """
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((work / "run.log").open("w+"))
        command = [
            *(sys.executable, "-m", "plimsoll_cli.main", "run", "--local", "--no-view"),
            *("-f", str(manifest), "--run-dir", str(work / "run")),
        ]
        process = stack.enter_context(_process(command, log))
        text = _until(lambda: READY.search(_read(work / "run.log")), START_S, process)
        engine, supervisor = text.groups()
        targets = {"engine": _host(engine), "supervisor": _host(supervisor), **(extra or {})}
        server = stack.enter_context(prometheus(work, targets))
        began = time.time()
        ending = threading.Event()
        for number in range(STREAMS):
            client = threading.Thread(
                target=_ask, args=(engine, number, tokens, ending), daemon=True
            )
            client.start()
        stack.callback(ending.set)
        yield Replica(began, supervisor, engine, work / "run", server, process)


@contextlib.contextmanager
def leak(
    work: Path, extra: Mapping[str, str] | None = None, tokens: int = TOKENS
) -> Iterator[Scene]:
    """Runs the leak to its end, and keeps everything up while the caller looks at it.

    Each request asks for ``tokens`` tokens: the more, the slower the leak.
    """
    cured = 'sum(plimsoll_incidents_ended_total{phase="Resolved",outcome="WorkerRestart"}) > 0'
    with replica(work, ROOT / "examples" / "leaky.yaml", extra, tokens) as one:
        one.until(cured, LEAK_S)
        time.sleep(SETTLE_S)
        yield Scene(one.began, time.time(), one.supervisor, one.engine, one.run_dir, one.prometheus)


@contextlib.contextmanager
def prometheus(work: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """A server that scrapes ``targets`` (job -> ``host:port``) with the labels of a cluster."""
    binary = shutil.which("prometheus")
    if binary is None:
        raise FileNotFoundError("prometheus is missing: apt-get install prometheus")
    labels = {"namespace": "default", "service": "leaky", "pod": "leaky-0"}
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [target], "labels": labels}]}
        for job, target in targets.items()
    ]
    config = work / "prometheus.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": "5s"},
                "rule_files": [str(ROOT / "dashboards" / "alerts.yaml")],
                "scrape_configs": jobs,
            }
        )
    )
    (port,) = choose_free_ports([None])
    with (work / "prometheus.log").open("w") as log:
        command = [
            binary, f"--config.file={config}", f"--storage.tsdb.path={work / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=100y",
        ]  # fmt: skip
        with _process(command, log) as process:
            server = Prometheus(f"http://127.0.0.1:{port}")
            _until(lambda: _answers(f"{server.url}/-/ready"), 30.0, process)
            yield server


@contextlib.contextmanager
def _process(command: list[str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until(
    check: Callable[[], Any], limit_s: float, process: subprocess.Popen[bytes], what: str = ""
) -> Any:
    """The first true answer; RuntimeError where the process ends or the time is over."""
    deadline = time.monotonic() + limit_s
    while not (value := check()):
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r}: ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what or process.args!r}: not within {limit_s:.0f} s")
        time.sleep(0.5)
    return value


def _ask(engine: str, number: int, tokens: int, ending: threading.Event) -> None:
    """One client: completions of some hundred tokens, one after the other."""
    body = {"model": "leaky", "prompt": f"A line on a hull, {number}:", "max_tokens": tokens}
    with httpx.Client(timeout=60, trust_env=False) as client:
        while not ending.is_set():
            try:
                client.post(f"{engine}/v1/completions", json=body)
            except httpx.HTTPError:
                ending.wait(0.5)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _host(url: str) -> str:
    return url.removeprefix("http://")


def _read(path: Path) -> str:
    return path.read_text(errors="replace")
