"""A device is shared where a page, the driver or the container's variables say so.

Tests ``signals/device_sharing.py``.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from plimsoll_sidecar.signals.device_memory import (
    Dcgm,
    DeviceUsers,
    ExporterSample,
    Nvml,
    PodContainer,
)
from plimsoll_sidecar.signals.device_sharing import (
    MIN_OTHER_OWNER_S,
    SHARING_CHECK_PERIOD_S,
    SharingDetector,
)

MINE = PodContainer("team-a", "qwen-0", "engine")
OTHER = PodContainer("team-b", "neighbour", "vllm")


class Page(Dcgm):
    """The rows of a page; tests/integration/test_dcgm_exporter.py reads real ones."""

    def __init__(self, *owners: PodContainer) -> None:
        super().__init__("http://127.0.0.1:9", pod=MINE)
        self.named = owners

    def read_samples(self) -> list[ExporterSample]:
        return [
            ExporterSample(self.USED, {"UUID": "GPU-1", "pod": p.name, "namespace": p.namespace,
                            "container": p.container}, 1.0)
            for p in self.named
        ]  # fmt: skip


class Driver(Nvml):
    """What a driver lists, on a machine without one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: DeviceUsers | None = None

    def read_users(self, uuid: str) -> DeviceUsers | None:
        return self.found


def seen_after(waited_s: float, page: Page) -> str | None:
    now = [0.0]
    sharing = SharingDetector({"dcgm": page}, clock=lambda: now[0])
    found: dict[str, str] = {}
    while now[0] <= waited_s:
        found = sharing.find_reasons(["GPU-1"], list)
        now[0] += SHARING_CHECK_PERIOD_S
    return found.get("GPU-1")


def test_two_pods_on_one_device_are_seen_at_once() -> None:
    assert seen_after(0.0, Page(MINE, OTHER)) == (
        "dcgm reports that the device is also assigned to team-b/neighbour/vllm"
    )


def test_another_container_of_the_same_pod_is_another_user() -> None:
    assert seen_after(0.0, Page(MINE, MINE._replace(container="draft"))) is not None


@pytest.mark.parametrize("owners", [(MINE,), (MINE._replace(container=""),), ()])
def test_a_device_of_ours_alone_is_not_shared(owners: tuple[PodContainer, ...]) -> None:
    assert seen_after(300.0, Page(*owners)) is None


def test_a_page_that_names_the_pod_before_us_is_only_old() -> None:
    """With time-slicing an exporter names one pod of several: then it stays another."""
    assert seen_after(MIN_OTHER_OWNER_S - SHARING_CHECK_PERIOD_S, Page(OTHER)) is None
    assert seen_after(MIN_OTHER_OWNER_S + SHARING_CHECK_PERIOD_S, Page(OTHER)) is not None


def test_once_seen_it_stands_until_another_engine_starts() -> None:
    now, page = [0.0], Page(MINE, OTHER)
    sharing = SharingDetector({"dcgm": page}, clock=lambda: now[0])
    assert sharing.find_reasons(["GPU-1"], list)
    page.named, now[0] = (MINE,), 100.0
    assert sharing.find_reasons(["GPU-1"], list)
    sharing.reset()
    assert not sharing.find_reasons(["GPU-1"], list)


OWN, GIB = [41, 42], 1 << 30
"""The engine's processes."""


def users(elsewhere: int | None = GIB // 2, mps: int = 0, **others: int) -> DeviceUsers:
    sizes: dict[int, int | None] = dict.fromkeys((41, *others.values()), GIB)
    return DeviceUsers(sizes, elsewhere, mps)


def driven(*found: DeviceUsers | None) -> str | None:
    now, driver = [0.0], Driver()
    sharing = SharingDetector({"nvml": driver}, clock=lambda: now[0])
    reasons: dict[str, str] = {}
    for driver.found in found:
        reasons = sharing.find_reasons(["GPU-1"], lambda: OWN)
        now[0] += SHARING_CHECK_PERIOD_S
    return reasons.get("GPU-1")


def test_a_driver_that_lists_the_engines_processes_alone_says_nothing() -> None:
    assert driven(users(), users(), users(GIB), None, users()) is None


def test_another_process_of_the_pod_is_another_user() -> None:
    """A sidecar's: the pod's containers have one PID namespace."""
    assert driven(users(pid=77)) == "process 77 uses the device, but is not part of the engine"


def test_pids_of_another_namespace_say_nothing() -> None:
    """Earlier drivers list those of the host."""
    assert driven(DeviceUsers({9001: GIB, 9002: GIB}, GIB, 0)) is None


def test_clients_of_an_mps_server_share_it() -> None:
    assert driven(users(mps=2)) == "MPS clients use the device"


def test_what_grows_and_is_no_listed_processs_is_another_pods() -> None:
    """Seen on an H100: processes of another PID namespace are not listed, only what they use."""
    assert driven(users(), users(3 * GIB), users(4 * GIB)) == (
        "processes of other pods use 3.5 GiB more memory than before"
    )
    assert driven(users(), users(3 * GIB), users()) is None, "a single reading is no sign"
    assert driven(users(3 * GIB), users(3 * GIB), users(3 * GIB)) is None, "it may be left behind"
    assert driven(users(), users(None), users(None)) is None


@pytest.mark.parametrize(
    ("variable", "shared"),
    [
        ("CUDA_MPS_PIPE_DIRECTORY=/mps/pipe", True),
        ("CUDA_DEVICE_MEMORY_LIMIT_0=20000m", True),
        ("CUDA_MPS_PIPE_DIRECTORY=", False),
        ("CUDA_VISIBLE_DEVICES=0", False),
    ],
)
def test_the_engines_variables_say_it(variable: str, shared: bool) -> None:
    name, _, value = variable.partition("=")
    program = [sys.executable, "-c", "print(flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, env={name: value}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = SharingDetector({}).find_reasons(["GPU-1"], lambda: [process.pid])
        process.communicate(b"\n", timeout=10)
    assert bool(found) is shared
