"""The lab by hand: ``python -m tests.lab setup | up | down | status``.

``setup`` installs and builds what the cluster and node tests need, once. ``up`` leaves a real
one-node Kubernetes running, with the chart of this checkout installed, and prints its KUBECONFIG;
``down`` ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.lab import binaries, build, images, node
from tests.lab import helm as chart
from tests.lab.controlplane import ControlPlane
from tests.lab.errors import LabError, MissingError
from tests.lab.lab import Lab, install_packages, new_lab
from tests.lab.processes import Processes, alive
from tests.lab.slot import Slot, held

SYSTEM = "plimsoll-system"
SILENT_S = 1.0
"""A step that takes less needs no line."""
TOOLS = {
    "promtool": "prometheus",
    "prometheus": "prometheus",
    "chromium": "chromium",
    "lua5.4": "lua5.4",
}
"""What tests of dashboards, alerts, pages and health checks run, and its Debian package."""


def state_file() -> Path:
    return binaries.cache_dir() / "up.json"


def running() -> dict[str, Any] | None:
    """What ``up`` wrote about the lab that it left, None where that has ended."""
    try:
        said: dict[str, Any] = json.loads(state_file().read_text())
    except FileNotFoundError:
        return None
    return said if held(said["index"]) else None


def setup() -> int:
    """Never fails for what this machine cannot have: the tests themselves say what is missing."""
    try:
        packages: tuple[str, ...] = node.PACKAGES if node.missing() is not None else ()
        packages += build.PACKAGES if build.missing() is not None else ()
        absent = tuple(TOOLS[tool] for tool in TOOLS if shutil.which(tool) is None)
        if packages or absent:
            with step(f"install {' '.join(packages + absent)}", "some 2 minutes"):
                install_packages(packages + absent)
        with step("build Kubernetes and etcd", "some 7 minutes"):
            binaries.find(node=node.missing() is None)
            binaries.kubelab()
        for major in binaries.HELM:
            with step(f"build Helm {major}", "some 2 minutes"):
                binaries.helm(major)
        with step("build the controller of LeaderWorkerSets", "some 3 minutes"):
            binaries.leader_worker_set()
        if node.missing() is None:
            for target, name in (("supervisor", images.SUPERVISOR), ("operator", images.OPERATOR)):
                with step(f"build the {target}'s image", "some 3 minutes the first time"):
                    build.archive(target, name)
    except MissingError as missing:
        print(f"lab: {missing}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def step(what: str, about: str) -> Iterator[None]:
    """Say what is done, and how long it takes and took, unless it is there already."""
    begin = time.monotonic()
    line = threading.Timer(SILENT_S, print, (f"lab: {what} ({about}) ...",), {"flush": True})
    line.start()
    try:
        yield
    finally:
        line.cancel()
    if (took := time.monotonic() - begin) > SILENT_S:
        print(f"lab: {what}: done in {took:.0f} s", flush=True)


def up() -> int:
    if (said := running()) is not None:
        print(how_to_use(said))
        return 0
    helm = Path(binaries.helm(max(binaries.HELM)))
    lab = new_lab(node=True, detached=True)
    lab.start(crds=False)
    try:
        lab.start_node(images.checkpoint(lab.home))
        install_chart(helm, lab)
    except BaseException:
        lab.stop()
        raise
    said = {
        "index": lab.plane.slot.index,
        "kubeconfig": str(lab.kubeconfig),
        "path": str(lab.tools(helm=helm)),
        "running": lab.plane.processes.running,
    }
    state_file().write_text(json.dumps(said))
    print(how_to_use(said))
    return 0


def install_chart(helm: Path, lab: Lab) -> None:
    """Returns when the operator is ready, in a namespace that admits only restricted pods."""
    values = chart.values(lab.load_operator(), lab.engine_image, lab.supervisor_image)
    enforced = "pod-security.kubernetes.io/enforce=restricted"
    lab.kube("create", "namespace", SYSTEM)
    lab.kube("label", "namespace", SYSTEM, enforced)
    release = chart.Helm(helm, replace(lab.kube, namespace=SYSTEM))
    release("install", chart.RELEASE, str(chart.CHART), "--wait", "--timeout=2m", values=values)


def how_to_use(said: dict[str, Any]) -> str:
    return "\n".join(
        (
            f"export KUBECONFIG={said['kubeconfig']}",
            f"export PATH=$PATH:{said['path']}   # kubectl and helm",
            "A first service: kubectl apply -f examples/tiny.yaml",
            "End it with: make cluster-down",
        )
    )


def down() -> int:
    if (said := running()) is None:
        print("no lab is up")
    else:
        slot = Slot(said["index"])
        processes = Processes(slot.home / "log", running=said["running"])
        lab = Lab(ControlPlane(slot, binaries.Binaries(), processes))
        lab.node = node.Node(lab.plane)
        lab.stop()
    state_file().unlink(missing_ok=True)
    return 0


def status() -> int:
    if (said := running()) is None:
        print("no lab is up")
        return 1
    for name, pid in said["running"].items():
        print(f"{name:25} {'running' if alive(pid) else 'ended'} (PID {pid})")
    print(how_to_use(said))
    return 0


COMMANDS = {"setup": setup, "up": up, "down": down, "status": status}


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in COMMANDS:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return COMMANDS[sys.argv[1]]()
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
