"""GPUs that a real process has open, by the driver's own description of them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plimsoll_sidecar.signals import gpu_identity
from plimsoll_sidecar.signals.gpu_identity import FIRST_SEARCH_PERIOD_S, DeviceFinder

ONE, TWO = "GPU-11111111-1111-1111-1111-111111111111", "GPU-22222222-2222-2222-2222-222222222222"
CAPS = 235
HOLDS = """
import os, sys
for path in sys.argv[1:]:
    os.open(path, os.O_PATH)  # which asks no driver
print("open", flush=True)
sys.stdin.read()
"""
Holder = Callable[..., int]


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """What two GPUs, the second in MIG mode, look like in /proc."""
    folder = tmp_path / "proc"
    for bus, minor, uuid in (("0000:3b:00.0", 1, ONE), ("0000:af:00.0", 0, TWO)):
        gpu = folder / "driver/nvidia/gpus" / bus
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 130\nGPU UUID: \t {uuid}\n"
            f"Video BIOS: \t 96.00.74.00.01\nBus Type: \t PCIe\nBus Location: \t {bus}\n"
            f"Device Minor: \t {minor}\nGPU Excluded:\t No\n"
        )
    for part, minor in (("gi1", 30), ("gi1/ci0", 31), ("gi2", 39), ("gi2/ci0", 40)):
        capability = folder / "driver/nvidia/capabilities/gpu0/mig" / part
        capability.mkdir(parents=True, exist_ok=True)
        (capability / "access").write_text(
            f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
        )
    (folder / "devices").write_text(
        f"Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n{CAPS} nvidia-caps\n"
    )
    return folder


@pytest.fixture
def holder(tmp_path: Path, proc: Path) -> Iterator[Holder]:
    """Starts a process that has such device files open, and tells its PID."""
    if os.geteuid() != 0:
        pytest.skip("a device file needs root")
    started: list[subprocess.Popen[bytes]] = []

    def start(*devices: tuple[str, int, int]) -> int:
        paths = []
        for name, major, minor in devices:
            path = tmp_path / name
            if not path.exists():
                os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(major, minor))
            paths.append(path)
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS, *map(str, paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        (proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def test_a_gpu_is_known_by_the_minor_of_its_open_file(holder: Holder, proc: Path) -> None:
    main = holder(("nvidiactl", 195, 255))
    worker = holder(("nvidiactl", 195, 255), ("nvidia1", 195, 1))
    assert gpu_identity.find_open_devices([main], proc) == []
    assert gpu_identity.find_open_devices([main, worker], proc) == [ONE]


def test_a_slice_is_known_by_its_capabilities(holder: Holder, proc: Path) -> None:
    pid = holder(("nvidia0", 195, 0), ("nvidia-cap39", CAPS, 39), ("nvidia-cap40", CAPS, 40))
    assert gpu_identity.find_open_devices([pid], proc) == [f"MIG-{TWO}/2/0"]


def test_a_file_that_is_only_called_so_is_no_gpu(
    holder: Holder, proc: Path, tmp_path: Path
) -> None:
    (tmp_path / "nvidia1").touch()
    assert gpu_identity.find_open_devices([holder(("nvidia1", 195, 1))], proc) == []


def test_it_is_looked_for_until_the_engine_has_opened_it(holder: Holder, proc: Path) -> None:
    times = [0.0]
    identity = DeviceFinder(lambda: times[0], proc)
    main = holder()
    assert identity.find_devices(main, [main]) == []
    worker = holder(("nvidia1", 195, 1))
    assert identity.find_devices(main, [main, worker]) == [], "asked for again in a while"
    times[0] += FIRST_SEARCH_PERIOD_S
    (device,) = identity.find_devices(main, [main, worker])
    assert (device.index, device.uuid, device.used) == (0, ONE, None)
    identity.reset()
    assert identity.find_devices(main, [main]) == []


def test_a_container_without_the_folder_knows_none(holder: Holder, tmp_path: Path) -> None:
    pid = holder(("nvidia1", 195, 1))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / str(pid)).symlink_to(f"/proc/{pid}")
    assert gpu_identity.find_open_devices([pid], empty) == []
