"""The namespaces that the node runs in: network, mounts and processes of its own.

All that a node makes on a machine (pods, mounts, bridges, firewall rules, kernel settings) is in
there and ends with the first process in it, which is killed when this process ends in any way.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.lab.errors import LabError
from tests.lab.processes import Processes, alive
from tests.lab.slot import CGROUPS, Slot

NAME = "sandbox"
START_S = 10.0
END_S = 10.0
IPV6_OFF = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")
# The kubelet and containerd's shims write to these, whatever their flags say.
HIDDEN = ("/run", "/var/log", "/var/lib/kubelet")


def has_ipv6() -> bool:
    """Whether this machine has IPv6, so that the lab's pods may have such addresses."""
    try:
        return IPV6_OFF.read_text().strip() == "0"
    except OSError:
        return False


class Sandbox:
    """A machine in the machine, linked by a pair of virtual interfaces."""

    def __init__(self, slot: Slot, processes: Processes) -> None:
        self._slot = slot
        self._processes = processes

    def start(self, first: Path) -> None:
        """``first`` is the first process inside: it waits and reaps."""
        options = ["--net", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        self._processes.start(NAME, ["unshare", *options, str(first)])
        self._cgroups()
        self._link()

    def enter(self, argv: Sequence[str]) -> list[str]:
        """``argv`` run inside."""
        return ["nsenter", f"--target={self._first()}", "--mount", "--net", "--pid", "--", *argv]

    def stop(self) -> None:
        """Ends every process inside and waits for it; the rest goes with them."""
        first = None
        with contextlib.suppress(LabError):
            first = self._first()
            os.kill(first, signal.SIGKILL)
        self._processes.stop(NAME)
        deadline = time.monotonic() + END_S
        while (first is not None and alive(first)) or self._occupied():
            if time.monotonic() > deadline:
                raise LabError(f"processes of the node are left after {END_S:.0f} s")
            time.sleep(0.02)
        self._unlink()

    def _first(self) -> int:
        """PID of the first process inside, as seen from here."""
        outer = self._processes.running.get(NAME)
        children = Path(f"/proc/{outer}/task/{outer}/children")
        deadline = time.monotonic() + START_S
        while outer is not None and alive(outer) and time.monotonic() < deadline:
            if found := children.read_text().split():
                return int(found[0])
            time.sleep(0.01)
        raise LabError("no namespaces for the node: may this user unshare them?")

    def _unlink(self) -> None:
        """The kernel does it too, but takes its time over a dead namespace's interfaces."""
        subprocess.run(["ip", "link", "delete", self._slot.name], capture_output=True)

    def _link(self) -> None:
        slot, first = self._slot, self._first()
        self._unlink()
        _run(f"ip link add {slot.name} type veth peer name lab0 netns {first}")
        _run(f"ip address add {slot.host_ip}/30 dev {slot.name}")
        _run(f"ip link set {slot.name} up")
        inside = [
            "mount --make-rshared /",
            *(f"mkdir -p {path} && mount -t tmpfs tmpfs {path}" for path in HIDDEN),
            "ip link set lo up",
            f"ip address add {slot.node_ip}/30 dev lab0",
            "ip link set lab0 up",
            f"ip route add default via {slot.host_ip}",
            "echo 1 >/proc/sys/net/ipv4/ip_forward",
        ]
        _run(*self.enter(["sh", "-ec", "\n".join(inside)]))
        for cidr in (slot.pod_cidr, slot.service_cidr):
            _run(f"ip route replace {cidr} via {slot.node_ip}")
        if has_ipv6():
            self._link6()

    def _link6(self) -> None:
        slot = self._slot
        _run(f"ip address add {slot.host_ip6}/64 dev {slot.name} nodad")
        inside = [
            f"ip address add {slot.node_ip6}/64 dev lab0 nodad",
            f"ip route add default via {slot.host_ip6}",
            "echo 1 >/proc/sys/net/ipv6/conf/all/forwarding",
        ]
        _run(*self.enter(["sh", "-ec", "\n".join(inside)]))
        _run(f"ip route replace {slot.pod_cidr6} via {slot.node_ip6}")

    def _cgroups(self) -> None:
        for folder in self._slot.cgroups():
            folder.mkdir(exist_ok=True)
            # A v1 cpuset takes no process before it names processors and memory nodes.
            for name in ("cpuset.cpus", "cpuset.mems"):
                if folder.parent != CGROUPS and (folder.parent / name).exists():
                    (folder / name).write_text((folder.parent / name).read_text())
        if (CGROUPS / "cgroup.controllers").exists():
            enabled = (CGROUPS / "cgroup.controllers").read_text().split()
            for folder in (CGROUPS, CGROUPS / self._slot.name):
                text = " ".join(f"+{name}" for name in enabled)
                (folder / "cgroup.subtree_control").write_text(text)

    def _occupied(self) -> bool:
        lists = [path for top in self._slot.cgroups() for path in top.rglob("cgroup.procs")]
        return any(path.read_text().strip() for path in lists)


def _run(*command: str) -> None:
    argv = shlex.split(command[0]) if len(command) == 1 else list(command)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise LabError(f"{shlex.join(argv)}: {done.stderr.strip()}")
