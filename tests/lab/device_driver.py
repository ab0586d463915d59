"""The example driver for dynamic resource allocation, whose devices are environment variables."""

from __future__ import annotations

from pathlib import Path

from tests.lab import binaries
from tests.lab.kube import eventually
from tests.lab.lab import Lab
from tests.lab.node import NAME as NODE_NAME

NAME = "device-driver"
CLASS = "gpu.example.com"
"""The driver and its DeviceClass: ``pkg/consts/consts.go`` of the module."""
DEVICE_CLASS = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": CLASS},
    "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{CLASS}'"}}]},
}
PROGRAM = "dra-example-kubeletplugin"
READY_S = 60.0


def build() -> Path:
    """The driver; built once, in about 2 minutes."""
    return binaries.programs(binaries.DRA_DRIVER, {PROGRAM: f"cmd/{PROGRAM}"}) / PROGRAM


def build_containerd() -> Path:
    """A folder with a containerd that knows what DRA drivers give; built once, in 2 minutes."""
    packages = {name: f"cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2")}
    tags = "no_btrfs,no_devmapper,no_zfs,no_aufs"
    return binaries.programs(binaries.CONTAINERD, packages, tags=tags)


class DeviceDriver:
    """Beside the lab's kubelet, which finds it by its sockets."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._program = lab, build()

    def start(self, devices: int) -> None:
        """Returns when the scheduler knows the node's devices."""
        home, kubelet = self._lab.home, self._lab.home / "kubelet"
        for folder in ("plugins_registry", "plugins"):  # a kubelet makes them; here may be none
            (kubelet / folder).mkdir(parents=True, exist_ok=True)
        argv = [str(self._program), f"--kubeconfig={self._lab.kubeconfig}"]
        argv += [f"--node-name={NODE_NAME}", f"--num-devices={devices}", f"--cdi-root={home}/cdi"]
        argv += [f"--kubelet-registrar-directory-path={kubelet}/plugins_registry"]
        argv += [f"--kubelet-plugins-directory-path={kubelet}/plugins"]
        self._lab.plane.processes.start(NAME, ["env", f"NODE_NAME={NODE_NAME}", *argv])
        eventually(self._published, "the driver has published its devices", READY_S)

    def stop(self) -> None:
        """Ends its process; the devices stay listed until the kubelet misses it."""
        self._lab.plane.processes.stop(NAME)

    def _published(self) -> bool:
        self._lab.plane.processes.check(NAME)
        return bool(self._lab.kube.list("resourceslices", ""))
