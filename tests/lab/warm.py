"""The operator, forked off a process that has imported it: its imports take 1.2 s of CPU, and the
tests start some seventy.

A fork shares memory with where it came from. What measures the operator's own starts it afresh.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.lab.processes import die_with_parent

MODULES = ["plimsoll_operator.main", "plimsoll_operator.admission.server"]
_context = multiprocessing.get_context("forkserver")
# With __main__, because otherwise each child would import pytest.
_context.set_forkserver_preload(["__main__", *MODULES])


class WarmProcess:
    """``plimsoll-operator`` with ``arguments``, its output in ``log``; as ``subprocess.Popen``."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._process: ForkServerProcess = _context.Process(
            target=_operator, args=(list(arguments), str(log), dict(os.environ)), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit status; AssertionError where it runs on after ``timeout`` seconds."""
        self._process.join(timeout)
        status = self._process.exitcode
        assert status is not None, f"operator {self.pid} runs on after {timeout:.0f} s"
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal to it; nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to it."""
        self._process.kill()


def _operator(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    """Become what ``python -m plimsoll_operator.main`` is."""
    from plimsoll_operator.main import main

    die_with_parent()  # the fork server, which ends with the tests unless a child holds its pipe
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.exit(main(arguments))
