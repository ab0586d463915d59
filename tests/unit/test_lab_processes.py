"""The lab's daemons: when one of them has ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.lab.kube import eventually
from tests.lab.processes import alive

OUTLIVED = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
"""The first thread ends, and the other one still holds what the process has open."""


def test_a_process_is_alive_until_its_last_thread_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", OUTLIVED])
    stat = Path(f"/proc/{process.pid}/stat")
    try:
        eventually(lambda: stat.read_text().rpartition(") ")[2][0] == "Z", "a zombie", 120)
        assert alive(process.pid)
    finally:
        process.kill()
    eventually(lambda: not alive(process.pid), "it has ended", 120)
