"""The lab by hand: ``python -m tests.lab setup | up | down | status``.

``setup`` installs and builds what the cluster and node tests need, once. ``up`` leaves a real
one-node Kubernetes running and prints its KUBECONFIG; ``down`` ends it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from tests.lab import binaries, node
from tests.lab.controlplane import ControlPlane
from tests.lab.errors import LabError, MissingError
from tests.lab.lab import Lab, install_packages, new_lab
from tests.lab.processes import Processes, alive


def home() -> Path:
    return binaries.cache_dir() / "up"


def setup() -> int:
    """Never fails for what this machine cannot have: the tests themselves say what is missing."""
    try:
        if node.missing() is not None:
            install_packages(node.PACKAGES)
        binaries.find(node=node.missing() is None)
    except MissingError as missing:
        print(f"lab: {missing}", file=sys.stderr)
    return 0


def up() -> int:
    state = home() / "state.json"
    if state.exists():
        print(f"already up: export KUBECONFIG={home() / 'admin.kubeconfig'}")
        return 0
    shutil.rmtree(home(), ignore_errors=True)
    lab = new_lab(node=True, home=home(), detached=True)
    lab.start()
    try:
        lab.start_node()
    except BaseException:
        lab.stop()
        raise
    plane = lab.plane
    state.write_text(
        json.dumps({"index": plane.index, "api_port": plane.api_port,
                    "running": plane.processes.running})
    )  # fmt: skip
    print(f"export KUBECONFIG={lab.kubeconfig}\nend it with: make cluster-down")
    return 0


def down() -> int:
    state = home() / "state.json"
    if not state.exists():
        print("no lab is up")
        return 0
    said = json.loads(state.read_text())
    lab = Lab(home(), binaries.find(node=True))
    lab.plane = ControlPlane(
        home(), lab.binaries, Processes(home() / "log", True, said["running"]), said["index"],
        api_port=said["api_port"],
    )  # fmt: skip
    lab.node = node.Node(lab.plane)
    lab.stop()
    return 0


def status() -> int:
    state = home() / "state.json"
    if not state.exists():
        print("no lab is up")
        return 1
    for name, pid in json.loads(state.read_text())["running"].items():
        print(f"{name:25} {'running' if alive(pid) else 'ended'} (PID {pid})")
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
