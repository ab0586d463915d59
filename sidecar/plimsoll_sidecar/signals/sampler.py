"""Read one :class:`~plimsoll_api.trace.Sample` from a running engine.

If a source fails, its part of the sample is unknown. Nothing in this module raises.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from plimsoll_api.admin import (
    STANDBY_PROCESS_NAME,
    EngineState,
    ProcessMemory,
    ProcessNames,
    Role,
    Status,
)
from plimsoll_api.admin import DeviceMemory as EngineDevice
from plimsoll_api.pod_devices import is_device_uuid
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
from plimsoll_sidecar.signals.device_memory import (
    DeviceBytes,
    DeviceSource,
    DeviceUsers,
    Nvml,
    explain_unused_sources,
    list_assigned_devices,
    select_available_sources,
)
from plimsoll_sidecar.signals.device_sharing import SharingDetector
from plimsoll_sidecar.signals.engine_processes import EngineNotFoundError
from plimsoll_sidecar.signals.process_table import OpenFilesReader, ProcessId
from plimsoll_sidecar.signals.resident_memory import EngineProcessTable
from plimsoll_sidecar.signals.shared_memory import OrphanedMemory

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 400
# A worker executes steps in these states. In other states, its load is unknown.
WORKING_STATES = frozenset({EngineState.SERVING, EngineState.DRAINING, EngineState.DRAINED})
# A signal that is missing for a shorter time is not logged: the engine may be starting or slow.
MIN_MISSING_LOG_S = 20.0
# The serving port is checked this often while both the port and the status answer.
SERVING_CHECK_PERIOD_S = 5.0
# After this time, a process with a silent probe must have become another program.
MAX_PROBE_SILENCE_S = 60.0


class StatusSource(Protocol):
    """The part of an engine adapter that the sampler needs."""

    def status(self) -> Status:
        """Return the engine's status. Raises EngineError if it cannot be read."""

    @property
    def has_status_port(self) -> bool:
        """Whether the status comes from a port other than the serving port."""

    def is_serving(self) -> bool:
        """Report whether the serving port answers."""

    def list_processes(self) -> list[ProcessMemory]:
        """Return the engine's running processes, as ``/proc`` shows them."""

    def has_ended(self) -> bool:
        """Report whether the main process has ended while its helpers still run."""


class _ServingCheck:
    def __init__(self, engine: StatusSource) -> None:
        self._engine, self._serving = engine, False
        self._thread = threading.Thread(
            target=self._request_serving_port, name="serving-port", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # the engine may have used up the pod's process limit
            self._request_serving_port()

    def _request_serving_port(self) -> None:
        self._serving = self._engine.is_serving()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> bool:
        if not self.is_done:
            self._thread.join()
        return self._serving


class Sampler:
    """Samples one engine.

    ``status`` and ``signals`` belong to the newest sample; ``status`` is None if the engine did not
    answer. ``device_source`` is chosen once for each epoch, because the values of the sources
    differ by a constant.
    """

    def __init__(
        self,
        engine: StatusSource,
        clock: Callable[[], float] = time.monotonic,
        nvml: DeviceSource | None = None,
        dcgm: DeviceSource | None = None,
        amd: DeviceSource | None = None,
        orphaned: OrphanedMemory | None = None,
        read_metrics_signal: Callable[[], Signal | None] = lambda: None,
        list_claimed_devices: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.status: Status | None = None
        self.cgroup = CgroupMemory()
        self.device_source: str | None = None
        self._engine, self._clock, self._page = engine, clock, read_metrics_signal
        self._engine_signal = Signal(True)
        self.signals: dict[str, Signal] = {}
        self._started_at = clock()
        self._processes, self._orphaned = EngineProcessTable(), orphaned
        self._open_files = OpenFilesReader(clock)
        self._sources = select_available_sources(nvml or Nvml(), dcgm, amd)
        self._sharing = SharingDetector(self._sources, clock)
        self._group: Cgroup | None = None
        self._group_of: ProcessId | None = None
        self._epoch_text: str | None = None
        self._epoch = 0
        self._uuids: dict[int, str] = {}
        self._claimed, self._are_assigned = list_claimed_devices, False
        self._parts: ProcessNames | None = None
        self._probed_pids: set[int] = set()
        self._silent_since: float | None = None
        self._serving_check: _ServingCheck | None = None
        self._next_serving_check = 0.0

    def sample(self) -> Sample:
        """Return one sample, within the timeouts of the adapter."""
        begin = self._clock()
        # Both ports of a silent engine are queried at the same time, because each wait takes
        # seconds.
        was_silent = bool(self.signals) and self.status is None
        if self._serving_check is None and (was_silent or self._is_serving_due(begin)):
            self._serving_check = _ServingCheck(self._engine)
        status = self.status = self._query_engine()
        if status is not None:
            self._apply_epoch(status)
            self._processes.set_processes(status.processes)
            self._parts = status.parts
        host = self._read_host(status)
        serving = self._check_serving(status, host, begin)
        sample = Sample(
            t=round(begin - self._started_at, 3),
            epoch=self._epoch,
            host=host,
            device=self._read_devices(status, host.processes == 0),
            scrape_ok=status is not None,
            serving=serving,
            parts=self._parts,
        )
        if status is not None:
            sample.ready = status.state in WORKING_STATES if status.state.is_known else None
            sample.malloc = self._read_malloc(status)
            sample.load, sample.load_age_s = make_load(status), status.load_age_s
            sample.ledger = [
                LedgerLine(e.owner, e.kind.value, e.bytes, e.bound) for e in status.ledger
            ] or None
        self.signals = self._find_signals(sample)
        return sample

    def _is_serving_due(self, now: float) -> bool:
        return (
            self._engine.has_status_port
            and self.status is not None
            and now >= self._next_serving_check
        )

    def _check_serving(self, status: Status | None, host: Host, now: float) -> bool | None:
        # Waits for the port only if the status does not answer. None means that there is no answer
        # yet.
        check = self._serving_check
        if status is None:
            if not host.processes:
                return None
            check = check or _ServingCheck(self._engine)
        elif check is None or not check.is_done:
            return None
        serving, self._serving_check = check.wait(), None
        self._next_serving_check = now + SERVING_CHECK_PERIOD_S if serving else now
        return serving

    def _find_signals(self, sample: Sample) -> dict[str, Signal]:
        signals = find_signals(sample, is_shm_monitored=self._orphaned is not None)
        if not sample.scrape_ok:
            signals["engine"] = self._engine_signal
        page = self._page()
        if page is not None:
            signals["metrics"] = page
        return signals

    def _query_engine(self) -> Status | None:
        try:
            return self._engine.status()
        except EngineError as error:
            log.debug("failed to read the engine's status: %s", error)
            unseen = isinstance(error.__cause__, EngineNotFoundError)
            reason = SignalReason.ENGINE_NOT_FOUND if unseen else SignalReason.ENGINE_SILENT
            self._engine_signal = Signal(False, reason, str(error)[:MAX_MESSAGE_CHARS])
            return None

    def _apply_epoch(self, status: Status) -> None:
        if status.epoch != self._epoch_text:
            self._epoch_text = status.epoch
            self._epoch += 1
            self.device_source, self._uuids = None, {}
            self._sharing.reset()
            self._probed_pids, self._silent_since = set(), None

    def _read_malloc(self, status: Status) -> Malloc | None:
        # None if a rank does not report.
        if not status.probed:
            return _sum_allocator_memory(status)
        now, listed = self._clock(), {p.pid for p in status.processes}
        accounted = {p.pid for p in status.processes if p.python_objects is not None}
        self._probed_pids = (self._probed_pids & listed) | accounted
        if self._probed_pids == accounted:
            self._silent_since = None
            return _sum_allocator_memory(status)
        self._silent_since = now if self._silent_since is None else self._silent_since
        if now - self._silent_since > MAX_PROBE_SILENCE_S:
            self._probed_pids, self._silent_since = accounted, None
        return None

    def _read_host(self, status: Status | None) -> Host:
        # If all reported processes have ended and the engine does not answer, the next engine may
        # be starting. Its processes are then found without its status.
        host = self._processes.read()
        if status is None and not host.processes:
            processes = self._engine.list_processes()
            if processes:
                self._processes.set_processes(processes)
                host = self._processes.read()
        host.frontend_lives = self._processes.frontend_lives
        if host.frontend_lives is None and status is None and host.processes:
            host.frontend_lives = False if self._engine.has_ended() else None
        if status is not None:
            host.cpu_s = self._processes.sum_helpers_cpu_s()
        first = self._processes.main_process
        pid = first.pid if first is not None else None
        if first != self._group_of:
            self._group_of = first
            self._group = Cgroup.find_for_process(pid) if pid is not None else None
        self.cgroup = self._group.read() if self._group is not None else CgroupMemory()
        host.cgroup_current, host.cgroup_anon = self.cgroup.current, self.cgroup.anon
        host.cgroup_shmem, host.cgroup_file = self.cgroup.shmem, self.cgroup.file
        host.cgroup_swap, host.oom_kills = self.cgroup.swap, self.cgroup.oom_kills
        host.cgroup_kernel, host.cgroup_sock = self.cgroup.kernel, self.cgroup.sock
        host.cgroup_other, host.cgroup_limit = self.cgroup.other, self.cgroup.limit
        host.cgroup_reclaimable = self.cgroup.reclaimable
        host.cgroup_throttled = self.cgroup.throttled
        host.open_files = self._open_files.read(self._processes.get_labels)
        if self._orphaned is not None:
            left = self._orphaned.read(pid)
            host.shm_orphan, host.shm_orphan_earlier = left.bytes, left.earlier
        return host

    def _read_devices(self, status: Status | None, has_ended: bool) -> list[Device]:
        # If no process of the engine runs, only NVML or an exporter reports the memory that is
        # still in use.
        listed = self._list_devices(status) if status else []
        reported = {device.index: device for device in listed}
        for device in reported.values():
            if device.uuid is not None:
                self._uuids[device.index] = device.uuid
        shared = self._sharing.find_reasons(self._uuids.values(), self._list_pids) if status else {}
        if self.device_source is None and reported:
            is_known = all(device.used is not None for device in reported.values())
            self.device_source = "engine" if is_known else self._choose_source()
        if self.device_source == "engine" and not (has_ended and status is None):
            return [
                Device(d.index, d.used, d.total, _make_torch(d), shared.get(d.uuid or ""))
                for d in reported.values()
            ]
        name = self._choose_source() if self.device_source == "engine" else self.device_source
        return [
            self._read_device(name, i, u, reported.get(i), shared.get(u))
            for i, u in sorted(self._uuids.items())
        ]

    def _list_devices(self, status: Status) -> list[EngineDevice]:
        # The engine may number the devices differently, so the assigned ones are then forgotten.
        if status.devices:
            if self._are_assigned:
                self._uuids, self._are_assigned = {}, False
            return status.devices
        claimed = [uuid for uuid in self._claimed() if is_device_uuid(uuid)]
        devices = [EngineDevice(index, uuid=uuid) for index, uuid in enumerate(claimed)]
        devices = devices or list_assigned_devices(self._sources.values())
        self._are_assigned = bool(devices)
        return devices

    def _list_pids(self) -> list[int]:
        # Empty if not all are known: a helper process would then be another user of the device.
        first, pids = self._processes.main_process, list(self._processes.get_labels())
        return sorted(pids, key=lambda pid: first is None or pid != first.pid)

    def read_device_use(self) -> list[tuple[str, DeviceBytes, DeviceUsers | None]] | None:
        """Return UUID, memory and users of each known device of the engine, from NVML.

        None if no device is known, or if the memory of a device is unknown.
        """
        nvml = self._sources["nvml"]
        uses = []
        for uuid in self._uuids.values():
            memory = nvml.read_memory(uuid)
            if memory is None:
                return None
            users = nvml.read_users(uuid) if isinstance(nvml, Nvml) else None
            uses.append((uuid, memory, users))
        return uses or None

    def explain_unused_sources(self) -> list[str]:
        """Return the reason why each unused source of device memory provides no data."""
        return explain_unused_sources(self._sources, self.device_source, list(self._uuids.values()))

    def _choose_source(self) -> str | None:
        for name, source in self._sources.items():
            if self._uuids and all(source.read_memory(uuid) for uuid in self._uuids.values()):
                return name
        return None

    def _read_device(
        self,
        source_name: str | None,
        index: int,
        uuid: str,
        engine_device: EngineDevice | None,
        sharing_reason: str | None,
    ) -> Device:
        memory = self._sources[source_name].read_memory(uuid) if source_name is not None else None
        return Device(
            index=index,
            used=memory.used if memory else None,
            total=memory.total if memory else None,
            torch=_make_torch(engine_device) if engine_device else None,
            shared=sharing_reason,
        )


def make_load(status: Status) -> SampleLoad:
    """Return the engine's load, with unknown values unless a worker of this epoch runs."""
    if status.report_age_s is None or status.state not in WORKING_STATES:
        return SampleLoad()
    return copy.copy(status.load)


def _sum_allocator_memory(status: Status) -> Malloc | None:
    # With probes, the sum covers all processes with a probe.
    processes = status.processes
    # A standby is idle: all of its memory is in the ledger.
    workers = [p for p in processes if p.role is Role.WORKER and p.name != STANDBY_PROCESS_NAME]
    if status.probed:
        workers = [p for p in processes if p.python_objects is not None]
    malloc = Malloc(
        in_use=_sum_known(p.malloc_in_use for p in workers),
        retained=_sum_known(p.malloc_retained for p in workers),
        python_objects=_sum_known(p.python_objects for p in workers),
        py_blocks=_sum_known(p.py_blocks for p in workers),
        full_collections=min(
            (p.full_collections for p in processes if p.full_collections is not None),
            default=None,
        ),
    )
    return None if malloc.in_use is None and malloc.python_objects is None else malloc


def _sum_known(values: Iterable[int | None]) -> int | None:
    every = list(values)
    known_values = [value for value in every if value is not None]
    return sum(known_values) if known_values and len(known_values) == len(every) else None


def _make_torch(device: EngineDevice) -> Torch | None:
    if device.torch_allocated is None and device.torch_reserved is None:
        return None
    return Torch(allocated=device.torch_allocated, reserved=device.torch_reserved)


def find_signals(sample: Sample, is_shm_monitored: bool = False) -> dict[str, Signal]:
    """Return the signals of the sample by name, each with the reason if it is missing."""
    host = sample.host
    signals = {
        "engine": _make_signal(sample.scrape_ok, SignalReason.ENGINE_SILENT, ""),
        "host": _make_signal(
            any(size is not None for size in (host.cgroup_anon, host.rss_anon)),
            SignalReason.HOST_MEMORY_UNREADABLE,
            "cannot read the memory of the engine's processes, because no process runs or "
            "another user owns the processes: run the engine as the supervisor's user",
        ),
    }
    if sample.device:
        signals["device"] = _make_signal(
            any(device.used is not None for device in sample.device),
            SignalReason.DEVICE_MEMORY_UNREADABLE,
            "no source reports the device memory in use",
        )
    if is_shm_monitored:
        signals["shared_memory"] = _make_signal(
            host.shm_orphan is not None,
            SignalReason.SHARED_MEMORY_UNREADABLE,
            "cannot read the files in /dev/shm or the processes that use them",
        )
    return signals


def _make_signal(is_known: bool, reason: SignalReason, message: str) -> Signal:
    return Signal(True) if is_known else Signal(False, reason, message)


class SignalLog:
    """Logs each signal that has been missing for :data:`MIN_MISSING_LOG_S`, and its return."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, tuple[str, float]] = {}
        self._logged: dict[str, str] = {}

    def update(self, signals: Mapping[str, Signal]) -> None:
        """Add the signals of one sample."""
        now = self._clock()
        for name, signal in signals.items():
            reason, since = self._since.get(name, ("", now))
            if signal.reason != reason:
                self._since[name] = signal.reason, now
                since = now
            told = self._logged.get(name, "")
            if told != signal.reason and (signal.ok or now - since >= MIN_MISSING_LOG_S):
                self._logged[name] = signal.reason
                if signal.ok:
                    log.info("signal %s is available again", name)
                else:
                    log.warning(
                        "signal %s is missing for the reason %s: %s",
                        name,
                        signal.reason,
                        signal.message,
                    )
