"""A real node: containerd, kubelet and kube-proxy in namespaces of their own. Needs root.

Pods and Services are reached from the host by their addresses; several nodes can run side by side.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.lab.controlplane import ControlPlane
from tests.lab.errors import LabError, MissingError
from tests.lab.images import ENVIRONMENT, pause_image, site_packages
from tests.lab.sandbox import Sandbox

NAME = "lab-node"
PACKAGES = (
    "containerd",
    "runc",
    "containernetworking-plugins",
    "conntrack",
    "iptables",
    "iproute2",
)
READY_S = 60.0
IPV6 = "ipv6"
"""Handler of a RuntimeClass whose pods get an IPv6 address and no other."""
TOOLS = ("containerd", "runc", "ctr", "conntrack", "iptables", "ip", "unshare", "nsenter")


def missing() -> str | None:
    """What this machine lacks for a node, with the command that installs it; None if nothing."""
    if os.geteuid() != 0:
        return "the node tier needs root (containerd and the kubelet mount and make cgroups)"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not Path("/usr/lib/cni/bridge").exists():
        absent.append("CNI plugins in /usr/lib/cni")
    if not absent:
        return None
    install = f"apt-get install -y --no-install-recommends {' '.join(PACKAGES)}"
    return f"{', '.join(absent)} missing: {install}"


class Node:
    """The one node of a control plane. Every container sees the host's folders ``shown`` under
    their own paths, read-only."""

    def __init__(
        self, plane: ControlPlane, shown: Sequence[Path] = (), programs: Path | None = None
    ) -> None:
        """``programs`` is a folder with another containerd than this machine's."""
        self.plane = plane
        self._shown, self._programs = shown, programs
        self.home = plane.home
        self.slot = plane.slot
        self.sandbox = Sandbox(plane.slot, plane.processes)

    @property
    def socket(self) -> Path:
        return self.home / "containerd" / "containerd.sock"

    def start(self) -> None:
        """Returns when the node is Ready. Bounded; :class:`LabError` says what failed."""
        if (why := missing()) is not None:
            raise MissingError(why)
        binaries = self.plane.binaries
        assert binaries.pause is not None
        self._configure()
        self.sandbox.start(binaries.pause)
        path = os.pathsep.join(filter(None, (str(self._programs or ""), os.environ["PATH"])))
        argv = ["env", f"PATH={path}", "containerd", f"--config={self.home / 'containerd.toml'}"]
        self._daemon("containerd", argv)
        self._until("containerd", lambda: self._ctr("version").returncode == 0)
        self.load(pause_image(self.home, binaries))
        self.start_kubelet()
        self._daemon(
            "kube-proxy",
            [*binaries.command("kube-proxy"), f"--config={self.home / 'kube-proxy.json'}"],
        )
        self._until("kubelet", self._ready)
        self.plane.processes.check("kube-proxy")

    def load(self, archive: Path) -> None:
        """Import an image archive into the node's containerd."""
        done = self._ctr("-n", "k8s.io", "images", "import", str(archive))
        if done.returncode:
            raise LabError(f"ctr images import {archive.name}: {done.stderr.strip()}")

    def reboot(self, pod_uid: str) -> None:
        """End the kubelet, a pod's containers and its sandbox at once, as a reboot does.

        Then the kubelet starts again. Returns before it has looked at its pods.
        """
        self.kill_kubelet()
        wanted = f'labels."io.kubernetes.pod.uid"=={pod_uid}'
        for one in self._ctr("-n", "k8s.io", "containers", "ls", "-q", wanted).stdout.split():
            self._ctr("-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", one)
        self.start_kubelet()

    def kill_kubelet(self) -> None:
        """SIGKILL. The pods run on."""
        outer = self.plane.processes.running["kubelet"]
        # nsenter waits for the kubelet, and would leave it behind.
        for inner in Path(f"/proc/{outer}/task/{outer}/children").read_text().split():
            os.kill(int(inner), signal.SIGKILL)
        self.plane.processes.stop("kubelet")

    def forget_unanswered(self, seconds: int) -> None:
        """Set after how many seconds conntrack forgets an unanswered connection; by default, 120.

        A first packet that comes while kube-proxy writes the rules for a Service's first endpoint
        is forwarded to none (kubernetes#48719). So is each later connection from the same port as
        long as conntrack remembers, and a client uses its ports again within a minute.
        """
        setting = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_syn_sent"
        subprocess.run(self.sandbox.enter(["sh", "-c", f"echo {seconds} >{setting}"]), check=True)

    def volume(self, pod_uid: str, name: str) -> Path:
        """The folder of a pod's emptyDir on disk."""
        return self.home / "kubelet" / "pods" / pod_uid / "volumes/kubernetes.io~empty-dir" / name

    def stop(self) -> None:
        """Everything of the node ends with its namespaces, running pods too."""
        self.sandbox.stop()
        self.plane.processes.stop("kube-proxy", "kubelet", "containerd")

    def start_kubelet(self) -> None:
        """The first time or after its end; returns at once."""
        self._daemon(
            "kubelet",
            [
                *self.plane.binaries.command("kubelet"),
                f"--config={self.home / 'kubelet.json'}",
                f"--kubeconfig={self.home / 'kubelet.kubeconfig'}",
                f"--hostname-override={NAME}",
                f"--node-ip={self.slot.node_ip}",
                f"--root-dir={self.home / 'kubelet'}",
                f"--cert-dir={self.home / 'kubelet' / 'pki'}",
            ],
        )

    def _daemon(self, name: str, argv: list[str]) -> None:
        self.plane.processes.start(name, self.sandbox.enter(argv))

    def _configure(self) -> None:
        for folder in ("containerd", "cni", f"cni-{IPV6}", "kubelet", "podlogs"):
            (self.home / folder).mkdir(exist_ok=True)
        (self.home / "containerd.toml").write_text(
            _CONTAINERD.format(home=self.home, sock=self.socket)
        )
        (self.home / "resolv.conf").write_text("")  # the node is offline
        documents = {
            "container.json": self._container(),
            "cni/10-lab.conflist": self._cni("pods0", self.slot.pod_cidr, "0.0.0.0/0"),
            f"cni-{IPV6}/10-lab.conflist": self._cni("pods6", self.slot.pod_cidr6, "::/0"),
            "kubelet.json": self._kubelet(),
            "kube-proxy.json": self._proxy(),
        }
        for name, document in documents.items():
            (self.home / name).write_text(json.dumps(document))

    def _container(self) -> dict[str, Any]:
        """What every container starts from: containerd's own, and this environment's packages.

        A node has a folder for all its pods as others have a driver: no manifest has to name it,
        and a restricted namespace refuses hostPath volumes.
        """
        said = subprocess.run(["ctr", "oci", "spec"], capture_output=True, text=True)
        if said.returncode:
            raise LabError(f"ctr oci spec: {said.stderr.strip()}")
        spec: dict[str, Any] = json.loads(said.stdout)
        options = ["rbind", "ro", "nosuid", "nodev"]
        shown = {ENVIRONMENT: str(site_packages())} | {str(path): str(path) for path in self._shown}
        spec["mounts"] += [
            {"destination": inside, "type": "bind", "source": source, "options": options}
            for inside, source in shown.items()
        ]
        return spec

    def _cni(self, bridge: str, subnet: str, everywhere: str) -> dict[str, Any]:
        """Addresses of ``subnet`` for pods at ``bridge``, with a route to ``everywhere``."""
        ipam = {
            "type": "host-local",
            "dataDir": str(self.home / "cni-ipam"),
            "ranges": [[{"subnet": subnet}]],
            "routes": [{"dst": everywhere}],
        }
        plugin = {
            "type": "bridge",
            "bridge": bridge,
            "isGateway": True,
            "ipMasq": True,
            "hairpinMode": True,
            "ipam": ipam,
        }
        portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "1.0.0", "name": bridge, "plugins": [plugin, portmap]}

    def _kubelet(self) -> dict[str, Any]:
        pki = self.plane.pki
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.slot.name}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "healthzPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(pki / "kubelet-server.crt"),
            "tlsPrivateKeyFile": str(pki / "kubelet-server.key"),
            "podLogsDir": str(self.home / "podlogs"),
            "volumePluginDir": str(self.home / "kubelet" / "volumeplugins"),
            "resolvConf": str(self.home / "resolv.conf"),
            # Answers while a test runs tests.lab.dns; without an address, pods get a warning event.
            "clusterDNS": [self.slot.dns_ip],
            "clusterDomain": "cluster.local",
            "kubeAPIQPS": 200,
            "kubeAPIBurst": 400,
            "registryPullQPS": 0,
            "eventRecordQPS": 0,
            "nodeStatusUpdateFrequency": "5s",
            "syncFrequency": "10s",
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%",
                             "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            # A second crash within minutes would otherwise wait 10 s, then 20 s, then 40 s.
            "featureGates": {"KubeletCrashLoopBackOffMax": True},
            "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},
        }  # fmt: skip

    def _proxy(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clusterCIDR": self.slot.pod_cidr,
            "hostnameOverride": NAME,
            "clientConnection": {"kubeconfig": str(self.home / "kube-proxy.kubeconfig")},
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s",
                          "tcpCloseWaitTimeout": "0s"},
            "iptables": {"minSyncPeriod": "0s", "syncPeriod": "30s"},
        }  # fmt: skip

    def _until(self, name: str, check: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_S
        while not check():
            self.plane.processes.check(name)
            if time.monotonic() > deadline:
                raise LabError(f"{name} is not ready after {READY_S:.0f} s: see {self.home}")
            time.sleep(0.1)

    def _ready(self) -> bool:
        path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        return self._kubectl("get", "node", NAME, "-o", path).stdout == "True"

    def _ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ctr", "-a", str(self.socket), *arguments], capture_output=True, text=True
        )

    def _kubectl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        prefix = [*self.plane.binaries.command("kubectl"), f"--kubeconfig={self.plane.kubeconfig}"]
        return subprocess.run([*prefix, *arguments], capture_output=True, text=True)


# restrict_oom_score_adj: without CAP_SYS_RESOURCE a sandbox's lower score cannot be written.
_CONTAINERD = """\
version = 2
root = "{home}/containerd/root"
state = "{home}/containerd/state"
oom_score = 0
[grpc]
  address = "{sock}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  enable_unprivileged_ports = true
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = ["{home}/cdi"]
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{home}/container.json"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.ipv6]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{home}/container.json"
      cni_conf_dir = "{home}/cni-ipv6"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.ipv6.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{home}/cni"
[plugins."io.containerd.internal.v1.opt"]
  path = "{home}/containerd/opt"
"""
