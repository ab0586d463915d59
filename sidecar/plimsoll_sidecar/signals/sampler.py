"""Puts one :class:`~plimsoll_sidecar.trace.Sample` together from a live engine.

Each source that fails leaves its part unknown; nothing here raises. ``cost_s`` is what the newest
sample took, the wait for the engine's answer included.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from plimsoll_api.admin import DeviceMemory as EngineDevice
from plimsoll_api.admin import EngineState, ProcessMemory, Role, Status
from plimsoll_sidecar.act.adapter import EngineError
from plimsoll_sidecar.signals.cgroup import Cgroup, CgroupMemory
from plimsoll_sidecar.signals.device import DeviceSource
from plimsoll_sidecar.signals.nvml import Nvml
from plimsoll_sidecar.signals.proc import Processes
from plimsoll_sidecar.trace import (
    Device,
    Host,
    LedgerLine,
    Malloc,
    Sample,
    SampleLoad,
    Torch,
)

log = logging.getLogger(__name__)

WORKING = frozenset({EngineState.SERVING, EngineState.DRAINING, EngineState.DRAINED})
"""States in which a worker is expected to make steps; in any other its load is unknown."""


class StatusSource(Protocol):
    def status(self) -> Status:
        """The engine's account of itself; EngineError where there is none."""

    def serves(self) -> bool:
        """Whether its serving port answers."""


class Sampler:
    """``status`` is the answer in the newest sample; None where the engine gave none.

    ``device_source`` names where device memory comes from: ``engine`` (cudaMemGetInfo), ``nvml``,
    ``dcgm`` (the node's exporter), or None. It is chosen once for each epoch, for they differ by a
    constant.
    """

    def __init__(
        self,
        engine: StatusSource,
        clock: Callable[[], float] = time.monotonic,
        nvml: DeviceSource | None = None,
        exporter: DeviceSource | None = None,
    ) -> None:
        self.status: Status | None = None
        self.cgroup = CgroupMemory()
        self.device_source: str | None = None
        self.cost_s = 0.0
        self._engine, self._clock = engine, clock
        self._began = clock()
        self._processes = Processes()
        self._outside = {"nvml": nvml or Nvml()} | ({"dcgm": exporter} if exporter else {})
        self._group: Cgroup | None = None
        self._group_pid: int | None = None
        self._epoch_text: str | None = None
        self._epoch = 0
        self._uuids: dict[int, str] = {}

    def sample(self) -> Sample:
        """One reading of everything. Bounded by the adapter's own time limit."""
        begin = self._clock()
        status = self.status = self._ask()
        if status is not None:
            self._follow_epoch(status)
            self._processes.name(status.processes)
        host = self._host()
        sample = Sample(
            t=round(begin - self._began, 3),
            epoch=self._epoch,
            host=host,
            device=self._devices(status, host.processes == 0),
            scrape_ok=status is not None,
            serving=self._engine.serves() if status is None and host.processes else None,
        )
        if status is not None:
            sample.ready = status.state in WORKING
            sample.malloc = _malloc(status.processes)
            sample.load = load_of(status)
            sample.ledger = [
                LedgerLine(e.owner, e.kind.value, e.bytes, e.bound) for e in status.ledger
            ] or None
        self.cost_s = self._clock() - begin
        return sample

    def _ask(self) -> Status | None:
        try:
            return self._engine.status()
        except EngineError as error:
            log.debug("no status: %s", error)
            return None

    def _follow_epoch(self, status: Status) -> None:
        """An epoch's text becomes a number that only grows."""
        if status.epoch != self._epoch_text:
            self._epoch_text = status.epoch
            self._epoch += 1
            self.device_source, self._uuids = None, {}

    def _host(self) -> Host:
        host = self._processes.read()
        pid = self._processes.first
        if pid != self._group_pid:
            self._group_pid = pid
            self._group = Cgroup.of(pid) if pid is not None else None
        self.cgroup = self._group.read() if self._group is not None else CgroupMemory()
        host.cgroup_current, host.cgroup_anon = self.cgroup.current, self.cgroup.anon
        host.cgroup_shmem, host.cgroup_file = self.cgroup.shmem, self.cgroup.file
        host.oom_kills = self.cgroup.oom_kills
        return host

    def _devices(self, status: Status | None, ended: bool) -> list[Device]:
        """``ended``: no process of the engine lives; then only NVML can tell what is still held."""
        reported = {device.index: device for device in status.devices} if status else {}
        for device in reported.values():
            if device.uuid is not None:
                self._uuids[device.index] = device.uuid
        if self.device_source is None and reported:
            known = all(device.used is not None for device in reported.values())
            self.device_source = "engine" if known else self._first_outside()
        if self.device_source == "engine" and not (ended and status is None):
            return [
                Device(index=d.index, used=d.used, total=d.total, torch=_torch(d))
                for d in reported.values()
            ]
        name = self._first_outside() if self.device_source == "engine" else self.device_source
        return [self._from(name, i, u, reported.get(i)) for i, u in sorted(self._uuids.items())]

    def _first_outside(self) -> str | None:
        """The first source that knows all devices."""
        for name, source in self._outside.items():
            if self._uuids and all(source.memory(uuid) for uuid in self._uuids.values()):
                return name
        return None

    def _from(
        self, name: str | None, index: int, uuid: str, reported: EngineDevice | None
    ) -> Device:
        memory = self._outside[name].memory(uuid) if name is not None else None
        return Device(
            index=index,
            used=memory.used if memory else None,
            total=memory.total if memory else None,
            torch=_torch(reported) if reported else None,
        )


def load_of(status: Status) -> SampleLoad:
    """The engine's load; unknown while no worker of this epoch is at work."""
    if status.report_age_s is None or status.state not in WORKING:
        return SampleLoad()
    load = status.load
    return SampleLoad(
        running=load.running,
        waiting=load.waiting,
        inflight=load.inflight,
        requests_total=load.requests_total,
        aborted_total=load.aborted_total,
        errors_total=load.errors_total,
        images_total=load.images_total,
        audios_total=load.audios_total,
        distinct_prompts_total=load.distinct_prompts_total,
        adapters_total=load.adapters_total,
        prompt_tokens_total=load.prompt_tokens_total,
        generation_tokens_total=load.generation_tokens_total,
        steps_total=load.steps_total,
        preemptions_total=load.preemptions_total,
        kv_usage_ratio=load.kv_usage_ratio,
        kv_lost_ratio=load.kv_lost_ratio,
        encoder_lost_ratio=load.encoder_lost_ratio,
    )


def _malloc(processes: list[ProcessMemory]) -> Malloc | None:
    """The worker's; of all its ranks together, unknown where one does not say."""
    workers = [p for p in processes if p.role is Role.WORKER]
    found = Malloc(
        in_use=_sum(p.malloc_in_use for p in workers),
        retained=_sum(p.malloc_retained for p in workers),
        python_objects=_sum(p.python_objects for p in workers),
        py_blocks=_sum(p.py_blocks for p in workers),
        full_collections=min(
            (p.full_collections for p in processes if p.full_collections is not None),
            default=None,
        ),
    )
    return None if found.in_use is None and found.python_objects is None else found


def _sum(values: Iterable[int | None]) -> int | None:
    """None where a value is unknown, or there is none."""
    every = list(values)
    known = [value for value in every if value is not None]
    return sum(known) if known and len(known) == len(every) else None


def _torch(device: EngineDevice) -> Torch | None:
    if device.torch_allocated is None and device.torch_reserved is None:
        return None
    return Torch(allocated=device.torch_allocated, reserved=device.torch_reserved)
