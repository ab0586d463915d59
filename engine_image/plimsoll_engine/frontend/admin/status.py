"""Status of the engine for the admin API."""

from __future__ import annotations

import time

from plimsoll_api.admin import Capability, LedgerEntry, MemoryKind, ProcessMemory, Role, Status
from plimsoll_api.version import get_version
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.process.host_memory import PythonMemoryEstimator, measure_process_memory
from plimsoll_engine.settings import StandbyPolicy

ENGINE_VERSION = get_version()


class StatusReader:
    """Reader of the engine's status, which never waits for the worker."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._python = PythonMemoryEstimator()

    def read(self) -> Status:
        """Return the body of ``GET /status``. A value is None until the worker has reported it."""
        engine = self._engine
        report = engine.report
        operation = engine.operations.current
        return Status(
            state=engine.lifecycle.state,
            epoch=str(engine.epochs.current),
            version=ENGINE_VERSION,
            model=engine.settings.served_model_name,
            uptime_s=round(time.monotonic() - engine.started_at, 3),
            load=engine.compute_load(),
            processes=self._list_processes(),
            devices=[] if report is None else report.devices,
            ledger=engine.list_ledger_entries(),
            capabilities=self._list_capabilities(),
            injections=engine.list_injections(),
            worker_starts=engine.workers.starts,
            report_age_s=engine.report_age_s,
            operation=None if operation is None else operation.id,
            kv_handover=engine.kv_handover,
            standby=engine.manager.standby.status,
        )

    def _list_capabilities(self) -> list[Capability]:
        leased = self._engine.settings.standby_worker is StandbyPolicy.ON_SUSPICION
        return [
            capability
            for capability in Capability
            if leased or capability is not Capability.STANDBY
        ]

    def _list_processes(self) -> list[ProcessMemory]:
        workers = self._engine.workers
        processes = [measure_process_memory(Role.FRONTEND, self._python, self._engine.collections)]
        if workers.zygote_pid is not None:
            processes.append(ProcessMemory(role=Role.ZYGOTE, pid=workers.zygote_pid))
        report = self._engine.report
        if workers.weight_server_pid is not None:
            shared = None if report is None else _find_weight_server_bytes(report.ledger)
            processes.append(
                ProcessMemory(role=Role.WEIGHT_SERVER, pid=workers.weight_server_pid, shared=shared)
            )
        if report is not None and report.memory.pid == workers.pid:
            processes += [report.memory, *report.others]
        else:
            processes += [ProcessMemory(role=Role.WORKER, pid=pid) for pid in workers.pids]
        return processes + self._engine.manager.standby.processes


def _find_weight_server_bytes(ledger: list[LedgerEntry]) -> int:
    return sum(
        entry.bytes
        for entry in ledger
        if entry.process is Role.WEIGHT_SERVER and entry.kind is MemoryKind.HOST
    )
