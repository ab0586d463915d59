"""The files that the kernel has of one process, read without a trace in this one."""

from __future__ import annotations


def read(pid: int, name: str) -> bytes:
    """Return what ``/proc/PID/NAME`` holds; raise OSError where it cannot be read.

    pathlib interns each part of a path. With the numbers of processes and threads among them, the
    interpreter's table of such strings is built anew every few hundred samples, which takes a
    megabyte for a moment, and the heap may keep it.
    """
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
        return file.read()
