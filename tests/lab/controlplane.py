"""A real control plane: etcd, API server, controller-manager and scheduler, no kubelet.

Several can run side by side: each has its own directory, ports and addresses. Needs no root.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.binaries import Binaries
from tests.lab.certs import Authority
from tests.lab.errors import LabError
from tests.lab.processes import Processes
from tests.lab.slot import Slot
from tests.ports import free_port

READY_S = 300.0
"""On a busy machine an API server needs minutes to start."""
FRONT_PROXY = "front-proxy"
"""The API server's name towards the API servers behind it, such as one of metrics."""
API_NAMES = [
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
]


@dataclass
class ControlPlane:
    """Ports are chosen at construction; everything else follows from the lab's number."""

    slot: Slot
    binaries: Binaries
    processes: Processes
    api_port: int = field(default_factory=free_port)
    etcd_port: int = field(default_factory=free_port)
    peer_port: int = field(default_factory=free_port)
    api_flags: tuple[str, ...] = ()
    """More of the API server's."""

    @property
    def home(self) -> Path:
        return self.slot.home

    @property
    def pki(self) -> Path:
        return self.home / "pki"

    @property
    def kubeconfig(self) -> Path:
        return self.home / "admin.kubeconfig"

    def start(self) -> None:
        """Returns when the API server is ready and pods can be created. Bounded."""
        self._certificates()
        self._etcd()
        self._api_server()
        self._wait("/readyz")
        self._controllers()
        # A pod needs its namespace's default ServiceAccount, which a controller makes.
        self._wait("/api/v1/namespaces/default/serviceaccounts/default")

    def stop(self) -> None:
        """Ends every process of the control plane."""
        self.processes.stop("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd")

    def restart_api_server(self) -> None:
        """With the present flags. Returns when it is ready."""
        self.processes.stop("kube-apiserver")
        self._api_server()
        self._wait("/readyz")

    def restart_controller_manager(self, *flags: str) -> None:
        """With ``flags`` in addition to its own. Returns at once."""
        self.processes.stop("kube-controller-manager")
        self._controller_manager(*flags)

    def _certificates(self) -> None:
        slot = self.slot
        authority = Authority(self.pki)
        authority.service_account_key()
        hosts = ["127.0.0.1", slot.host_ip, slot.api_service_ip, *API_NAMES]
        authority.serving("apiserver", "kube-apiserver", hosts)
        authority.serving("kubelet-server", "lab-node", ["127.0.0.1", slot.node_ip, "lab-node"])
        authority.client("apiserver-kubelet-client", "kubelet-client", "system:masters")
        authority.client("front-proxy", FRONT_PROXY)
        here, from_the_node = "127.0.0.1", slot.host_ip
        for name, common_name, group, host in (
            ("admin", "admin", "system:masters", here),
            ("kube-controller-manager", "system:kube-controller-manager", None, here),
            ("kube-scheduler", "system:kube-scheduler", None, here),
            ("kube-proxy", "system:kube-proxy", None, from_the_node),
            ("kubelet", "system:node:lab-node", "system:nodes", from_the_node),
        ):
            authority.client(name, common_name, group)
            server = f"https://{host}:{self.api_port}"
            authority.kubeconfig(name, server, self.home / f"{name}.kubeconfig")

    def _etcd(self) -> None:
        client = f"http://127.0.0.1:{self.etcd_port}"
        peer = f"http://127.0.0.1:{self.peer_port}"
        self.processes.start(
            "etcd",
            [
                *self.binaries.command("etcd"),
                "--name=lab",
                f"--data-dir={self.home / 'etcd'}",
                "--unsafe-no-fsync",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=lab={peer}",
                "--log-level=warn",
            ],
        )

    def _api_server(self) -> None:
        pki = self.pki
        # The advertised address must not be loopback, but nothing has to carry it before a node
        # is there: the node's link does.
        self.processes.start(
            "kube-apiserver",
            [
                *self.binaries.command("kube-apiserver"),
                f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
                "--bind-address=0.0.0.0",
                f"--secure-port={self.api_port}",
                f"--advertise-address={self.slot.host_ip}",
                f"--tls-cert-file={pki / 'apiserver.crt'}",
                f"--tls-private-key-file={pki / 'apiserver.key'}",
                f"--client-ca-file={pki / 'ca.crt'}",
                "--authorization-mode=Node,RBAC",
                f"--service-cluster-ip-range={self.slot.service_cidr}",
                "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
                f"--service-account-key-file={pki / 'sa.pub'}",
                f"--service-account-signing-key-file={pki / 'sa.key'}",
                f"--kubelet-certificate-authority={pki / 'ca.crt'}",
                f"--kubelet-client-certificate={pki / 'apiserver-kubelet-client.crt'}",
                f"--kubelet-client-key={pki / 'apiserver-kubelet-client.key'}",
                "--kubelet-preferred-address-types=InternalIP",
                "--allow-privileged=true",
                f"--requestheader-client-ca-file={pki / 'ca.crt'}",
                f"--requestheader-allowed-names={FRONT_PROXY}",
                "--requestheader-username-headers=X-Remote-User",
                "--requestheader-group-headers=X-Remote-Group",
                "--requestheader-extra-headers-prefix=X-Remote-Extra-",
                f"--proxy-client-cert-file={pki / 'front-proxy.crt'}",
                f"--proxy-client-key-file={pki / 'front-proxy.key'}",
                "--profiling=false",
                f"--cert-dir={pki}",
                "--feature-gates=ResourceHealthStatus=true",  # alpha: pods keep a device's health
                *self.api_flags,
            ],
        )

    def _controllers(self) -> None:
        self._controller_manager()
        self.processes.start(
            "kube-scheduler",
            [
                *self.binaries.command("kube-scheduler"),
                f"--kubeconfig={self.home / 'kube-scheduler.kubeconfig'}",
                "--leader-elect=false",
                "--secure-port=0",
            ],
        )

    def _controller_manager(self, *flags: str) -> None:
        # Leader election off: there is one of each. The default rate would hold back the
        # garbage collector, which the tests wait for.
        self.processes.start(
            "kube-controller-manager",
            [
                *self.binaries.command("kube-controller-manager"),
                f"--kubeconfig={self.home / 'kube-controller-manager.kubeconfig'}",
                "--leader-elect=false",
                "--secure-port=0",
                "--kube-api-qps=500",
                "--kube-api-burst=1000",
                "--use-service-account-credentials",
                f"--service-account-private-key-file={self.pki / 'sa.key'}",
                f"--root-ca-file={self.pki / 'ca.crt'}",
                "--node-monitor-grace-period=60s",
                *flags,
            ],
        )

    def _wait(self, path: str) -> None:
        deadline = time.monotonic() + READY_S
        argv = [*self.binaries.command("kubectl"), f"--kubeconfig={self.kubeconfig}"]
        while True:
            done = subprocess.run([*argv, "get", "--raw", path], capture_output=True, text=True)
            if done.returncode == 0:
                return
            self.processes.check("etcd")
            self.processes.check("kube-apiserver")
            if time.monotonic() > deadline:
                raise LabError(f"the API server does not answer {path}: {done.stderr.strip()}")
            time.sleep(0.1)
