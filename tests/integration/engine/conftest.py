"""Real engine processes on loopback, a real OpenAI client, and the tiny checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import openai
import psutil
import pytest

from tests.integration.engine.warm import WarmProcess

T = TypeVar("T")
TOKEN = "token-of-a-test"
MODEL = "tiny"
START_TIMEOUT_S = 600.0
"""For a machine that runs the whole suite beside it; an engine that ends is noticed at once."""


@dataclass
class Stream:
    """What a client saw of one stream."""

    text: str = ""
    finish_reason: str | None = None
    usage: Any = None
    times: list[float] = field(default_factory=list)

    def pause_s(self) -> float:
        """The longest wait between two pieces of text."""
        return max(b - a for a, b in zip(self.times, self.times[1:], strict=False))


class Engine:
    """One engine process and what tests do with it. A ``warm`` one has a short start."""

    def __init__(
        self,
        model: Path,
        run_dir: Path,
        *flags: str,
        inject: str = "",
        warm: bool = False,
        token: str | None = TOKEN,
    ) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        if token is not None and not (run_dir / "admin-token").exists():
            (run_dir / "admin-token").write_text(token)
        environment = dict(os.environ)
        environment.pop("PLIMSOLL_INJECT", None)
        if inject:
            environment["PLIMSOLL_INJECT"] = inject
            flags = (*flags, "--allow-inject")
        self.log = run_dir / "log"
        arguments = [
            "serve", "--model", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1",
            "--port", "0", "--admin-port", "0", "--run-dir", str(run_dir), "--device", "cpu",
            "--dtype", "float32", *flags,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | WarmProcess
        self.log.write_bytes(b"")
        if warm:
            self.process = WarmProcess(arguments, self.log, environment)
            return
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "plimsoll_engine", *arguments],
                stderr=log, stdout=log, env=environment,
            )  # fmt: skip

    def wait_ready(self) -> Self:
        self.until(lambda: self.ports() is not None, "engine.json", START_TIMEOUT_S)
        self.until(lambda: self.get("/ready")[0] == 200, "/ready", START_TIMEOUT_S)
        return self

    def ports(self) -> tuple[int, int] | None:
        try:
            content = json.loads((self.run_dir / "engine.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return content["port"], content["admin_port"]

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
        self.found(condition, what, timeout_s)

    def found(self, look: Callable[[], T], what: str, timeout_s: float = 20.0) -> T:
        """The first true value of ``look``: what is asserted of it was seen at one moment."""
        deadline = time.monotonic() + timeout_s
        while not (value := look()):
            assert self.process.poll() is None, f"engine ended:\n{self.log_tail()}"
            assert time.monotonic() < deadline, f"no {what} in {timeout_s} s:\n{self.log_tail()}"
            time.sleep(0.02)
        return value

    def log_tail(self) -> str:
        return self.log.read_text()[-4000:]

    @property
    def url(self) -> str:
        ports = self.ports()
        assert ports is not None
        return f"http://127.0.0.1:{ports[0]}"

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120.0
        )

    def get(self, path: str, timeout_s: float = 5.0) -> tuple[int, str]:
        return self.call("GET", self.url + path, None, {}, timeout_s)

    def post(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        headers = {"Content-Type": "application/json"}
        status, text = self.call("POST", self.url + path, body, headers, 120.0)
        return status, json.loads(text)

    def admin(
        self,
        method: str,
        path: str,
        body: Any = None,
        token: str | None = TOKEN,
        timeout_s: float = 15.0,
    ) -> tuple[int, Any]:
        ports = self.ports()
        assert ports is not None
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{ports[1]}/admin/v1{path}"
        status, text = self.call(method, url, data, headers, timeout_s)
        return status, text if path.startswith("/diagnostics") else json.loads(text)

    @staticmethod
    def call(
        method: str, url: str, data: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, str]:
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def status(self) -> dict[str, Any]:
        code, body = self.admin("GET", "/status")
        assert code == 200, body
        return dict(body)

    def begin(self, verb: str, operation_id: str, **fields: Any) -> dict[str, Any]:
        body = {"operation_id": operation_id, "expected_epoch": self.status()["epoch"], **fields}
        code, operation = self.admin("POST", f"/{verb}", body)
        assert code == 202, operation
        return dict(operation)

    def finish(self, operation_id: str, timeout_s: float = 30.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            _, operation = self.admin("GET", f"/operations/{operation_id}")
            if operation["state"] != "running":
                return dict(operation)
            assert time.monotonic() < deadline, operation
            time.sleep(0.02)

    def worker_pid(self) -> int:
        pids = (p["pid"] for p in self.status()["processes"] if p["role"] == "worker")
        return int(next(pids))

    def clean(self) -> None:
        """Idle, and every ledger agrees."""
        deadline = time.monotonic() + 10
        while True:
            code, audit = self.admin("GET", "/audit")
            assert code == 200, audit
            if audit["idle"] or time.monotonic() > deadline:
                assert audit["idle"], audit
                assert audit["findings"] == []
                return
            time.sleep(0.05)

    def stream(
        self,
        number: int,
        tokens: int,
        seeded: bool,
        first: threading.Barrier | None = None,
        **fields: Any,
    ) -> Stream:
        sampling = {"temperature": 0.9, "seed": number} if seeded else {"temperature": 0.0}
        seen = Stream()
        with self.client.completions.create(
            prompt=f"Ship number {number} sails", max_tokens=tokens, stream=True,
            stream_options={"include_usage": True}, **{"model": MODEL, **sampling, **fields},
        ) as chunks:  # fmt: skip
            for chunk in chunks:
                if chunk.usage is not None:
                    seen.usage = chunk.usage
                for choice in chunk.choices:
                    seen.text += choice.text
                    seen.finish_reason = choice.finish_reason or seen.finish_reason
                    seen.times.append(time.monotonic())
                if first is not None and len(seen.times) == 3:
                    first.wait(60)
        return seen

    @contextlib.contextmanager
    def streams(self, count: int, tokens: int, **fields: Any) -> Iterator[list[Future[Stream]]]:
        """``count`` streams, half greedy and half seeded, each of which has text on entry."""
        barrier = threading.Barrier(count + 1)
        with ThreadPoolExecutor(count) as pool:
            futures = [
                pool.submit(self.stream, n, tokens, n % 2 == 1, barrier, **fields)
                for n in range(count)
            ]
            barrier.wait(60)
            yield futures

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)

    def family(self) -> list[psutil.Process]:
        """The engine's children and theirs: those of the status but the frontend, the server for
        grammars, and the process that prepares bodies."""
        return psutil.Process(self.process.pid).children(recursive=True)


StartEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def shared_engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    one = Engine(tiny, tmp_path_factory.mktemp("run"), *SHARED_FLAGS)
    try:
        yield one.wait_ready()
    finally:
        one.end()


@pytest.fixture
def engine(request: pytest.FixtureRequest, start_engine: StartEngine) -> Engine:
    """One healthy engine for every test that leaves it healthy and idle.

    A test that runs once more gets one of its own: the shared one knows its operations' ids.
    """
    if getattr(request.node, "execution_count", 1) > 1:
        return start_engine(*SHARED_FLAGS, warm=False).wait_ready()
    shared: Engine = request.getfixturevalue("shared_engine")
    return shared


SHARED_FLAGS = ("--max-queued", "32")


@pytest.fixture
def start_engine(tiny: Path, tmp_path: Path) -> Iterator[StartEngine]:
    """Engines of a test's own: warm ones where it does not ask for the whole start."""
    started: list[Engine] = []

    def start(
        *flags: str,
        inject: str = "",
        run_dir: Path | None = None,
        model: Path = tiny,
        warm: bool = True,
        token: str | None = TOKEN,
    ) -> Engine:
        folder = run_dir or tmp_path / f"run{len(started)}"
        one = Engine(model, folder, *flags, inject=inject, warm=warm, token=token)
        started.append(one)
        return one

    yield start
    for one in started:
        one.end()
