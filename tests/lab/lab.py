"""A lab: a control plane, and a node on it when one is asked for.

``PLIMSOLL_E2E_KUBECONFIG`` names an existing cluster to use in its place; then the images must be
pullable there and are named by ``PLIMSOLL_E2E_ENGINE_IMAGE`` and ``PLIMSOLL_E2E_SUPERVISOR_IMAGE``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.lab import build, images
from tests.lab.binaries import find
from tests.lab.controlplane import ControlPlane
from tests.lab.errors import LabError, MissingError
from tests.lab.kube import Document, Kube
from tests.lab.node import Node
from tests.lab.processes import Processes
from tests.lab.slot import take

CRDS = images.ROOT / "crds"
E2E = "PLIMSOLL_E2E_KUBECONFIG"
E2E_IMAGES = ("PLIMSOLL_E2E_ENGINE_IMAGE", "PLIMSOLL_E2E_SUPERVISOR_IMAGE")

OWNER = "plimsoll.dev/test-namespace"
"""Label of a PersistentVolume, which no namespace's deletion takes along."""


class Lab:
    """``kubeconfig`` is the administrator's."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.home = plane.home
        self.binaries = plane.binaries
        self.node: Node | None = None
        self.engine_image = images.ENGINE
        self.supervisor_image = images.SUPERVISOR

    @property
    def kubeconfig(self) -> Path:
        return self.plane.kubeconfig

    @property
    def kube(self) -> Kube:
        return Kube(self.binaries.command("kubectl"), self.kubeconfig)

    def start(self, crds: bool = True) -> None:
        """Control plane, and CRDs if wanted. Stops what it began when it fails."""
        try:
            self.plane.start()
            if crds:
                self.install_crds()
        except BaseException:
            self.stop()
            raise

    def start_node(
        self,
        checkpoint: Path | None = None,
        shown: Sequence[Path] = (),
        programs: Path | None = None,
    ) -> None:
        """A node with the images of the engine, which may hold a checkpoint, and the supervisor.

        Its containers see the host's folders ``shown``. ``programs`` is a folder with a containerd.
        """
        self.node = Node(self.plane, shown, programs)
        self.node.start()
        engine = images.engine_image(self.home, checkpoint)
        self.node.load(engine)
        engine.unlink()
        self.node.load(build.archive("supervisor", images.SUPERVISOR))

    def load_operator(self) -> str:
        """The name of the operator's image, which is on the node then."""
        assert self.node is not None
        self.node.load(build.archive("operator", images.OPERATOR))
        return images.OPERATOR

    def load_peer(self, environment: Path) -> None:
        """The image for a real engine's environment, one of the folders shown."""
        assert self.node is not None
        made = images.peer_image(self.home, environment)
        self.node.load(made)
        made.unlink()

    def tools(self, **others: Path) -> Path:
        """A folder for a person's or a test's PATH with kubectl and ``others`` by name."""
        folder = self.home / "bin"
        folder.mkdir(exist_ok=True)
        commands = {"kubectl": self.binaries.command("kubectl")}
        for name, command in (commands | {name: [str(at)] for name, at in others.items()}).items():
            script = folder / name
            script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            script.chmod(0o755)
        return folder

    def install_crds(self) -> None:
        files = [argument for path in sorted(CRDS.glob("*.yaml")) for argument in ("-f", str(path))]
        applied = self.kube("apply", "--server-side", "-o", "name", *files).split()
        self.kube.established(*(name.partition("/")[2] for name in applied))

    def stop(self) -> None:
        """Leaves no process, mount, interface, cgroup or file behind."""
        slot = self.plane.slot
        if self.node is not None:
            self.node.stop()
            self.node = None
        self.plane.stop()
        slot.clean()
        slot.release()


class ExistingCluster:
    """The cluster that ``PLIMSOLL_E2E_KUBECONFIG`` names, with images that it can pull."""

    def __init__(self, kubeconfig: Path) -> None:
        absent = [name for name in E2E_IMAGES if not os.environ.get(name)]
        if absent:
            raise MissingError(f"{E2E} is set, but {' and '.join(absent)} must name images too")
        self.kubeconfig = kubeconfig
        self.engine_image, self.supervisor_image = (os.environ[name] for name in E2E_IMAGES)
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise MissingError("kubectl is missing")
        self.kube = Kube([kubectl], kubeconfig)
        Lab.install_crds(self)  # type: ignore[arg-type]


@contextlib.contextmanager
def namespace(kube: Kube, restricted: bool = False) -> Iterator[Kube]:
    """A fresh namespace, deleted afterwards; ``restricted`` enforces that pod security standard."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    metadata: Document = {"name": name}
    if restricted:
        metadata["labels"] = {"pod-security.kubernetes.io/enforce": "restricted"}
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    try:
        yield Kube(kube.kubectl, kube.kubeconfig, name)
    finally:
        # Not waited for: Kubernetes keeps every namespace 5 s before it begins to empty it.
        kube.delete("namespace", name)
        kube.delete("persistentvolume", selector=f"{OWNER}={name}")


def mounted(kube: Kube, claim: str, folder: Path, mode: str = "ReadOnlyMany") -> str:
    """A claim named ``claim`` on a folder of the node's host, bound; its name.

    ``mode`` is its access mode. A PersistentVolume carries the hostPath: pods of a restricted
    namespace may not. A pod that comes before its claim is bound may
    wait for the scheduler's next round for minutes.
    """
    volume = f"{kube.namespace}-{claim}"
    modes = [mode]
    size = {"storage": "20Gi"}
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume, "labels": {OWNER: kube.namespace}},
            "spec": {
                "capacity": size,
                "accessModes": modes,
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "claimRef": {"namespace": kube.namespace, "name": claim},
                "hostPath": {"path": str(folder), "type": "Directory"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim},
            "spec": {
                "accessModes": modes,
                "storageClassName": "",
                "volumeName": volume,
                "resources": {"requests": size},
            },
        },
    )
    kube("wait", f"pvc/{claim}", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")
    return claim


def new_lab(node: bool, detached: bool = False) -> Lab:
    """A lab that is not started yet. Builds the binaries where they are absent."""
    binaries = find(node)
    slot = take()
    logs = slot.home / "log"
    logs.mkdir()
    return Lab(ControlPlane(slot, binaries, Processes(logs, detached, slot.lock)))


def install_packages(packages: tuple[str, ...]) -> None:
    """Install Debian packages. :class:`MissingError` where that cannot be done here."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise MissingError(f"install by hand: {' '.join(packages)}")
    quiet = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    for command in (
        [*quiet, "update"],
        [*quiet, "install", "-y", "--no-install-recommends", *packages],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise LabError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
