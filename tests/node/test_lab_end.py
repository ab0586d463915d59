"""A lab leaves nothing behind: not when it is stopped, and not when its owner is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.binaries import find
from tests.lab.images import PAUSE, ROOT
from tests.lab.kube import Kube, eventually
from tests.lab.slot import Slot, held, take

# A second lab beside the one of the other tests: with a node, and no images but the sandbox's.
OWNER = """
import sys
from tests.lab.lab import new_lab
from tests.lab.node import Node

lab = new_lab(node=True)
try:
    lab.start()
    lab.node = Node(lab.plane)
    lab.node.start()
    print(lab.plane.slot.index, flush=True)
    sys.stdin.read()
finally:
    lab.stop()
"""
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "left"},
    "spec": {
        "containers": [
            {
                "name": "left",
                "image": PAUSE,
                "volumeMounts": [{"name": "memory", "mountPath": "/memory"}],
            }
        ],
        "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}],
    },
}


@pytest.fixture
def owner(node_tier: None) -> Iterator[subprocess.Popen[str]]:
    """A process that owns a lab, like a test session, and ends it when its input ends."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_nothing_is_left(owner: subprocess.Popen[str], end: str) -> None:
    assert owner.stdout is not None
    assert owner.stdin is not None
    slot = Slot(int(owner.stdout.readline()))
    kube = Kube(find(node=True).command("kubectl"), slot.home / "admin.kubeconfig")
    kube.apply(POD)
    kube("wait", "pod/left", "--for=condition=Ready", "--timeout=60s")
    assert held(slot.index)
    assert all(kind in " ".join(remains(slot)) for kind in ("process", "cgroup", "interface"))

    if end == "stopped":
        owner.stdin.close()
        assert owner.wait(timeout=60) == 0
    else:
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=10)
        eventually(lambda: not held(slot.index), "the last process of the lab has ended")
        eventually(lambda: not running(slot), "no container has survived")
        # Folders and empty cgroups are all that a killed lab leaves; the next one removes them.
        successor = take()
        assert successor.index == slot.index
        assert list(slot.home.iterdir()) == []
        successor.clean()
        successor.release()
    eventually(lambda: remains(slot) == [], "nothing of the lab is left")


def running(slot: Slot) -> list[str]:
    """Processes in the lab's cgroup, or that name its directory."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_text(errors="replace")
            cgroups = (folder / "cgroup").read_text()
        except OSError:  # it has ended meanwhile
            continue
        if str(slot.home) in command or f"/{slot.name}/" in cgroups:
            found.append(f"process {folder.name} {command}")
    return found


def remains(slot: Slot) -> list[str]:
    """What there is of a lab on this machine, in words."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return [
        *running(slot),
        *(f"mount {line}" for line in mounts if str(slot.home) in line),
        *(f"cgroup {path}" for path in slot.cgroups() if path.exists()),
        *(f"interface {p.name}" for p in Path("/sys/class/net").iterdir() if p.name == slot.name),
        *(f"folder {path}" for path in [slot.home] if path.exists()),
    ]
