"""A driver that comes up late, or is loaded anew, is found: the first failure is no last word.

Tests ``signals/device_memory.py``. No driver can run here: a stand-in takes the library's place.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from typing import NamedTuple

import pytest

from plimsoll_sidecar.signals.device_memory import (
    NVML_MAX_RETRY_PAUSE_S,
    DeviceBytes,
    DeviceUsers,
    Nvml,
)

UNINITIALIZED, NOT_FOUND, NOT_LOADED, FUNCTION_NOT_FOUND, UNKNOWN = 1, 6, 9, 13, 999
WHOLE = DeviceBytes(5 << 30, 80 << 30)


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Memory:
    used, total = 5 << 30, 80 << 30


class Process(NamedTuple):
    pid: int
    usedGpuMemory: int | None


class Driver:
    """``problem`` is what each call fails with, and ``users_problem`` those for the users of a
    device; ``starts`` counts nvmlInit."""

    def __init__(self) -> None:
        self.problem: int | None = None
        self.users_problem: int | None = None
        self.starts, self.handles = 0, 0
        self.processes: tuple[Process, ...] = ()

    def call(self, result: Callable[[], object]) -> object:
        if self.problem is not None:
            raise NVMLError(self.problem)
        return result()

    def users(self) -> tuple[Process, ...]:
        if self.users_problem is not None:
            raise NVMLError(self.users_problem)
        return self.processes

    def start(self) -> None:
        self.starts += 1
        self.call(lambda: None)

    def handle(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise NVMLError(NOT_FOUND)
        self.handles += 1
        return uuid


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    one, library = Driver(), types.ModuleType("pynvml")
    library.__dict__.update(
        NVMLError=NVMLError,
        nvmlInit=one.start,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=one.handle,
        nvmlDeviceGetMemoryInfo=lambda handle: one.call(lambda: Memory),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: one.call(one.users),
        nvmlDeviceGetMPSComputeRunningProcesses=lambda handle: one.call(lambda: ()),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return one


def asked(nvml: Nvml, now: list[float], seconds: int) -> list[DeviceBytes | None]:
    found = []
    for _ in range(seconds):
        found.append(nvml.read_memory("GPU-1"))
        now[0] += 1.0
    return found


def test_a_driver_that_comes_up_later_is_found(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    nvml = Nvml(clock=lambda: now[0])
    driver.problem = NOT_LOADED
    assert set(asked(nvml, now, 3600)) == {None}
    assert nvml.error == "NVML: error 9"
    assert 12 <= driver.starts <= 20, "an hour without a driver costs a few tries"
    driver.problem = None
    assert asked(nvml, now, int(NVML_MAX_RETRY_PAUSE_S) + 1)[-1] == WHOLE
    assert nvml.error is None
    assert len(caplog.messages) == 2, "one line for the failure, one for its end"


def test_a_driver_that_is_loaded_anew_is_started_again(driver: Driver) -> None:
    now = [0.0]
    nvml = Nvml(clock=lambda: now[0])
    assert asked(nvml, now, 2) == [WHOLE, WHOLE]
    assert (driver.starts, driver.handles) == (1, 1)
    driver.problem = UNINITIALIZED
    assert asked(nvml, now, 30) == [None] * 30
    driver.problem = None
    assert asked(nvml, now, 60)[-1] == WHOLE
    assert driver.handles == 2, "the handles of the driver before are of no use"


def test_a_device_of_another_container_is_no_failure_of_the_driver(driver: Driver) -> None:
    now = [0.0]
    nvml = Nvml(clock=lambda: now[0])
    assert nvml.read_memory("GPU-2") is None
    assert nvml.error == "error 6"
    assert nvml.read_memory("GPU-1") == WHOLE
    assert driver.starts == 1


@pytest.mark.parametrize("problem", [FUNCTION_NOT_FOUND, UNKNOWN])
def test_a_driver_that_cannot_list_users_still_reports_the_memory(
    driver: Driver, problem: int
) -> None:
    now = [0.0]
    nvml = Nvml(clock=lambda: now[0])
    driver.users_problem = problem
    for _ in range(30):
        assert asked(nvml, now, 1) == [WHOLE]
        assert nvml.read_users("GPU-1") is None
    assert driver.starts == 1
    assert nvml.error is None


def test_what_is_in_use_beside_the_listed_processes(driver: Driver) -> None:
    driver.processes = (Process(7, 3 << 30), Process(8, 1 << 30))
    assert Nvml().read_users("GPU-1") == DeviceUsers({7: 3 << 30, 8: 1 << 30}, 1 << 30, 0)
    driver.processes = (Process(7, None),)
    assert Nvml().read_users("GPU-1") == DeviceUsers({7: None}, None, 0)
    driver.problem = NOT_LOADED
    assert Nvml().read_users("GPU-1") is None
