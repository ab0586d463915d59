"""Diagnostics of an engine that is not ours: of each of its processes, the suspected ones first.

Without a probe there are stacks alone, where py-spy can read them.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_api.admin import Diagnostic, ProcessMemory
from plimsoll_sidecar.govern.command import Command
from plimsoll_sidecar.signals.probe.probes import Probes
from plimsoll_sidecar.signals.process import stacks
from plimsoll_sidecar.signals.process.process_table import identify


def gather(
    kind: Diagnostic, command: Command, processes: Sequence[ProcessMemory], probes: Probes
) -> bytes | None:
    """Return the texts of all processes that have one; None where none has.

    A process that hangs and cannot answer is sent a signal only where it is to be ended anyway.
    """
    texts: dict[int, bytes] = dict(probes.texts(kind))
    if kind is Diagnostic.STACKS:
        silent = [p for p in processes if p.pid not in texts]
        known = [identity for p in silent if (identity := identify(p.pid)) is not None]
        if command.stalled and probes.folder is not None:
            texts |= stacks.by_signal(probes.folder, known)
        texts |= stacks.by_py_spy(p for p in known if p.pid not in texts)
    answered = [p for p in command.suspected_first(processes) if p.pid in texts]
    parts = [_part(process, texts[process.pid], command) for process in answered]
    return b"\n".join(parts) if parts else None


def _part(process: ProcessMemory, text: bytes, command: Command) -> bytes:
    suspected = ", suspected" if process.label == command.process else ""
    return f"==== {process.label}, process {process.pid}{suspected}\n".encode() + text + b"\n"
