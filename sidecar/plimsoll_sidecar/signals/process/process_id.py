"""One process, by its PID and its start time, so that a reused PID is never mistaken for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import msgspec

from plimsoll_sidecar.signals.process import proc_file


class ProcessId(msgspec.Struct, frozen=True):
    """``started`` is the start time in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    started: int


def identify(pid: int) -> ProcessId | None:
    """Return the process that has this PID now; None where there is none, or only a zombie."""
    try:
        stat = proc_file.read(pid, "stat")  # a name is in no certain encoding
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return ProcessId(pid, int(fields[19]))


def age_s(process: ProcessId) -> float:
    """Seconds since the process started."""
    ticks = os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / ticks)


def send(
    process: ProcessId,
    number: int,
    allowed: Callable[[ProcessId], bool] = lambda process: True,
) -> None:
    """Send a signal to this process and no other.

    Its descriptor stays its own, whichever process gets its PID. Raises ``ProcessLookupError``
    where it has ended.
    """
    descriptor = os.pidfd_open(process.pid)
    try:
        if identify(process.pid) == process and allowed(process):
            signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)
