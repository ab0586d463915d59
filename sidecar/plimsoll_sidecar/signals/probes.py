"""Query the probes of an engine's processes, keep their reports, and request trims.

Probes report what is not visible from outside: the allocators of each process, torch's memory on
each device, and the engine's caches with their bounds.
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
from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.supervisor_config import PROBE_DIR_ENV
from plimsoll_sidecar.signals import probe_reports
from plimsoll_sidecar.signals.probe_reports import (
    MAX_TEXT_BYTES,
    ProbeRequests,
    Report,
    query_probes,
)
from plimsoll_sidecar.signals.process_table import ProcessId, identify, is_running, read_children
from plimsoll_sidecar.signals.resident_memory import MAX_PROCESSES

# A sample waits this long for all reports. A report takes about a millisecond.
REPORT_TIMEOUT_S = 0.3
# Later samples collect a pending report without waiting, because a process that hangs would delay
# them. After this time, the report is given up.
MAX_LATE_ANSWER_S = 10.0
# A silent process is queried again after this time.
RETRY_PAUSE_S = 5.0
MAX_REPORT_AGE_S = 30.0
DEFAULT_REPLY_TIMEOUT_S = 10.0
# A process answers within milliseconds, or never if a hang holds the GIL.
STACKS_REPLY_TIMEOUT_S = 3.0
TRACE_DURATION_S = 5.0
TRIM_TIMEOUT_S = 5.0
REPORT_REQUEST = b'{"do":"report"}\n'


@dataclass
class _ProcessState:
    # Times are monotonic. asked_at is None without a pending request. is_prompt is True if the last
    # answer came within REPORT_TIMEOUT_S.
    report: Report | None = None
    reported_at: float = 0.0
    next_at: float = 0.0
    asked_at: float | None = None
    is_prompt: bool = True


class _TextAnswer(msgspec.Struct):
    text: str


class _TrimAnswer(msgspec.Struct):
    steps: list[str]
    device_before: Number | None = None
    device_after: Number | None = None


class TrimResult(msgspec.Struct, frozen=True):
    """Number of processes that trimmed their memory, and the device memory that torch freed.

    ``device`` is in bytes; None if torch is not in use, or did not trim.
    """

    processes: int
    device: int | None = None


class Probes:
    """Client of the probes whose sockets are in ``folder``; None for no probes.

    :meth:`add_reports` must not run concurrently with itself.
    """

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._states: dict[ProcessId, _ProcessState] = {}
        self._requests = ProbeRequests()
        self._answering: tuple[ProcessId, ...] = ()

    @classmethod
    def from_environment(cls) -> Probes:
        """Return the probes in the pod's shared folder, or no probes."""
        folder = os.environ.get(PROBE_DIR_ENV)
        return cls(Path(folder) if folder else None)

    def add_reports(self, status: Status) -> Status:
        """Return ``status`` with the reports from its processes and their descendants."""
        if self._folder is None:
            return status
        family = _add_descendants(status.processes)
        reports = self._collect_reports(self._folder, family)
        self._answering = tuple(reports)
        if not reports:
            return status
        by_pid = {identity.pid: report for identity, report in reports.items()}
        processes = [
            probe_reports.merge_process(process, by_pid[process.pid])
            if process.pid in by_pid
            else process
            for process in family.values()
        ]
        roles = {process.pid: process.role for process in processes}
        accounts = [(roles[pid], report) for pid, report in by_pid.items()]
        load = status.load
        if load.kv_usage_ratio is None:
            usages = [r.engine.kv_usage_ratio for r in by_pid.values()]
            known_usages = [usage for usage in usages if usage is not None]
            max_usage, min_usage = max(known_usages, default=None), min(known_usages, default=None)
            load = msgspec.structs.replace(
                load,
                kv_usage_ratio=max_usage,
                kv_usage_least_ratio=min_usage if min_usage != max_usage else None,
            )
        added = [
            c for c in (Capability.TRIM, Capability.DIAGNOSTICS) if c not in status.capabilities
        ]
        return msgspec.structs.replace(
            status,
            load=load,
            processes=processes,
            devices=probe_reports.merge_devices(status.devices, by_pid.values()),
            ledger=probe_reports.merge_ledgers(accounts),
            capabilities=[*status.capabilities, *added],
            probed=True,
        )

    def _collect_reports(
        self, folder: Path, processes: dict[ProcessId, ProcessMemory]
    ) -> dict[ProcessId, Report]:
        now = self._clock()
        for process in self._states.keys() - processes.keys():
            self._requests.drop(process.pid)
        self._states = {p: self._states.get(p) or _ProcessState() for p in processes}
        waited = [
            p.pid for p, state in self._states.items() if self._request_report(folder, p, state)
        ]
        answers = self._requests.collect(waited, REPORT_TIMEOUT_S)
        now = self._clock()
        for process, state in self._states.items():
            if state.asked_at is not None:
                self._store_answer(process, state, answers.get(process.pid), now)
        return {
            process: state.report
            for process, state in self._states.items()
            if state.report is not None and now - state.reported_at <= MAX_REPORT_AGE_S
        }

    def _request_report(self, folder: Path, process: ProcessId, state: _ProcessState) -> bool:
        # Returns whether this sample waits for the answer.
        now = self._clock()
        if state.asked_at is not None or now < state.next_at:
            return False
        if not os.path.lexists(folder / f"{process.pid}.sock"):
            state.next_at = now + RETRY_PAUSE_S
            return False
        if not self._requests.send(folder, process.pid, REPORT_REQUEST):
            state.next_at = now + RETRY_PAUSE_S
            return False
        state.asked_at = now
        return state.is_prompt

    def _store_answer(
        self, process: ProcessId, state: _ProcessState, answer: bytes | None, now: float
    ) -> None:
        # The answer is None if it has not arrived yet.
        assert state.asked_at is not None
        if answer is None:
            state.is_prompt = False
            if now - state.asked_at > MAX_LATE_ANSWER_S:
                self._requests.drop(process.pid)
                state.asked_at, state.next_at = None, now + RETRY_PAUSE_S
            return
        try:
            report = decode(answer, Report)
        except MalformedError:
            report = None
        if report is not None and report.pid == process.pid and is_running(process):
            state.report, state.reported_at, state.next_at = report, now - report.age_s, 0.0
            state.is_prompt = now - state.asked_at <= REPORT_TIMEOUT_S
        else:
            state.next_at = now + RETRY_PAUSE_S
        state.asked_at = None

    # ---- on request

    @property
    def folder(self) -> Path | None:
        """Folder of the probes' sockets and files; None without probes."""
        return self._folder

    def read_texts(self, kind: Diagnostic) -> dict[int, bytes]:
        """Return a diagnostic from each process that answers, by PID."""
        if kind is Diagnostic.TRACEMALLOC:
            return self._trace_allocations()
        return self._query_texts(
            {"do": kind.value},
            STACKS_REPLY_TIMEOUT_S if kind is Diagnostic.STACKS else DEFAULT_REPLY_TIMEOUT_S,
        )

    def _trace_allocations(self) -> dict[int, bytes]:
        # If the supervisor can no longer end the trace, the probe ends it.
        if not self._query_texts({"do": "tracemalloc", "step": "start"}):
            return {}
        try:
            time.sleep(TRACE_DURATION_S)
            return self._query_texts({"do": "tracemalloc", "step": "diff"})
        finally:
            self._query_texts({"do": "tracemalloc", "step": "stop"})

    def _query_texts(
        self, request: dict[str, str], timeout_s: float = DEFAULT_REPLY_TIMEOUT_S
    ) -> dict[int, bytes]:
        texts: dict[int, bytes] = {}
        for pid, answer in self._query(request, timeout_s, MAX_TEXT_BYTES).items():
            try:
                text = decode(answer, _TextAnswer).text
            except MalformedError:
                continue
            texts[pid] = text.encode(errors="replace")
        return texts

    def trim(self, is_idle: bool) -> TrimResult | None:
        """Trim the memory of all processes, and return the result; None if no probe answers."""
        done, device = 0, None
        for answer in self._query({"do": "trim", "idle": is_idle}, TRIM_TIMEOUT_S).values():
            try:
                report = decode(answer, _TrimAnswer)
            except MalformedError:
                continue
            done += 1
            if report.device_before is not None and report.device_after is not None:
                device = (device or 0) + report.device_before - report.device_after
        return TrimResult(done, device) if done else None

    def _query(
        self,
        request: dict[str, object] | dict[str, str],
        timeout_s: float,
        max_bytes: int = 1 << 16,
    ) -> dict[int, bytes]:
        alive = [p.pid for p in self._answering if is_running(p)]
        if self._folder is None or not alive:
            return {}
        line = json.dumps(request).encode() + b"\n"
        return query_probes(self._folder, alive, line, timeout_s, max_bytes)


def _add_descendants(processes: Iterable[ProcessMemory]) -> dict[ProcessId, ProcessMemory]:
    # Descendants get the role OTHER.
    descendants: dict[ProcessId, ProcessMemory] = {}
    waiting = list(processes)
    seen = {process.pid for process in waiting}
    while waiting and len(descendants) < MAX_PROCESSES:
        process = waiting.pop(0)
        identity = identify(process.pid)
        if identity is None:
            continue
        descendants[identity] = process
        for child in read_children(process.pid) or []:
            if child not in seen:
                seen.add(child)
                waiting.append(ProcessMemory(role=Role.OTHER, pid=child))
    return descendants
