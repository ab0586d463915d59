"""Memory of a device from outside the engine: by NVML if this container has it, or an exporter.

NVML lists the processes of its caller's PID namespace alone (driver 580, H100), and earlier drivers
listed all, by PIDs of the host: device-level figures only, and hints of who else is there.
Devices are matched by UUID: NVML's order is not CUDA's. Absent is unknown, never an error. An
exporter's page has one sample per device, and labels with the pod that has the device.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import msgspec

from plimsoll_api.admin import DeviceMemory
from plimsoll_api.supervisor_config import AMD_EXPORTER_PORT, EXPORTER_PORT, NODE_IP
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.signals.metrics_page import LARGEST, samples

log = logging.getLogger(__name__)

SCRAPE_S = 10.0
"""The exporters themselves collect every 30 s by default."""
ANSWER_S = 2.0
MAX_ROWS = 4096
MIB = 1 << 20
NVML_AGAIN_S, NVML_AGAIN_MAX_S = 5.0, 300.0
"""Between starts of NVML: at first, and at most."""
MEMORY = "nvmlDeviceGetMemoryInfo"
ABOUT_THE_DEVICE = (2, 3, 4, 6)
"""Errors of nvml.h that say nothing of the driver: an argument is invalid, something is not
supported, not permitted or not found."""
LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\.)*+)"')


class DeviceBytes(msgspec.Struct, frozen=True):
    """The memory of a whole device, in bytes."""

    used: int
    total: int


class DeviceUsers(msgspec.Struct, frozen=True):
    """Who uses a device, as far as a driver tells it in this PID namespace.

    ``processes`` has the bytes of each by PID, None where they are unknown. ``elsewhere`` is what
    is in use beside them: the driver's own, and that of processes which cannot be seen from here.
    ``mps`` counts the clients of an MPS server.
    """

    processes: dict[int, int | None]
    elsewhere: int | None
    mps: int


class DeviceSource(Protocol):
    """Where bytes of a device are read: NVML or an exporter's page."""

    def memory(self, uuid: str) -> DeviceBytes | None:
        """Memory of the device ``uuid`` (``GPU-…`` or ``MIG-…``); None where it is unknown."""

    @property
    def error(self) -> str | None:
        """Why nothing is known, for people; None where something is, or nothing was asked."""


@runtime_checkable
class Assigns(Protocol):
    """A source that also knows which devices the pod has."""

    def assigned(self) -> list[str]:
        """Return the devices that were given to this pod, in the words that ``memory`` takes."""


NOT_ASKED = {
    "dcgm": "no port is set (dcgmExporterPort, or --dcgm-exporter-port of plimsoll inject)",
    "amd": "no port is set (amdExporterPort, or --amd-exporter-port of plimsoll inject)",
}


def outside(
    nvml: DeviceSource, dcgm: DeviceSource | None, amd: DeviceSource | None
) -> dict[str, DeviceSource]:
    """By name, the best first."""
    found = {"nvml": nvml, "dcgm": dcgm, "amd": amd}
    return {name: source for name, source in found.items() if source is not None}


def assigned(sources: Iterable[DeviceSource]) -> list[DeviceMemory]:
    """Return what the first exporter that names pods says was given to this one."""
    for source in sources:
        names = source.assigned() if isinstance(source, Assigns) else []
        if names:
            return [DeviceMemory(index=index, uuid=name) for index, name in enumerate(names)]
    return []


def reasons(
    sources: Mapping[str, DeviceSource], in_use: str | None, devices: list[str]
) -> list[str]:
    """Why each source that is not in use tells nothing.

    ``devices`` are the engine's, as far as they could be named.
    """
    found: list[str] = []
    if not devices and in_use is None:
        found.append("no variable, open file or exporter names a device of the engine")
    for name in ("nvml", "dcgm", "amd"):
        source = sources.get(name)
        if name == in_use:
            continue
        if source is None:
            found.append(f"{name}: {NOT_ASKED.get(name, 'not tried')}")
            continue
        unknown = [device for device in devices if source.memory(device) is None]
        if source.error is not None:
            found.append(f"{name}: {source.error}")
        elif unknown:
            found.append(f"{name}: has no memory of {', '.join(unknown[:4])}")
    return found


class Nvml:
    """The NVIDIA library, loaded at its first use.

    A driver may come up after the supervisor, and may be loaded anew under it. So a failure is no
    last word: the library is started again, sooner at first and then every few minutes. ``error``
    says why there is none, for people; the log has one line for each change.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self.error: str | None = None
        self._library: Any = None
        self._handles: dict[str, Any] = {}
        self._next = -math.inf
        self._back_off = NVML_AGAIN_S

    def memory(self, uuid: str) -> DeviceBytes | None:
        """Return used and total bytes of the whole device ``uuid`` (``GPU-…`` or ``MIG-…``)."""
        info = self._ask(uuid, MEMORY)
        return None if info is None else DeviceBytes(used=int(info.used), total=int(info.total))

    def users(self, uuid: str) -> DeviceUsers | None:
        """Return who uses the device; None where the driver does not say."""
        before = self.memory(uuid)
        found = self._ask(uuid, "nvmlDeviceGetComputeRunningProcesses")
        clients = self._ask(uuid, "nvmlDeviceGetMPSComputeRunningProcesses") or ()
        after = self.memory(uuid)
        if before is None or found is None or after is None:
            return None
        sizes = {int(one.pid): one.usedGpuMemory for one in found}
        known = [int(size) for size in sizes.values() if size is not None]
        # What a process takes or gives back between the calls is nobody else's.
        elsewhere = min(before.used, after.used) - sum(known)
        return DeviceUsers(sizes, elsewhere if len(known) == len(sizes) else None, len(clients))

    def describe(self) -> str:
        """Return what NVML says in this container, for people: its driver, or why there is none."""
        if not self._load():
            return str(self.error)
        library = self._library
        try:
            count, driver = library.nvmlDeviceGetCount(), library.nvmlSystemGetDriverVersion()
        except library.NVMLError as error:
            return f"NVML: {error}"
        return f"NVML: driver {driver}, {count} devices"

    def _ask(self, uuid: str, question: str) -> Any:
        if not self._load():
            return None
        library = self._library
        try:
            handle = self._handles.get(uuid)
            if handle is None:
                handle = self._handles[uuid] = library.nvmlDeviceGetHandleByUUID(uuid)
            answer = getattr(library, question)(handle)
        except library.NVMLError as error:
            self._handles.pop(uuid, None)
            if getattr(error, "value", None) in ABOUT_THE_DEVICE:
                self.error = str(error) if question == MEMORY else self.error
            else:
                with contextlib.suppress(library.NVMLError):
                    library.nvmlShutdown()
                self._failed(f"NVML: {error}")
            return None
        self.error = None if question == MEMORY else self.error
        self._back_off = NVML_AGAIN_S
        return answer

    def _load(self) -> bool:
        if self._library is not None:
            return True
        if self._clock() < self._next:
            return False
        try:
            import pynvml
        except ImportError as error:
            self._next, self.error = math.inf, f"NVML: {error}"
            return False
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self._failed(f"NVML: {error}")
            return False
        if self.error is not None:
            log.info("NVML answers, after: %s", self.error)
        self._library, self.error = pynvml, None
        return True

    def _failed(self, error: str) -> None:
        if error != self.error:
            log.info("%s; it is tried again every few minutes", error)
        self.error = error
        self._library, self._handles = None, {}
        self._next = self._clock() + self._back_off
        self._back_off = min(2 * self._back_off, NVML_AGAIN_MAX_S)


class Pod(NamedTuple):
    """The owner of the devices to look for; an empty container is any of the pod's."""

    namespace: str
    name: str
    container: str = ""

    @classmethod
    def of_environment(cls, container: str = "") -> Pod | None:
        """Return the pod that this process runs in; None outside of one."""
        name, namespace = os.environ.get("POD_NAME"), os.environ.get("POD_NAMESPACE")
        return cls(namespace, name, container) if name and namespace else None

    @classmethod
    def of_labels(cls, labels: dict[str, str]) -> Pod:
        """Return the owner that a row names."""
        return cls(labels.get("namespace", ""), labels.get("pod", ""), labels.get("container", ""))

    def is_same(self, other: Pod) -> bool:
        """Return whether ``other`` may be this container; without a name it is any of its pod."""
        if not self.name or (self.namespace, self.name) != (other.namespace, other.name):
            return False
        return not (self.container and other.container) or self.container == other.container

    def __str__(self) -> str:
        """Return what a person calls it, bounded: a page may hold any text."""
        return "/".join(part[:63] for part in self if part)


class Row(NamedTuple):
    """One sample of the page."""

    metric: str
    labels: dict[str, str]
    value: float


def node_url(port: str | None) -> str | None:
    """Return the address of the pod's node at ``port``; None where either is unknown."""
    host = os.environ.get(NODE_IP)
    if not host or not port:
        return None
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Exporter:
    """An exporter at ``url``, which has no path.

    If the page cannot be read, all devices are unknown, and ``error`` says why, for people. ``pod``
    is the pod whose devices are wanted, None for no pod.
    """

    PORT: ClassVar[str]
    """Environment variable with the exporter's port."""
    METRICS: ClassVar[tuple[str, ...]]

    def __init__(
        self, url: str, clock: Callable[[], float] = time.monotonic, pod: Pod | None = None
    ) -> None:
        self._server, self._clock, self._pod = HttpClient(url), clock, pod
        self._samples = samples(self.METRICS)
        self._next = 0.0
        self._rows: list[Row] = []
        self.error: str | None = None

    @classmethod
    def of_node(cls, pod: Pod | None = None) -> Self | None:
        """Return the exporter that the environment names, None if it names none."""
        url = node_url(os.environ.get(cls.PORT))
        return cls(url, pod=pod) if url is not None else None

    def rows(self) -> list[Row]:
        """Return the newest samples, read once every :data:`SCRAPE_S`."""
        now = self._clock()
        if now >= self._next:
            self._next = now + SCRAPE_S
            self._rows, self.error = [], None
            try:
                status, page = self._server.call("GET", "/metrics", ANSWER_S)
            except EngineError as error:
                self.error = str(error)
                return self._rows
            if status != 200:
                self.error = f"GET /metrics: HTTP {status}"
                return self._rows
            self._rows = list(self._parsed(page))
            if not self._rows:
                self.error = "its metrics contain no device memory"
        return self._rows

    def _parsed(self, page: bytes) -> Iterator[Row]:
        for number, (metric, labels, value) in enumerate(self._samples(page)):
            if number >= MAX_ROWS:
                return
            if labels is not None and math.isfinite(value) and 0 <= value < LARGEST:
                yield Row(metric, dict(LABEL.findall(labels.decode(errors="replace"))), value)

    def values(self, uuid: str) -> dict[str, float]:
        """Return the device's metrics by name.

        A device that several pods share has a row for each of them, with the figures of the whole.
        """
        found: dict[str, float] = {}
        for row in self.rows():
            if self.device(row.labels) == uuid:
                found[row.metric] = max(row.value, found.get(row.metric, 0.0))
        return found

    def assigned(self) -> list[str]:
        """Return the devices that the page says are the pod's; empty where it names no pods."""
        if self._pod is None:
            return []
        rows = [row.labels for row in self.rows()]
        mine = [labels for labels in rows if self._pod.is_same(Pod.of_labels(labels))]
        return sorted({name for labels in mine if (name := self.device(labels))})

    def owners(self, uuid: str) -> set[Pod]:
        """Return the containers that the page says have the device; empty where it names none.

        An exporter may name only one of those that share a device.
        """
        labels = [row.labels for row in self.rows() if self.device(row.labels) == uuid]
        return {Pod.of_labels(one) for one in labels if one.get("pod")}

    def is_mine(self, owner: Pod) -> bool:
        """Return whether ``owner`` is the container whose devices are wanted."""
        return self._pod is None or self._pod.is_same(owner)

    @staticmethod
    def device(labels: dict[str, str]) -> str:
        """Return the name of a row's device, as ``memory`` takes it."""
        raise NotImplementedError


class Dcgm(Exporter):
    """The DCGM exporter: MiB by UUID; a slice of a device in MIG mode by the UUID of the whole.

    The id of the GPU instance identifies the slice. If the exporter's Kubernetes mapping is on, the
    page also says which pod has each device.
    """

    PORT = EXPORTER_PORT
    METRICS = USED, FREE, RESERVED = tuple(
        f"DCGM_FI_DEV_FB_{name}" for name in ("USED", "FREE", "RESERVED")
    )

    def memory(self, uuid: str) -> DeviceBytes | None:
        """Return used and total bytes; None where the page does not have both for the device."""
        # Without the compute instance: memory belongs to the GPU instance.
        found = self.values("/".join(uuid.split("/")[:2]))
        used, free = found.get(self.USED), found.get(self.FREE)
        if used is None or free is None:
            return None
        whole = used + free + found.get(self.RESERVED, 0.0)
        return DeviceBytes(used=int(used * MIB), total=int(whole * MIB))

    @staticmethod
    def device(labels: dict[str, str]) -> str:
        """``GPU-…``, or ``MIG-GPU-…/GI`` for a slice."""
        uuid, part = labels.get("UUID", ""), labels.get("GPU_I_ID", "")
        return f"MIG-{uuid}/{part}" if part else uuid


class AmdExporter(Exporter):
    """AMD's device-metrics-exporter: MiB by the device's number on its node.

    It can be configured to put a prefix before its names. The labels ``pod``, ``namespace`` and
    ``container`` cannot be turned off, so they always say which devices are the pod's.
    """

    PORT = AMD_EXPORTER_PORT
    PREFIX = "amd_"
    USED, TOTAL = "gpu_used_vram", "gpu_total_vram"
    METRICS = USED, TOTAL, PREFIX + USED, PREFIX + TOTAL

    def memory(self, uuid: str) -> DeviceBytes | None:
        """Return used and total bytes; None where the page does not have both for the device."""
        found = {n.removeprefix(self.PREFIX): value for n, value in self.values(uuid).items()}
        used, total = found.get(self.USED), found.get(self.TOTAL)
        if used is None or total is None:
            return None
        return DeviceBytes(used=int(used * MIB), total=int(total * MIB))

    @staticmethod
    def device(labels: dict[str, str]) -> str:
        """``AMD-`` and the number."""
        number = labels.get("gpu_id", "")
        return f"AMD-{number}" if number else ""
