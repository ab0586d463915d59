"""Puts one :class:`~plimsoll_api.trace.Sample` together from a live engine.

Each source that fails leaves its part unknown; nothing here raises.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from plimsoll_api.admin import STANDBY, EngineState, Parts, ProcessMemory, Role, Status
from plimsoll_api.admin import DeviceMemory as EngineDevice
from plimsoll_api.state import Signal, SignalReason
from plimsoll_api.trace import (
    Device,
    Host,
    LedgerLine,
    Malloc,
    Sample,
    SampleLoad,
    Torch,
)
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.signals.cgroup import Cgroup, CgroupMemory
from plimsoll_sidecar.signals.device_memory import DeviceSource, Nvml, assigned, outside, reasons
from plimsoll_sidecar.signals.device_sharing import Sharing
from plimsoll_sidecar.signals.engine_processes import NoEngine
from plimsoll_sidecar.signals.process_table import OpenFilesReader, ProcessId
from plimsoll_sidecar.signals.resident_memory import Processes
from plimsoll_sidecar.signals.shared_memory import OrphanedMemory

log = logging.getLogger(__name__)

MAX_MESSAGE = 400
WORKING = frozenset({EngineState.SERVING, EngineState.DRAINING, EngineState.DRAINED})
"""States in which a worker is expected to make steps; in any other its load is unknown."""
TELL_S = 20.0
"""A signal that is missing for less is the start of an engine, or an answer that came late."""
SILENT_S = 60.0
"""A process whose probe says nothing for so long has none any more: it became another program."""


class StatusSource(Protocol):
    """What a sample needs of an engine's adapter."""

    def status(self) -> Status:
        """Return the engine's account of itself; EngineError where there is none."""

    def serves(self) -> bool:
        """Whether its serving port answers."""

    def processes(self) -> list[ProcessMemory]:
        """Its living processes, found without its answer."""

    def has_ended(self) -> bool:
        """Whether these are only what its main process left, which nobody may have seen."""


class Sampler:
    """``status`` is the answer in the newest sample; None where the engine gave none.

    ``signals`` says what the newest sample had, ``page`` whether the engine's metrics page could be
    used; None for an engine without one.

    ``device_source`` names where device memory comes from: ``engine`` (cudaMemGetInfo), ``nvml``,
    ``dcgm`` or ``amd`` (the node's exporters), or None. It is chosen once for each epoch, for they
    differ by a constant.
    """

    def __init__(
        self,
        engine: StatusSource,
        clock: Callable[[], float] = time.monotonic,
        nvml: DeviceSource | None = None,
        exporter: DeviceSource | None = None,
        amd: DeviceSource | None = None,
        orphaned: OrphanedMemory | None = None,
        page: Callable[[], Signal | None] = lambda: None,
    ) -> None:
        self.status: Status | None = None
        self.cgroup = CgroupMemory()
        self.device_source: str | None = None
        self._engine, self._clock, self._page = engine, clock, page
        self._silent = Signal(True)
        self.signals: dict[str, Signal] = {}
        self._began = clock()
        self._processes, self._orphaned = Processes(), orphaned
        self._open_files = OpenFilesReader(clock)
        self._outside = outside(nvml or Nvml(), exporter, amd)
        self._sharing = Sharing(self._outside, clock)
        self._group: Cgroup | None = None
        self._group_of: ProcessId | None = None
        self._epoch_text: str | None = None
        self._epoch = 0
        self._uuids: dict[int, str] = {}
        self._parts: Parts | None = None
        self._accounted: set[int] = set()
        self._silent_since: float | None = None

    def sample(self) -> Sample:
        """One reading of everything. Bounded by the adapter's own time limit."""
        begin = self._clock()
        status = self.status = self._ask()
        if status is not None:
            self._follow_epoch(status)
            self._processes.name(status.processes)
            self._parts = status.parts
        host = self._host(status)
        sample = Sample(
            t=round(begin - self._began, 3),
            epoch=self._epoch,
            host=host,
            device=self._devices(status, host.processes == 0),
            scrape_ok=status is not None,
            serving=self._engine.serves() if status is None and host.processes else None,
            parts=self._parts,
        )
        if status is not None:
            sample.ready = status.state in WORKING if status.state.is_known else None
            sample.malloc = self._malloc(status)
            sample.load, sample.load_age_s = load_of(status), status.load_age_s
            sample.ledger = [
                LedgerLine(e.owner, e.kind.value, e.bytes, e.bound) for e in status.ledger
            ] or None
        self.signals = self._signals(sample)
        return sample

    def _signals(self, sample: Sample) -> dict[str, Signal]:
        found = signals_of(sample, shared_memory=self._orphaned is not None)
        if not sample.scrape_ok:
            found["engine"] = self._silent
        page = self._page()
        if page is not None:
            found["metrics"] = page
        return found

    def _ask(self) -> Status | None:
        try:
            return self._engine.status()
        except EngineError as error:
            log.debug("no status: %s", error)
            unseen = isinstance(error.__cause__, NoEngine)
            reason = SignalReason.ENGINE_NOT_FOUND if unseen else SignalReason.ENGINE_SILENT
            self._silent = Signal(False, reason, str(error)[:MAX_MESSAGE])
            return None

    def _follow_epoch(self, status: Status) -> None:
        """Count the epochs by their text; reset what was known of the last one."""
        if status.epoch != self._epoch_text:
            self._epoch_text = status.epoch
            self._epoch += 1
            self.device_source, self._uuids = None, {}
            self._sharing.forget()
            self._accounted, self._silent_since = set(), None

    def _malloc(self, status: Status) -> Malloc | None:
        """Return the worker's account.

        Of all its ranks together, unknown where one does not say.
        """
        if not status.probed:
            return _malloc(status)
        now, listed = self._clock(), {p.pid for p in status.processes}
        accounted = {p.pid for p in status.processes if p.python_objects is not None}
        self._accounted = (self._accounted & listed) | accounted
        if self._accounted == accounted:
            self._silent_since = None
            return _malloc(status)
        self._silent_since = now if self._silent_since is None else self._silent_since
        if now - self._silent_since > SILENT_S:
            self._accounted, self._silent_since = accounted, None
        return None

    def _host(self, status: Status | None) -> Host:
        """Memory of the engine's processes.

        Where all that it named have ended and it does not answer, the next engine may be starting:
        its memory is nobody's otherwise.
        """
        host = self._processes.read()
        if status is None and not host.processes:
            found = self._engine.processes()
            if found:
                self._processes.name(found)
                host = self._processes.read()
        host.frontend_lives = self._processes.frontend_lives
        if host.frontend_lives is None and status is None and host.processes:
            host.frontend_lives = False if self._engine.has_ended() else None
        if status is not None:
            host.cpu_s = self._processes.helpers_cpu_s()
        first = self._processes.first
        pid = first.pid if first is not None else None
        if first != self._group_of:
            self._group_of = first
            self._group = Cgroup.of(pid) if pid is not None else None
        self.cgroup = self._group.read() if self._group is not None else CgroupMemory()
        host.cgroup_current, host.cgroup_anon = self.cgroup.current, self.cgroup.anon
        host.cgroup_shmem, host.cgroup_file = self.cgroup.shmem, self.cgroup.file
        host.cgroup_swap, host.oom_kills = self.cgroup.swap, self.cgroup.oom_kills
        host.cgroup_kernel, host.cgroup_sock = self.cgroup.kernel, self.cgroup.sock
        host.cgroup_other, host.cgroup_limit = self.cgroup.other, self.cgroup.limit
        host.cgroup_reclaimable = self.cgroup.reclaimable
        host.open_files = self._open_files.read(self._processes.names)
        if self._orphaned is not None:
            left = self._orphaned.read(pid)
            host.shm_orphan, host.shm_orphan_earlier = left.bytes, left.earlier
        return host

    def _devices(self, status: Status | None, ended: bool) -> list[Device]:
        """Read the devices.

        ``ended``: no process of the engine lives; then only NVML can tell what is still held.
        """
        listed = (status.devices or assigned(self._outside.values())) if status else []
        reported = {device.index: device for device in listed}
        for device in reported.values():
            if device.uuid is not None:
                self._uuids[device.index] = device.uuid
        shared = self._sharing.reasons(self._uuids.values(), self._pids) if status else {}
        if self.device_source is None and reported:
            known = all(device.used is not None for device in reported.values())
            self.device_source = "engine" if known else self._first_outside()
        if self.device_source == "engine" and not (ended and status is None):
            return [
                Device(d.index, d.used, d.total, _torch(d), shared.get(d.uuid or ""))
                for d in reported.values()
            ]
        name = self._first_outside() if self.device_source == "engine" else self.device_source
        return [
            self._from(name, i, u, reported.get(i), shared.get(u))
            for i, u in sorted(self._uuids.items())
        ]

    def _pids(self) -> list[int]:
        first = self._processes.first
        others = list(self._processes.names())
        return others if first is None else [first.pid, *(p for p in others if p != first.pid)]

    def device_reasons(self) -> list[str]:
        """Why each source of device memory that is not in use tells nothing, for people."""
        return reasons(self._outside, self.device_source, list(self._uuids.values()))

    def _first_outside(self) -> str | None:
        """Return the first source that knows all devices."""
        for name, source in self._outside.items():
            if self._uuids and all(source.memory(uuid) for uuid in self._uuids.values()):
                return name
        return None

    def _from(
        self,
        name: str | None,
        index: int,
        uuid: str,
        reported: EngineDevice | None,
        shared: str | None,
    ) -> Device:
        memory = self._outside[name].memory(uuid) if name is not None else None
        return Device(
            index=index,
            used=memory.used if memory else None,
            total=memory.total if memory else None,
            torch=_torch(reported) if reported else None,
            shared=shared,
        )


def load_of(status: Status) -> SampleLoad:
    """Return the engine's load; unknown while no worker of this epoch is at work."""
    if status.report_age_s is None or status.state not in WORKING:
        return SampleLoad()
    return copy.copy(status.load)


def _malloc(status: Status) -> Malloc | None:
    """Return the worker's; of all its ranks together, unknown where one does not say.

    With probes that of every process that has one.
    """
    processes = status.processes
    # A standby works on nothing: all of its memory is in the ledger.
    workers = [p for p in processes if p.role is Role.WORKER and p.name != STANDBY]
    if status.probed:
        workers = [p for p in processes if p.python_objects is not None]
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


def signals_of(sample: Sample, shared_memory: bool = False) -> dict[str, Signal]:
    """Return whether the sample has each signal, by name.

    ``engine`` and ``host`` always; ``device`` where the sample has one at all, and
    ``shared_memory`` where the pod's ``/dev/shm`` is watched.
    """
    host = sample.host
    found = {
        "engine": _known(sample.scrape_ok, SignalReason.ENGINE_SILENT, ""),
        "host": _known(
            any(size is not None for size in (host.cgroup_anon, host.rss_anon)),
            SignalReason.HOST_MEMORY_UNREADABLE,
            "no memory of the engine's processes can be read: it has none, or they are another"
            " user's and the supervisor may not",
        ),
    }
    if sample.device:
        found["device"] = _known(
            any(device.used is not None for device in sample.device),
            SignalReason.DEVICE_MEMORY_UNREADABLE,
            "no source tells how much memory of the devices is in use",
        )
    if shared_memory:
        found["shared_memory"] = _known(
            host.shm_orphan is not None,
            SignalReason.SHARED_MEMORY_UNREADABLE,
            "the files in /dev/shm or the processes that use them cannot be read",
        )
    return found


def _known(ok: bool, reason: SignalReason, message: str) -> Signal:
    return Signal(True) if ok else Signal(False, reason, message)


class SignalLog:
    """Logs what the supervisor cannot see: one line when it has lasted, and one at its end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, tuple[str, float]] = {}
        self._told: dict[str, str] = {}

    def follow(self, signals: Mapping[str, Signal]) -> None:
        """Take in the signals of one sample."""
        now = self._clock()
        for name, one in signals.items():
            reason, since = self._since.get(name, ("", now))
            if one.reason != reason:
                self._since[name] = one.reason, now
                since = now
            told = self._told.get(name, "")
            if told != one.reason and (one.ok or now - since >= TELL_S):
                self._told[name] = one.reason
                if one.ok:
                    log.info("signal %s: known again", name)
                else:
                    log.warning("signal %s: %s: %s", name, one.reason, one.message)
