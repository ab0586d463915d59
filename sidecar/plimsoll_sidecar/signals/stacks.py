"""Stacks of processes that do not speak: by the signal that a probe handles, or by py-spy.

py-spy is used where it is on the supervisor's PATH and the kernel lets it read the process: the
same user and ``kernel.yama.ptrace_scope`` 0, or the capability SYS_PTRACE. It reads from outside
and does not stop the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from plimsoll_sidecar.signals.process_table import ProcessId, lives, send
from plimsoll_sidecar.signals.process_table import read as read_file

log = logging.getLogger(__name__)

SIGNAL = 43
"""What the probe lets faulthandler handle (plimsoll_probe.hung)."""
WRITE_S = 0.5
"""faulthandler needs milliseconds, whatever the process hangs in."""
MAX_BYTES = 1 << 20
PY_SPY = "py-spy"
PY_SPY_S = 10.0
"""For all processes together: one takes a second."""


def by_signal(folder: Path, processes: Iterable[ProcessId]) -> dict[int, bytes]:
    """Return what each process wrote of its stacks, where its probe handles the signal."""
    sent: dict[int, int] = {}
    for process in processes:
        size = _size(folder / f"{process.pid}.stacks")
        if size is None or not handles(process.pid):
            continue
        with contextlib.suppress(OSError):
            send(process, SIGNAL)
            sent[process.pid] = size
    if not sent:
        return {}
    time.sleep(WRITE_S)
    texts = {pid: _read(folder / f"{pid}.stacks", size) for pid, size in sent.items()}
    return {pid: text for pid, text in texts.items() if text}


def by_py_spy(processes: Iterable[ProcessId]) -> dict[int, bytes]:
    """Return what py-spy reads of each process; empty where it is not there or may not."""
    program = shutil.which(PY_SPY)
    found: dict[int, bytes] = {}
    deadline = time.monotonic() + PY_SPY_S
    for process in processes if program is not None else ():
        left = deadline - time.monotonic()
        if left <= 0 or not lives(process):
            continue
        text, status = _run(
            [str(program), "dump", "--nonblocking", "--pid", str(process.pid)], left
        )
        if status == 0 and text:
            found[process.pid] = text
        else:
            answer = text[-500:].decode(errors="replace").strip() or "no answer"
            log.info("py-spy of process %d: %s", process.pid, answer)
    return found


def _run(command: list[str], timeout_s: float) -> tuple[bytes, int]:
    """Return what a program says, at most 1 MiB of it, and its exit status.

    OSError is an answer, too.
    """
    try:
        running = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        return str(error).encode(), -1
    with running:
        assert running.stdout is not None
        timer = threading.Timer(timeout_s, running.kill)
        timer.start()
        text = running.stdout.read(MAX_BYTES)
        if len(text) == MAX_BYTES:
            running.kill()  # it would wait for a reader
        status = running.wait()
        timer.cancel()
    return text, 0 if len(text) == MAX_BYTES else status


def handles(pid: int, number: int = SIGNAL) -> bool:
    """Whether the process has a handler for the signal, which would end it otherwise."""
    try:
        for line in read_file(pid, "status").splitlines():
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError, IndexError):
        pass
    return False


def _size(path: Path) -> int | None:
    try:
        seen = path.lstat()
    except OSError:
        return None
    return seen.st_size if stat.S_ISREG(seen.st_mode) else None


def _read(path: Path, begin: int) -> bytes:
    """Return what was appended since.

    The folder is the engine's: it may be a link or a pipe by now.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with open(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        file.seek(begin)
        return file.read(MAX_BYTES) or b""
