"""Signals to the engine's frontend, for when it does not answer any more.

A process is fenced by its start time: a PID that was given to another process is never signalled.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec

TERM_GRACE_S = 5.0
"""A frontend that hangs does not run its handler; one that is only slow can still end cleanly."""
KILL_WAIT_S = 5.0


class ProcessId(msgspec.Struct, frozen=True):
    """``started`` is the start time in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    started: int


def identify(pid: int) -> ProcessId | None:
    """The process that has this PID now; None where there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in "ZX":
        return None
    return ProcessId(pid, int(fields[19]))


def age_s(process: ProcessId) -> float:
    """Seconds since the process started."""
    ticks = os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / ticks)


def end(process: ProcessId, grace_s: float = TERM_GRACE_S) -> str | None:
    """SIGTERM, a grace, SIGKILL. None when the process is gone, else why it is not."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_WAIT_S)):
        if identify(process.pid) != process:
            return None
        try:
            owner = Path(f"/proc/{process.pid}").stat().st_uid
            if owner != os.geteuid():
                return f"process {process.pid} has UID {owner}, this supervisor {os.geteuid()}"
            os.kill(process.pid, number)
        except ProcessLookupError:
            return None
        except OSError as error:
            return f"process {process.pid}: {error.strerror}"
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if identify(process.pid) != process:
                return None
            time.sleep(0.05)
    return f"process {process.pid} is still there after SIGKILL"
