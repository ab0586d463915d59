"""A person's terminal with ``plimsoll watch`` in it, beside real processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.ports import free_port

PROGRAM = Path(sys.executable).with_name("plimsoll")
LIMIT_S = 60.0


class Desk:
    """Engines and ``plimsoll watch``, which :meth:`end` ends.

    ``programs`` is a folder in which commands are found first.
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.port = free_port()
        self.environment = {
            **os.environ,
            "XDG_STATE_HOME": str(folder / "state"),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        }
        self.started: list[subprocess.Popen[bytes]] = []
        self.watching: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, out: Path | None = None) -> subprocess.Popen[bytes]:
        with (out or self.folder / "engine.out").open("ab") as log:
            process = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self.started.append(process)
        return process

    def watch(self, *arguments: str) -> subprocess.Popen[bytes]:
        process = self.start(str(PROGRAM), "watch", *arguments, out=self.out)
        self.watching.append(process)
        return process

    def told(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def until(self, seen: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not seen():
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.1)

    def answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health").status_code == 200
        except httpx.HTTPError:
            return False

    def page(self) -> str:
        found = re.search(r"web page of the supervisor: (\S+)", self.told())
        return found.group(1) if found else ""

    def state(self) -> str:
        """``/state``; empty while the supervisor starts again for a new configuration."""
        try:
            return httpx.get(f"{self.page()}state").text
        except httpx.HTTPError:
            return ""

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(PROGRAM), *arguments], env=self.environment, capture_output=True, text=True,
            timeout=60, check=True,
        )  # fmt: skip
        return done.stdout

    def end(self) -> None:
        for process in reversed(self.started):
            if process in self.watching and process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
