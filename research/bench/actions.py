"""How long a person waits for `plimsoll trim`, `drain`, `resume` and `restart` on a real pod.

    python -m bench.actions             # root, Debian's containerd: some four minutes

A lab of its own: control plane, kubelet, the operator and one replica of a tiny model on the CPU,
from the images that users get. Each command is a process of its own, as from a shell, and is timed
from its start to its end; one round of all commands comes before those that count.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.control_plane import end_by_signals
from bench.result import publish
from tests.lab import images
from tests.lab.kube import Kube
from tests.lab.lab import Lab, mounted, namespace, new_lab
from tests.lab.operator import Operator, operator_kubeconfig
from tests.lab.services import image_flags, on_cpu

SERVICE = "actions"
READY_S = 300
VERBS = ("trim", "drain", "resume", "restart")
ROUNDS = 5


def service(kube: Kube, model: Path) -> dict[str, Any]:
    made = on_cpu(SERVICE, mounted(kube, "model", model))
    # Restarts by hand count, and this makes more of them than an hour's budget.
    made["spec"]["supervision"] = {
        "mode": "Observe",
        "restartBudget": {"count": 100, "window": "1h"},
    }
    return made


@contextmanager
def replica(folder: Path) -> Iterator[tuple[Kube, str]]:
    """A client and the name of a pod that is ready."""
    end_by_signals()
    lab: Lab = new_lab(node=True)
    try:
        lab.start()
        lab.start_node()
        images.checkpoint(folder)
        with namespace(lab.kube, restricted=True) as kube:
            account = operator_kubeconfig(lab.kube, folder / "kubeconfig")
            operator = Operator(account, kube.namespace, *image_flags(lab))
            try:
                kube.apply(service(kube, folder))
                ready = "--for=condition=Ready"
                kube("wait", f"plinf/{SERVICE}", ready, f"--timeout={READY_S}s")
                (pod,) = kube.list("pods", f"plimsoll.dev/service={SERVICE}")
                yield kube, pod["metadata"]["name"]
            finally:
                operator.stop()
    finally:
        lab.stop()


def seconds(kube: Kube, verb: str, pod: str) -> float:
    plimsoll = Path(sys.executable).with_name("plimsoll")
    command: list[Path | str] = [
        plimsoll,
        verb,
        *(["--force"] if verb == "drain" else []),  # it is the only replica
        pod,
        "--yes",
        "--kubeconfig",
        kube.kubeconfig,
        "-n",
        kube.namespace,
    ]
    begun = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    took: dict[str, list[float]] = {verb: [] for verb in VERBS}
    with tempfile.TemporaryDirectory(prefix="plimsoll-actions-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with replica(folder) as (kube, pod):
            for number in range(given.rounds + 1):
                for verb in VERBS:
                    lasted = seconds(kube, verb, pod)
                    if number:
                        took[verb].append(lasted)
    figures: dict[str, float | int | None] = {"rounds_count": given.rounds}
    for verb, values in took.items():
        figures[f"{verb}_s"] = median(values)
        figures[f"{verb}_max_s"] = max(values)
    publish("actions", figures, took)


if __name__ == "__main__":
    main()
