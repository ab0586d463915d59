"""Read the stacks of processes that do not answer: through a signal to the probe, or with py-spy.

py-spy needs the same user and ``kernel.yama.ptrace_scope`` 0, or the capability SYS_PTRACE.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from plimsoll_api.files import open_regular_file
from plimsoll_sidecar.signals.process_table import (
    ProcessId,
    is_running,
    read_proc_file,
    send_signal,
)

log = logging.getLogger(__name__)

# The probe then writes the stacks with faulthandler (plimsoll_probe.hung).
STACKS_SIGNAL = 43
# faulthandler needs milliseconds, wherever the process hangs.
SIGNAL_WAIT_S = 0.5
MAX_OUTPUT_BYTES = 1 << 20
PY_SPY = "py-spy"
# The timeout covers all processes. Each takes about one second.
PY_SPY_TIMEOUT_S = 10.0


def read_stacks_by_signal(folder: Path, processes: Iterable[ProcessId]) -> dict[int, bytes]:
    """Return the stacks of each process whose probe handles the signal, by PID."""
    sent: dict[int, int] = {}
    for process in processes:
        size = _read_file_size(folder / f"{process.pid}.stacks")
        if size is None or not has_signal_handler(process.pid):
            continue
        with contextlib.suppress(OSError):
            send_signal(process, STACKS_SIGNAL)
            sent[process.pid] = size
    if not sent:
        return {}
    time.sleep(SIGNAL_WAIT_S)
    texts = {pid: _read_file_from(folder / f"{pid}.stacks", size) for pid, size in sent.items()}
    return {pid: text for pid, text in texts.items() if text}


def read_stacks_by_py_spy(processes: Iterable[ProcessId]) -> dict[int, bytes]:
    """Return the stacks that py-spy reads, by PID; empty without py-spy or permission."""
    program = shutil.which(PY_SPY)
    stacks: dict[int, bytes] = {}
    deadline = time.monotonic() + PY_SPY_TIMEOUT_S
    for process in processes if program is not None else ():
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not is_running(process):
            continue
        text, status = _run_program(
            [str(program), "dump", "--nonblocking", "--pid", str(process.pid)], remaining_s
        )
        if status == 0 and text:
            stacks[process.pid] = text
        else:
            answer = text[-500:].decode(errors="replace").strip() or "no output"
            log.info("py-spy cannot read process %d: %s", process.pid, answer)
    return stacks


def _run_program(command: list[str], timeout_s: float) -> tuple[bytes, int]:
    # If the program cannot be started, the result is the error and -1.
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
        text = running.stdout.read(MAX_OUTPUT_BYTES)
        if len(text) == MAX_OUTPUT_BYTES:
            running.kill()  # the rest of its output is not read
        status = running.wait()
        timer.cancel()
    return text, 0 if len(text) == MAX_OUTPUT_BYTES else status


def has_signal_handler(pid: int) -> bool:
    """Report whether the process handles :data:`STACKS_SIGNAL`, which would otherwise end it."""
    try:
        for line in read_proc_file(pid, "status").splitlines():
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    except (OSError, ValueError, IndexError):
        pass
    return False


def _read_file_size(path: Path) -> int | None:
    try:
        seen = path.lstat()
    except OSError:
        return None
    return seen.st_size if stat.S_ISREG(seen.st_mode) else None


def _read_file_from(path: Path, offset: int) -> bytes:
    # The engine can write to the folder, so the path may have become a link or a pipe.
    try:
        file = open_regular_file(path)
    except OSError:
        return b""
    if file is None:
        return b""
    with file:
        file.seek(offset)
        return file.read(MAX_OUTPUT_BYTES) or b""
