"""Measure device memory from outside the engine: through NVML or a metrics exporter.

NVML lists only the processes in the PID namespace of its caller (driver 580, H100). It serves for
the totals of a device, and for hints about its other users.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import msgspec

from plimsoll_api.admin import DeviceMemory
from plimsoll_api.supervisor_config import (
    AMD_EXPORTER_PORT_ENV,
    DCGM_EXPORTER_PORT_ENV,
    NODE_IP_ENV,
)
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.signals.metrics_page import MAX_METRIC_VALUE, make_sample_reader

log = logging.getLogger(__name__)

# By default, the exporters collect data only every 30 s.
SCRAPE_PERIOD_S = 10.0
SCRAPE_TIMEOUT_S = 2.0
MAX_EXPORTER_SAMPLES = 4096
MIB = 1 << 20
NVML_FIRST_RETRY_PAUSE_S, NVML_MAX_RETRY_PAUSE_S = 5.0, 300.0
NVML_MEMORY_CALL = "nvmlDeviceGetMemoryInfo"
# Errors of one device, as opposed to the driver (nvml.h): invalid argument, not supported, no
# permission, not found.
NVML_DEVICE_ERRORS = (2, 3, 4, 6)
LABEL_PATTERN = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\.)*+)"')


class DeviceBytes(msgspec.Struct, frozen=True):
    """Memory of a whole device in bytes."""

    used: int
    total: int


class DeviceUsers(msgspec.Struct, frozen=True):
    """Users of a device that the driver reports in this PID namespace.

    ``processes`` maps PIDs to bytes; None if unknown. ``other_bytes`` belongs to the driver or to
    processes in other PID namespaces.
    """

    processes: dict[int, int | None]
    other_bytes: int | None
    mps_clients: int


class DeviceSource(Protocol):
    """Source of device memory: NVML or an exporter."""

    def read_memory(self, uuid: str) -> DeviceBytes | None:
        """Return the memory of the device ``uuid`` (``GPU-…`` or ``MIG-…``); None if unknown."""

    @property
    def error(self) -> str | None:
        """Reason why values are missing; None if the source works or was not queried."""


NOT_CONFIGURED_MESSAGES = {
    "dcgm": (
        "the DCGM exporter has no configured port: set dcgmExporterPort, or plimsoll inject "
        "--dcgm-exporter-port"
    ),
    "amd": (
        "AMD's exporter has no configured port: set amdExporterPort, or plimsoll inject "
        "--amd-exporter-port"
    ),
}


def select_available_sources(
    nvml: DeviceSource, dcgm: DeviceSource | None, amd: DeviceSource | None
) -> dict[str, DeviceSource]:
    """Return the sources that exist, by name, in order of preference."""
    sources = {"nvml": nvml, "dcgm": dcgm, "amd": amd}
    return {name: source for name, source in sources.items() if source is not None}


def list_assigned_devices(sources: Iterable[DeviceSource]) -> list[DeviceMemory]:
    """Return this pod's devices from the first exporter that names any."""
    for source in sources:
        names = source.list_assigned_devices() if isinstance(source, Exporter) else []
        if names:
            return [DeviceMemory(index=index, uuid=name) for index, name in enumerate(names)]
    return []


def explain_unused_sources(
    sources: Mapping[str, DeviceSource], used_source: str | None, devices: list[str]
) -> list[str]:
    """Return the reason why each source except ``used_source`` provides no data."""
    reasons: list[str] = []
    if not devices and used_source is None:
        reasons.append(
            "no environment variable, open file, resource claim or exporter names a device of the"
            " engine"
        )
    for name in ("nvml", "dcgm", "amd"):
        source = sources.get(name)
        if name == used_source:
            continue
        if source is None:
            reasons.append(
                f"{name}: {NOT_CONFIGURED_MESSAGES.get(name, 'the source was not tried')}"
            )
            continue
        unknown = [device for device in devices if source.read_memory(device) is None]
        if source.error is not None:
            reasons.append(f"{name}: {source.error}")
        elif unknown:
            reasons.append(
                f"{name}: the source does not report the memory of {', '.join(unknown[:4])}"
            )
    return reasons


class Nvml:
    """NVML, which is loaded on first use.

    The driver may start after the supervisor, so NVML is initialized again after each failure.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self.error: str | None = None
        self._library: Any = None
        self._handles: dict[str, Any] = {}
        self._next_at = -math.inf
        self._back_off = NVML_FIRST_RETRY_PAUSE_S

    def read_memory(self, uuid: str) -> DeviceBytes | None:
        """Return used and total bytes of the device; None if unknown."""
        info = self._query_device(uuid, NVML_MEMORY_CALL)
        return None if info is None else DeviceBytes(used=int(info.used), total=int(info.total))

    def read_users(self, uuid: str) -> DeviceUsers | None:
        """Return the users of the device; None if the driver does not report them."""
        before = self.read_memory(uuid)
        processes = self._query_device(uuid, "nvmlDeviceGetComputeRunningProcesses")
        clients = self._query_device(uuid, "nvmlDeviceGetMPSComputeRunningProcesses") or ()
        after = self.read_memory(uuid)
        if before is None or processes is None or after is None:
            return None
        sizes = {int(process.pid): process.usedGpuMemory for process in processes}
        known_sizes = [int(size) for size in sizes.values() if size is not None]
        # A process may allocate or free memory between the calls.
        elsewhere = min(before.used, after.used) - sum(known_sizes)
        return DeviceUsers(
            sizes, elsewhere if len(known_sizes) == len(sizes) else None, len(clients)
        )

    def describe(self) -> str:
        """Return the driver version and the number of devices, or why NVML is unavailable."""
        if not self._initialize():
            return str(self.error)
        library = self._library
        try:
            count, driver = library.nvmlDeviceGetCount(), library.nvmlSystemGetDriverVersion()
        except library.NVMLError as error:
            return f"NVML: {error}"
        return f"NVML: driver version {driver}, {count} devices"

    def _query_device(self, uuid: str, function_name: str) -> Any:
        if not self._initialize():
            return None
        library = self._library
        try:
            handle = self._handles.get(uuid)
            if handle is None:
                handle = self._handles[uuid] = library.nvmlDeviceGetHandleByUUID(uuid)
            answer = getattr(library, function_name)(handle)
        except library.NVMLError as error:
            self._handles.pop(uuid, None)
            # Not every driver and every device can list its users, which is only a hint.
            if function_name != NVML_MEMORY_CALL:
                return None
            if getattr(error, "value", None) in NVML_DEVICE_ERRORS:
                self.error = str(error)
            else:
                with contextlib.suppress(library.NVMLError):
                    library.nvmlShutdown()
                self._record_failure(f"NVML: {error}")
            return None
        self.error = None if function_name == NVML_MEMORY_CALL else self.error
        self._back_off = NVML_FIRST_RETRY_PAUSE_S
        return answer

    def _initialize(self) -> bool:
        if self._library is not None:
            return True
        if self._clock() < self._next_at:
            return False
        try:
            import pynvml
        except ImportError as error:
            self._next_at, self.error = math.inf, f"NVML: {error}"
            return False
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self._record_failure(f"NVML: {error}")
            return False
        if self.error is not None:
            log.info("NVML is available again after the error: %s", self.error)
        self._library, self.error = pynvml, None
        return True

    def _record_failure(self, error: str) -> None:
        if error != self.error:
            log.info("NVML is unavailable, and will be initialized again later: %s", error)
        self.error = error
        self._library, self._handles = None, {}
        self._next_at = self._clock() + self._back_off
        self._back_off = min(2 * self._back_off, NVML_MAX_RETRY_PAUSE_S)


class PodContainer(NamedTuple):
    """A pod and one of its containers, or all its containers if ``container`` is empty."""

    namespace: str
    name: str
    container: str = ""

    @classmethod
    def from_environment(cls, container: str = "") -> PodContainer | None:
        """Return the pod of this process; None outside a pod."""
        name, namespace = os.environ.get("POD_NAME"), os.environ.get("POD_NAMESPACE")
        return cls(namespace, name, container) if name and namespace else None

    @classmethod
    def from_labels(cls, labels: dict[str, str]) -> PodContainer:
        """Return the pod and the container that a sample's labels name."""
        return cls(labels.get("namespace", ""), labels.get("pod", ""), labels.get("container", ""))

    def is_same(self, other: PodContainer) -> bool:
        """Report whether ``other`` may be the same container of the same pod."""
        if not self.name or (self.namespace, self.name) != (other.namespace, other.name):
            return False
        return not (self.container and other.container) or self.container == other.container

    def __str__(self) -> str:
        # Each part is cut, because a page may contain any text.
        return "/".join(part[:63] for part in self if part)


class ExporterSample(NamedTuple):
    """One sample of an exporter's page."""

    metric: str
    labels: dict[str, str]
    value: float


def make_node_url(port: str | None) -> str | None:
    """Return the URL of ``port`` on the pod's node; None if either is unknown."""
    host = os.environ.get(NODE_IP_ENV)
    if not host or not port:
        return None
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Exporter(ABC):
    """A metrics exporter.

    If its page cannot be read, all devices are unknown, and ``error`` is the reason. ``pod`` is the
    engine's pod and container; if it is None, each owner of a device may be the engine.
    """

    PORT_ENV: ClassVar[str]
    METRICS: ClassVar[tuple[str, ...]]

    def __init__(
        self, url: str, clock: Callable[[], float] = time.monotonic, pod: PodContainer | None = None
    ) -> None:
        self._server, self._clock, self._pod = HttpClient(url), clock, pod
        self._samples = make_sample_reader(self.METRICS)
        self._next_at = 0.0
        self._rows: list[ExporterSample] = []
        self.error: str | None = None

    @classmethod
    def from_environment(cls, pod: PodContainer | None = None) -> Self | None:
        """Return the exporter on this node; None if the environment names no port."""
        url = make_node_url(os.environ.get(cls.PORT_ENV))
        return cls(url, pod=pod) if url is not None else None

    def read_samples(self) -> list[ExporterSample]:
        """Return the samples of a page that is at most :data:`SCRAPE_PERIOD_S` old."""
        now = self._clock()
        if now >= self._next_at:
            self._next_at = now + SCRAPE_PERIOD_S
            self._rows, self.error = [], None
            try:
                status, page = self._server.call("GET", "/metrics", SCRAPE_TIMEOUT_S)
            except EngineError as error:
                self.error = str(error)
                return self._rows
            if status != 200:
                self.error = f"GET /metrics returned HTTP {status}"
                return self._rows
            self._rows = list(self._parse_page(page))
            if not self._rows:
                self.error = "the metrics page has no samples of device memory"
        return self._rows

    def _parse_page(self, page: bytes) -> Iterator[ExporterSample]:
        for number, (metric, labels, value) in enumerate(self._samples(page)):
            if number >= MAX_EXPORTER_SAMPLES:
                return
            if labels is not None and math.isfinite(value) and 0 <= value < MAX_METRIC_VALUE:
                yield ExporterSample(
                    metric, dict(LABEL_PATTERN.findall(labels.decode(errors="replace"))), value
                )

    def find_values(self, uuid: str) -> dict[str, float]:
        """Return the largest value of each metric of the device, by metric name."""
        values: dict[str, float] = {}
        for row in self.read_samples():
            if self.get_device_name(row.labels) == uuid:
                values[row.metric] = max(row.value, values.get(row.metric, 0.0))
        return values

    def list_assigned_devices(self) -> list[str]:
        """Return the names of the pod's devices; empty if the samples have no pod labels."""
        if self._pod is None:
            return []
        rows = [row.labels for row in self.read_samples()]
        mine = [labels for labels in rows if self._pod.is_same(PodContainer.from_labels(labels))]
        return sorted({name for labels in mine if (name := self.get_device_name(labels))})

    def find_owners(self, uuid: str) -> set[PodContainer]:
        """Return the known containers to which the device is assigned."""
        labels = [
            row.labels for row in self.read_samples() if self.get_device_name(row.labels) == uuid
        ]
        return {
            PodContainer.from_labels(sample_labels)
            for sample_labels in labels
            if sample_labels.get("pod")
        }

    def is_own_container(self, owner: PodContainer) -> bool:
        """Report whether ``owner`` is the engine's container; True if unknown."""
        return self._pod is None or self._pod.is_same(owner)

    @staticmethod
    @abstractmethod
    def get_device_name(labels: dict[str, str]) -> str:
        """Return the name of the device in ``labels``, as ``read_memory`` takes it."""


class Dcgm(Exporter):
    """The DCGM exporter, which reports MiB by UUID.

    The samples of a MIG slice have the UUID of the whole device and the ID of the GPU instance.
    """

    PORT_ENV = DCGM_EXPORTER_PORT_ENV
    METRICS = USED, FREE, RESERVED = tuple(
        f"DCGM_FI_DEV_FB_{name}" for name in ("USED", "FREE", "RESERVED")
    )

    def read_memory(self, uuid: str) -> DeviceBytes | None:
        """Return used and total bytes; None unless the page has both."""
        # Memory belongs to the GPU instance, not to the compute instance.
        values = self.find_values("/".join(uuid.split("/")[:2]))
        used, free = values.get(self.USED), values.get(self.FREE)
        if used is None or free is None:
            return None
        whole = used + free + values.get(self.RESERVED, 0.0)
        return DeviceBytes(used=int(used * MIB), total=int(whole * MIB))

    @staticmethod
    def get_device_name(labels: dict[str, str]) -> str:
        """Return ``GPU-UUID``, or ``MIG-GPU-UUID/INSTANCE`` for a MIG slice."""
        uuid, part = labels.get("UUID", ""), labels.get("GPU_I_ID", "")
        return f"MIG-{uuid}/{part}" if part else uuid


class AmdExporter(Exporter):
    """AMD's device-metrics-exporter, which reports MiB by the number of a device on its node."""

    PORT_ENV = AMD_EXPORTER_PORT_ENV
    METRIC_PREFIX = "amd_"
    USED, TOTAL = "gpu_used_vram", "gpu_total_vram"
    METRICS = USED, TOTAL, METRIC_PREFIX + USED, METRIC_PREFIX + TOTAL

    def read_memory(self, uuid: str) -> DeviceBytes | None:
        """Return used and total bytes; None unless the page has both."""
        values = {
            n.removeprefix(self.METRIC_PREFIX): value for n, value in self.find_values(uuid).items()
        }
        used, total = values.get(self.USED), values.get(self.TOTAL)
        if used is None or total is None:
            return None
        return DeviceBytes(used=int(used * MIB), total=int(total * MIB))

    @staticmethod
    def get_device_name(labels: dict[str, str]) -> str:
        """Return ``AMD-`` and the number of the device; empty without a number."""
        number = labels.get("gpu_id", "")
        return f"AMD-{number}" if number else ""
