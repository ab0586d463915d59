"""A lab's number: its directory, addresses and cgroup follow from it, so labs live side by side.

A lock file holds the number. The lab's daemons inherit the lock, so that a number becomes free when
the last of them has ended, whatever became of the process that started them. The next user of a
number first removes what a lab that was killed left under it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.lab.errors import LabError

COUNT = 16
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Slot:
    """``lock`` is the descriptor that holds the number; None in a process that only ends a lab."""

    index: int
    lock: int | None = None

    @property
    def home(self) -> Path:
        return _base(self.index)

    @property
    def name(self) -> str:
        """Of the cgroup, and of the host's network interface."""
        return f"plimsoll{self.index}"

    @property
    def host_ip(self) -> str:
        """Where the node finds the host and pods find the API server."""
        return f"10.98.{self.index}.1"

    @property
    def node_ip(self) -> str:
        return f"10.98.{self.index}.2"

    @property
    def pod_cidr(self) -> str:
        return f"10.97.{self.index}.0/24"

    @property
    def host_ip6(self) -> str:
        """As :attr:`host_ip`, for pods that have an IPv6 address alone."""
        return f"fd00:98:{self.index:x}::1"

    @property
    def node_ip6(self) -> str:
        return f"fd00:98:{self.index:x}::2"

    @property
    def pod_cidr6(self) -> str:
        return f"fd00:97:{self.index:x}::/64"

    @property
    def service_cidr(self) -> str:
        """Room for the two Services of each of 10,000 InferenceServices and more."""
        return f"10.{100 + self.index}.0.0/16"

    @property
    def api_service_ip(self) -> str:
        return f"10.{100 + self.index}.0.1"

    @property
    def dns_ip(self) -> str:
        return f"10.{100 + self.index}.0.10"

    def cgroups(self) -> list[Path]:
        """The lab's cgroup: one folder on cgroup v2, one in each hierarchy on v1 and hybrid."""
        if (CGROUPS / "cgroup.controllers").exists():
            return [CGROUPS / self.name]
        found = [path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink()]
        return [path / self.name for path in sorted(found)]

    def clean(self) -> None:
        """Remove directory and cgroup. No process of the lab may be left."""
        for top in self.cgroups():
            for folder, _, _ in os.walk(top, topdown=False):
                os.rmdir(folder)
        shutil.rmtree(self.home, ignore_errors=True)

    def release(self) -> None:
        if self.lock is not None:
            os.close(self.lock)


def take() -> Slot:
    """The lowest number that no lab holds, with an empty directory."""
    for index in range(COUNT):
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            lock = os.open(_base(index).with_suffix(".lock"), flags, 0o600)
        except PermissionError:  # another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            slot = Slot(index, lock)
            slot.clean()
            slot.home.mkdir(mode=0o700)
        except OSError:
            os.close(lock)
            continue
        return slot
    raise LabError(f"{COUNT} labs are up on this machine: end some")


def held(index: int) -> bool:
    """Whether a lab holds this number."""
    try:
        lock = os.open(_base(index).with_suffix(".lock"), os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _base(index: int) -> Path:
    return Path(tempfile.gettempdir()) / f"plimsoll-lab-{index}"
