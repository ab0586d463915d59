"""A real engine process for a benchmark, its admin API, and streams whose every piece is timed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plimsoll_api.names import TOKEN_FILE

TOKEN = "bench"
START_TIMEOUT_S = 300.0


@dataclass
class Stream:
    """Monotonic seconds at which each piece of text came."""

    times: list[float] = field(default_factory=list)
    error: str | None = None
    tokens: int | None = None
    """Of a stream that ended as it should."""

    def gap(self, since: float) -> tuple[float, float]:
        """(length, end) of the longest wait for a piece that ended after ``since``."""
        pairs = [(b - a, b) for a, b in zip(self.times, self.times[1:], strict=False) if b > since]
        return max(pairs, default=(0.0, since))

    def first(self, since: float) -> float:
        """When the first piece after ``since`` came."""
        return min(time for time in self.times if time > since)


async def stream(port: int, prompt: list[int], tokens: int, seen: Stream) -> None:
    """One completion; each piece's time goes to ``seen``. Ends early where it is cancelled."""
    body = json.dumps({
        "model": "bench", "prompt": prompt, "max_tokens": tokens, "stream": True,
        "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json",
                f"Content-Length: {len(body)}", "", "")  # fmt: skip
        writer.write("\r\n".join(head).encode() + body)
        async for line in reader:
            if line.startswith((b'data: {"error"', b"HTTP/1.1 4")):
                seen.error = line.decode()
            elif b'"choices":[]' in line:
                seen.tokens = json.loads(line[6:])["usage"]["completion_tokens"]
            elif line.startswith(b"data: {"):
                seen.times.append(time.monotonic())
            elif line.startswith(b"data: [DONE]"):
                return
    finally:
        writer.close()


class Engine:
    """One engine process on loopback with ports of its own."""

    def __init__(self, model: Path, run_dir: Path, *flags: str) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / TOKEN_FILE).write_text(TOKEN)
        (run_dir / "engine.json").unlink(missing_ok=True)
        self.log = run_dir / "log"
        self.began = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "plimsoll_engine", "serve", "--model", str(model),
                 "--served-model-name", "bench", "--host", "127.0.0.1", "--port", "0",
                 "--admin-port", "0", "--run-dir", str(run_dir), *flags],
                stdout=log, stderr=log, env=os.environ,
            )  # fmt: skip

    def wait_ready(self) -> float:
        """Seconds from the start of the process to the first 200 of /ready."""
        deadline = self.began + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError, ValueError, KeyError):
                ports = json.loads((self.run_dir / "engine.json").read_bytes())
                self.port, self.admin_port = ports["port"], ports["admin_port"]
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5):
                    return time.monotonic() - self.began
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the engine is not ready:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.01)

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.admin_port}/admin/v1{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {TOKEN}"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)

    async def restart(self, number: int, **fields: Any) -> tuple[float, dict[str, Any]]:
        """(when it was asked for, the finished operation)."""
        name = f"restart-{os.getpid()}-{number}"
        epoch = (await asyncio.to_thread(self.admin, "GET", "/status"))["epoch"]
        body = {"operation_id": name, "expected_epoch": epoch, **fields}
        asked = time.monotonic()
        operation = await asyncio.to_thread(self.admin, "POST", "/restart", body)
        while operation["state"] == "running":
            await asyncio.sleep(0.02)
            operation = await asyncio.to_thread(self.admin, "GET", f"/operations/{name}")
        if operation["state"] != "succeeded":
            raise RuntimeError(f"{operation}\n{self.log.read_text()[-4000:]}")
        return asked, dict(operation)

    async def stream(self, prompt: list[int], tokens: int, seen: Stream) -> None:
        """:func:`stream` of this engine."""
        await stream(self.port, prompt, tokens, seen)

    def stages(self) -> list[dict[str, Any]]:
        """The lines of the log that say how long each stage of a start took."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line[:1] == "{"]
        return [line for line in lines if "stages_s" in line or "import_s" in line]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


@contextlib.contextmanager
def running(model: Path, run_dir: Path, *flags: str) -> Iterator[Engine]:
    engine = Engine(model, run_dir, *flags)
    try:
        yield engine
    finally:
        engine.stop()
