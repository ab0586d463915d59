"""The probes inside an engine that does not speak our protocol.

They complete what can be seen of it from outside: each process's allocators, torch's on each
device, and the engine's caches with their bounds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from plimsoll_api.admin import Capability, Diagnostic, Number, ProcessMemory, Role, Status
from plimsoll_api.decoding import Malformed, decode
from plimsoll_api.supervisor_config import PROBE_DIR_ENV
from plimsoll_sidecar.signals import probe_reports
from plimsoll_sidecar.signals.probe_reports import TEXT_BYTES, Exchange, Report, ask_all
from plimsoll_sidecar.signals.process_table import ProcessId, children, identify, lives
from plimsoll_sidecar.signals.resident_memory import MAX_PROCESSES

REPORT_S = 0.3
"""For the reports of all processes, within a sample; they take a millisecond."""
LATE_S = 10.0
"""How long an answer is waited for in later samples, which then do not wait for that process: it
may hang. One that computes without a pause, on a busy machine, needs more than :data:`REPORT_S`."""
AGAIN_S = 5.0
"""Until a process that did not answer is asked again."""
OLD_S = 30.0
"""How long a report stands: of a process that answers no more, or with an old one."""
TEXT_S = 10.0
STACKS_S = 3.0
"""They take milliseconds, and a process that hangs with Python's lock never answers."""
TRACE_S = 5.0
TRIM_S = 5.0
REPORT = b'{"do":"report"}\n'


@dataclass
class _Known:
    """``at`` is when ``report`` was made; no report is None.

    Not asked before ``next``. An answer is due since ``asked``, None where none is; ``prompt`` says
    that the last one came at once.
    """

    report: Report | None = None
    at: float = 0.0
    next: float = 0.0
    asked: float | None = None
    prompt: bool = True


class _Text(msgspec.Struct):
    text: str


class _Trim(msgspec.Struct):
    steps: list[str]
    device_before: Number | None = None
    device_after: Number | None = None


class Trimmed(msgspec.Struct, frozen=True):
    """How many processes trimmed themselves, and the bytes that torch gave back.

    They are of their devices; None where it was not asked to, or is not in use.
    """

    processes: int
    device: int | None = None


class Probes:
    """``folder`` holds the sockets; without one nothing is asked.

    :meth:`complete` belongs to one thread at a time; the other calls may come from another.
    """

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._known: dict[ProcessId, _Known] = {}
        self._exchange = Exchange()
        self._answering: tuple[ProcessId, ...] = ()

    @classmethod
    def from_environment(cls) -> Probes:
        """Return the probes of the pod's shared directory; none where the variable is not set."""
        folder = os.environ.get(PROBE_DIR_ENV)
        return cls(Path(folder) if folder else None)

    def complete(self, status: Status) -> Status:
        """Return ``status`` with what the probes of its processes and their descendants say.

        As it is where none answers.
        """
        if self._folder is None:
            return status
        family = _family(status.processes)
        reports = self._read(self._folder, family)
        self._answering = tuple(reports)
        if not reports:
            return status
        by_pid = {identity.pid: report for identity, report in reports.items()}
        processes = [
            probe_reports.account(process, by_pid[process.pid])
            if process.pid in by_pid
            else process
            for process in family.values()
        ]
        roles = {process.pid: process.role for process in processes}
        accounts = [(roles[pid], report) for pid, report in by_pid.items()]
        load = status.load
        if load.kv_usage_ratio is None:
            usages = [r.engine.kv_usage_ratio for r in by_pid.values()]
            known = [usage for usage in usages if usage is not None]
            most, least = max(known, default=None), min(known, default=None)
            load = msgspec.structs.replace(
                load,
                kv_usage_ratio=most,
                kv_usage_least_ratio=least if least != most else None,
            )
        added = [
            c for c in (Capability.TRIM, Capability.DIAGNOSTICS) if c not in status.capabilities
        ]
        return msgspec.structs.replace(
            status,
            load=load,
            processes=processes,
            devices=probe_reports.devices(status.devices, by_pid.values()),
            ledger=probe_reports.ledger(accounts),
            capabilities=[*status.capabilities, *added],
            probed=True,
        )

    def _read(
        self, folder: Path, family: dict[ProcessId, ProcessMemory]
    ) -> dict[ProcessId, Report]:
        now = self._clock()
        for process in self._known.keys() - family.keys():
            self._exchange.drop(process.pid)
        self._known = {p: self._known.get(p) or _Known() for p in family}
        waited = [p.pid for p, known in self._known.items() if self._ask_report(folder, p, known)]
        answers = self._exchange.collect(waited, REPORT_S)
        now = self._clock()
        for process, known in self._known.items():
            if known.asked is not None:
                self._take(process, known, answers.get(process.pid), now)
        return {
            process: known.report
            for process, known in self._known.items()
            if known.report is not None and now - known.at <= OLD_S
        }

    def _ask_report(self, folder: Path, process: ProcessId, known: _Known) -> bool:
        """Ask a process whose report is due; return whether its answer is worth waiting for."""
        now = self._clock()
        if known.asked is not None or now < known.next:
            return False
        if not os.path.lexists(folder / f"{process.pid}.sock"):
            known.next = now + AGAIN_S
            return False
        if not self._exchange.begin(folder, process.pid, REPORT):
            known.next = now + AGAIN_S
            return False
        known.asked = now
        return known.prompt

    def _take(self, process: ProcessId, known: _Known, answer: bytes | None, now: float) -> None:
        """Take in what came of the request under way; ``answer`` is None while nothing did."""
        assert known.asked is not None
        if answer is None:
            known.prompt = False
            if now - known.asked > LATE_S:
                self._exchange.drop(process.pid)
                known.asked, known.next = None, now + AGAIN_S
            return
        try:
            report = decode(answer, Report)
        except Malformed:
            report = None
        if report is not None and report.pid == process.pid and lives(process):
            known.report, known.at, known.next = report, now - report.age_s, 0.0
            known.prompt = now - known.asked <= REPORT_S
        else:
            known.next = now + AGAIN_S
        known.asked = None

    # ---- on request

    @property
    def folder(self) -> Path | None:
        """Where the probes' sockets and files are; None without probes."""
        return self._folder

    def texts(self, kind: Diagnostic) -> dict[int, bytes]:
        """Return the text of every process that answers."""
        if kind is Diagnostic.TRACEMALLOC:
            return self._traced()
        return self._texts({"do": kind.value}, STACKS_S if kind is Diagnostic.STACKS else TEXT_S)

    def _traced(self) -> dict[int, bytes]:
        """Growth by source line during a few seconds. The probe ends it by itself if we cannot."""
        if not self._texts({"do": "tracemalloc", "step": "start"}):
            return {}
        try:
            time.sleep(TRACE_S)
            return self._texts({"do": "tracemalloc", "step": "diff"})
        finally:
            self._texts({"do": "tracemalloc", "step": "stop"})

    def _texts(self, request: dict[str, str], timeout_s: float = TEXT_S) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for pid, answer in self._ask(request, timeout_s, TEXT_BYTES).items():
            try:
                text = decode(answer, _Text).text
            except Malformed:
                continue
            found[pid] = text.encode(errors="replace")
        return found

    def trim(self, idle: bool) -> Trimmed | None:
        """Return what the probes gave back; None where none did anything."""
        done, device = 0, None
        for answer in self._ask({"do": "trim", "idle": idle}, TRIM_S).values():
            try:
                report = decode(answer, _Trim)
            except Malformed:
                continue
            done += 1
            if report.device_before is not None and report.device_after is not None:
                device = (device or 0) + report.device_before - report.device_after
        return Trimmed(done, device) if done else None

    def _ask(
        self, request: dict[str, object] | dict[str, str], timeout_s: float, limit: int = 1 << 16
    ) -> dict[int, bytes]:
        alive = [p.pid for p in self._answering if lives(p)]
        if self._folder is None or not alive:
            return {}
        line = json.dumps(request).encode() + b"\n"
        return ask_all(self._folder, alive, line, timeout_s, limit)


def _family(processes: Iterable[ProcessMemory]) -> dict[ProcessId, ProcessMemory]:
    """Return the living ones of ``processes``, and their descendants, which nobody named yet."""
    found: dict[ProcessId, ProcessMemory] = {}
    waiting = list(processes)
    seen = {process.pid for process in waiting}
    while waiting and len(found) < MAX_PROCESSES:
        process = waiting.pop(0)
        identity = identify(process.pid)
        if identity is None:
            continue
        found[identity] = process
        for child in children(process.pid) or []:
            if child not in seen:
                seen.add(child)
                waiting.append(ProcessMemory(role=Role.OTHER, pid=child))
    return found
