"""No process of a test run outlives the run, however it ends: by Ctrl-C, a kill or a crash.

Tests end the processes that they start, but an interrupted run has no time for that, and a process
with a session of its own gets no signal. So all children carry the run's id in their environment,
and a guard process waits for the end of the run and ends all that still carry the id:

    python tests/leftovers.py PID ID
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "PLIMSOLL_TEST_RUN"
GRACE_S = 5.0
"""Time for processes that end by themselves after the run."""
PATIENCE_S = 30.0
"""A process in the kernel's hands cannot be killed at once."""


def watch_over_this_run() -> None:
    """Mark what this process starts from now on, and start the guard."""
    run = uuid.uuid4().hex
    command = [sys.executable, "-S", __file__, str(os.getpid()), run]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, cwd="/")
    os.environ[VARIABLE] = run


def marked(run: str) -> Iterator[tuple[int, str]]:
    """Process id and command line of all that carry the run's id."""
    mark = f"{VARIABLE}={run}".encode()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                text = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ")
                yield int(entry), text.decode(errors="replace")[:100]


def main() -> None:
    """Wait for the run's end, then end what it left, and say so."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
    grace = time.monotonic() + GRACE_S
    while any(marked(sys.argv[2])) and time.monotonic() < grace:
        time.sleep(0.2)
    said: set[int] = set()
    end = time.monotonic() + PATIENCE_S
    while (left := dict(marked(sys.argv[2]))) and time.monotonic() < end:
        for pid, command in left.items():
            if pid not in said:
                said.add(pid)
                print(f"tests left behind, and now ended: {pid} {command}", file=sys.stderr)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
