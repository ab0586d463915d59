"""What engines, supervisors and exporters say of their figures, and the operator of all of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from plimsoll_api.assessment import Assessment, BudgetState, Suspicion
from plimsoll_api.engines import EngineType
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.learned import (
    LEARNED_FILE,
    MAX_LEARNED_BYTES,
    LearnedMemory,
    decode_learned_workloads,
)
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy, parse_growth_budget
from plimsoll_api.pod_devices import DEVICE_HEALTH_FILE, MAX_DEVICE_CHARS, MAX_POD_DEVICES_BYTES
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_operator.fleet import supervisor_metrics
from plimsoll_operator.fleet.learned import make_learned_file
from plimsoll_operator.fleet.replicas import Replica
from plimsoll_operator.status.recommendation import make_recommendation
from plimsoll_sidecar.act.adapters.external_load import ExternalLoad
from plimsoll_sidecar.act.adapters.external_profile import SGLANG, VLLM
from plimsoll_sidecar.act.adapters.plimsoll_engine import PlimsollEngine
from plimsoll_sidecar.clients.http import MAX_BODY_BYTES, HttpClient
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.govern.auto_budget import LearnedBudgets
from plimsoll_sidecar.govern.command import EngineView
from plimsoll_sidecar.govern.governor import Governor
from plimsoll_sidecar.govern.group import add_device_health
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.signals.cgroup import CgroupMemory
from plimsoll_sidecar.signals.device_memory import Dcgm
from plimsoll_sidecar.signals.other_pods import LearnedFile, PodDevicesFile
from plimsoll_sidecar.signals.sampler import Sampler, find_signals
from tests.fuzz.watched import Target

LARGE = 1 << 20
NUMBERS = (
    "+Inf", "-Inf", "NaN", "1e308", "1e999", "-1", "0x10", "1_0", "18446744073709551616",
    "0.0000001", "\xa0", "{", "}", '"', "\\\\", "# HELP ", "# EOF", " 1 1700000000\n",
)  # fmt: skip
MEMORY = MemoryPolicy(
    host=MemoryBudget(growth_bytes=64 << 20, window_s=3600),
    device=MemoryBudget(growth_bytes=64 << 20, window_s=3600),
    warmup_s=0.0,
)
UUID = "GPU-1"


def make(name: str, folder: Path) -> Target:
    return {
        "operator-page": _operator,
        "engine-page": _external,
        "exporter-page": _exporter,
        "status": _status,
        "learned": _learned,
        "device-health": _device_health,
    }[name](folder)


class Page(HttpClient):
    """A server that answers every call with ``content``."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.content = b""

    def call(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: bytes | None = None,
        max_bytes: int = MAX_BODY_BYTES,
    ) -> tuple[int, bytes]:
        return 200, self.content


def _operator(folder: Path) -> Target:
    """The operator and a supervisor's page. No page has any error to declare."""

    def run(data: bytes) -> None:
        found = supervisor_metrics.parse_metrics_page(data)
        msgspec.json.encode(supervisor_metrics.make_memory_status({"pod-0": found}))
        make_recommendation(None, "1", [found], MEMORY, 1 << 30, "2026-11-26T12:00:00Z")

    ratio = 'plimsoll_memory_budget_consumed_ratio{kind="host"} '
    left = "plimsoll_restart_budget_remaining "
    large = lambda: (  # noqa: E731
        (ratio + "1\n").encode() * (LARGE // 60),
        ratio.encode() + b"1" * LARGE,
        left.encode() + b"9" * LARGE,
        left.encode() + b"{" * LARGE,
        b"\n" * LARGE,
    )
    return Target(run, (*NUMBERS, ratio.replace('"', '"'), left), large)


def _external(folder: Path) -> Target:
    """A supervisor and an external engine's page, to the end of what is made of it."""
    page = Page()

    def run(data: bytes) -> None:
        page.content = data
        for profile in (VLLM, SGLANG):
            found = ExternalLoad(page, profile).get_newest_load()
            if found is not None:
                msgspec.json.encode(found[0])
                _judge_load(found[0])

    names = sorted({one.name for profile in (VLLM, SGLANG) for one in profile.iterate_series()})
    return Target(run, (*NUMBERS, *(name + " " for name in names)), _large_pages)


def _judge_load(load: msgspec.Struct) -> None:
    from plimsoll_api.trace import Sample, SampleLoad

    fields = {name: getattr(load, name) for name in SampleLoad.__struct_fields__}
    detector = Detector(MEMORY, 10.0, 1.0)
    for t in range(3):
        sample = Sample(t=float(t), epoch=1, load=SampleLoad(**fields))
        msgspec.json.encode(detector.update(sample).suspicions)


def _large_pages() -> tuple[bytes, ...]:
    name = VLLM.metrics["running"].name.encode()
    return (
        (name + b"{" + b'a="b",' * 5 + b"} 1\n") * (LARGE // 60),
        name + b"{" + b'a="b",' * (LARGE // 6),
        name + b'{a="' + b"\\" * LARGE,
        name + b" " * LARGE,
        (name + b'{a="') * (LARGE // 40),
        name + b" " + b"9" * LARGE,
    )


def _exporter(folder: Path) -> Target:
    """A supervisor and the node's DCGM exporter."""
    page = Page()

    def run(data: bytes) -> None:
        page.content = data
        dcgm = Dcgm("http://127.0.0.1:1")
        dcgm._server = page
        found = dcgm.read_memory(UUID)
        if found is not None:
            assert found.used.bit_length() <= 63, found
            assert found.total.bit_length() <= 63, found

    words = tuple(f'DCGM_FI_DEV_FB_{n}{{UUID="{UUID}"}} ' for n in ("USED", "FREE", "RESERVED"))
    line = f'DCGM_FI_DEV_FB_USED{{UUID="{UUID}"}} '.encode()
    return Target(
        run, (*NUMBERS, *words), lambda: ((line + b"1\n") * (LARGE // 50), line + b"9" * LARGE)
    )


class Answering(PlimsollEngine):
    """An engine that answers every call with the bytes that it was given."""

    def __init__(self, folder: Path) -> None:
        endpoint = EngineEndpoint(
            type=EngineType.PLIMSOLL,
            admin_url="http://127.0.0.1:1",
            serving_url="http://127.0.0.1:1",
        )
        super().__init__(endpoint, folder / "no-token")
        self.answer = b""

    def _call(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None = None,
        timeout_s: float = 0.0,
        max_bytes: int = 0,
    ) -> bytes:
        return self.answer

    def is_serving(self) -> bool:
        return True


def _status(folder: Path) -> Target:
    """Answers of an engine to its supervisor, one a line: each is sampled, judged and shown."""
    engine = Answering(folder)

    def run(data: bytes) -> None:
        clock = _clock()
        sampler = Sampler(engine, clock)
        detector = Detector(MEMORY, 10.0, 1.0)
        governor = Governor(Supervision(mode=Mode.RECOVER), MEMORY, replica="pod-0")
        metrics = Metrics(CgroupMemory)
        metrics.export_budgets(MEMORY)
        for line in data.splitlines()[:8]:
            engine.answer = line
            sample = sampler.sample()
            assessment = detector.update(sample)
            status = sampler.status
            view = EngineView(
                epoch=status.epoch if status else None,
                state=status.state if status else None,
                capabilities=frozenset(status.capabilities) if status else frozenset(),
                replaceable=True,
            )
            turn = governor.advance(assessment, view, sample.t, [])
            known = {name: one.ok for name, one in find_signals(sample).items()}
            metrics.observe(assessment, known, 0.001)
            metrics.render()
            msgspec.json.encode([sample, [event.incident for event in turn.events]])

    fields = (
        "state", "serving", "epoch", "aa:1", "version", "model", "uptime_s", "report_age_s", "load",
        "running", "waiting", "inflight", "steps_total", "requests_total", "processes", "role",
        "worker", "frontend", "pid", "malloc_in_use", "malloc_retained", "python_objects",
        "devices", "index", "uuid", "used", "total", "torch_allocated", "torch_reserved", "ledger",
        "owner", "kind", "host", "device", "bytes", "bound", "capabilities", "restart_worker",
        "kv_usage_ratio", "kv_lost_ratio", "injections", "worker_starts",
    )  # fmt: skip
    words = (*(f'"{field}"' for field in fields), "9007199254740992", "9007199254740993")
    large = lambda: (  # noqa: E731
        b'{"processes":[' + b'{"role":"worker","pid":1},' * (LARGE // 30),
        b'{"state":' + b"[" * LARGE,
        b'{"unknown":' + b"[" * LARGE,
        b"\n" * LARGE,
    )
    return Target(run, (*NUMBERS, *words), large)


def _large_file(start: bytes, item: bytes, max_bytes: int, text: bytes) -> tuple[bytes, ...]:
    """Deep nesting, as many times ``item`` after ``start`` as a file may have, and a long text."""
    return b"[" * LARGE, start + item * (max_bytes // len(item)), text + b"a" * LARGE


def _learned(folder: Path) -> Target:
    """A new supervisor, and the operator, that read what replicas have learned."""
    path = folder / LEARNED_FILE
    memory = MemoryPolicy(host=parse_growth_budget("Auto"), device=parse_growth_budget("Auto"))
    host = BudgetState(current=4 << 30, baseline=4 << 30, unexplained=0, limit=16 << 30)
    seen = Assessment(t=1.0, epoch=1, warm=True, host=host, device=host)
    replicas = [Replica("qwen-0", "1")]
    latest = {
        "qwen-0": supervisor_metrics.SupervisorMetrics(
            host_learned=LearnedMemory(3600, (1, 2, 3), 4, 5)
        )
    }

    def run(data: bytes) -> None:
        path.write_bytes(data)
        budgets = LearnedBudgets()
        budgets.inherit(LearnedFile(path).read(None))
        budgets.observe(1.0, "1", "1", seen, ())
        budgets.update_budgets(1.0, memory)
        found = budgets.resolve_budgets(memory).memory
        for one in (found.host, found.device):
            assert one is not None
            assert 0 < one.growth_bytes <= 6 << 30, "half of the room at most"
        msgspec.json.encode(budgets)
        decode_learned_workloads(
            make_learned_file(data.decode(errors="replace"), replicas, [], latest, 1e9).encode()
        )

    fields = ("workload", "revision", "at", "host", "device", "seen_s", "gains", "start", "budget")
    words = (*(f'"{field}":' for field in fields), "1125899906842624", "1125899906842625")
    one = b'{"workload":"","revision":"1","at":1,"host":{"budget":1}},'
    large = partial(_large_file, b"[", one, MAX_LEARNED_BYTES, b'[{"workload":"')
    return Target(run, (*NUMBERS, *words), large)


def _clock() -> Callable[[], float]:
    """One second from each reading to the next, from now on."""
    ticks = itertools.count(time.monotonic(), 1.0)
    return lambda: next(ticks)


def _device_health(folder: Path) -> Target:
    """A supervisor and the published devices of its pod. No file has any error to declare."""
    path = folder / DEVICE_HEALTH_FILE
    file = PodDevicesFile(path, "qwen-0")
    doubt = Suspicion(IncidentKind.DEVICE_GROWTH, None, 0.9, 0.1)
    before = Assessment(t=1.0, epoch=1, warm=True, suspicions=[doubt])

    def run(data: bytes) -> None:
        path.write_bytes(data)
        unhealthy = file.read()
        (found,) = add_device_health(before, unhealthy).suspicions
        assert len(found.unhealthy_device or "") <= MAX_DEVICE_CHARS
        assert bool(found.evidence) == bool(unhealthy)
        msgspec.json.encode(found)

    words = ('"qwen-0":', '"gpu-0 (claim:gpu)"')
    one = b'"gpu-0 (claim:gpu)",'
    large = partial(_large_file, b'{"qwen-0":[', one, MAX_POD_DEVICES_BYTES, b'{"')
    return Target(run, (*NUMBERS, *words), large)
