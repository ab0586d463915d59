"""A real node: containerd, kubelet and kube-proxy on this machine. Needs root on Debian.

One at a time on a machine: the kubelet's port and kube-proxy's rules are the machine's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import IO, Any

from tests.lab.controlplane import ControlPlane, free_port
from tests.lab.errors import LabError, MissingError
from tests.lab.images import pause_image

NAME = "lab-node"
PACKAGES = (
    "containerd",
    "runc",
    "containernetworking-plugins",
    "conntrack",
    "iptables",
    "iproute2",
)
LOCK = Path("/run/plimsoll-lab-node.lock")
READY_S = 60.0
HIERARCHIES = [
    "memory",
    "cpu",
    "cpuacct",
    "cpuset",
    "pids",
    "blkio",
    "devices",
    "freezer",
    "systemd",
    "unified",
]
SYSCTLS = (
    "net.ipv4.ip_forward",
    "net.bridge.bridge-nf-call-iptables",
    "net.ipv4.conf.all.route_localnet",
)


def missing() -> str | None:
    """What this machine lacks for a node, with the command that installs it; None if nothing."""
    if os.geteuid() != 0:
        return "the node tier needs root (containerd and the kubelet mount and make cgroups)"
    absent = [p for p in ("containerd", "runc", "ctr", "conntrack", "iptables", "ip")
              if shutil.which(p) is None]  # fmt: skip
    if not Path("/usr/lib/cni/bridge").exists():
        absent.append("CNI plugins in /usr/lib/cni")
    if not absent:
        return None
    install = f"apt-get install -y --no-install-recommends {' '.join(PACKAGES)}"
    return f"{', '.join(absent)} missing: {install}"


class Node:
    """The one node of a control plane."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.home = plane.home
        self.pod_cidr = f"10.97.{plane.index}.0/24"
        self.cni_bridge = f"pcni{plane.index}"
        self._lock: IO[str] | None = None
        self._sysctls: dict[str, str] = {}

    @property
    def socket(self) -> Path:
        return self.home / "containerd" / "containerd.sock"

    def start(self) -> None:
        """Returns when the node is Ready. Bounded; :class:`LabError` says what failed."""
        if (why := missing()) is not None:
            raise MissingError(why)
        self._lock = LOCK.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LabError("another lab runs a node on this machine: end it first") from error
        self._keep_sysctls()
        self._configure()
        processes = self.plane.processes
        processes.start(
            "containerd", ["containerd", "--config", str(self.home / "containerd.toml")]
        )
        self._until("containerd", lambda: self._ctr("version").returncode == 0)
        self.load(pause_image(self.home, self.plane.binaries))
        kubelet = self.plane.binaries.command("kubelet")
        processes.start(
            "kubelet",
            [
                *kubelet,
                f"--config={self.home / 'kubelet.json'}",
                f"--kubeconfig={self.home / 'kubelet.kubeconfig'}",
                f"--hostname-override={NAME}",
                f"--node-ip={self.plane.node_ip}",
                f"--root-dir={self.home / 'kubelet'}",
                f"--cert-dir={self.home / 'kubelet' / 'pki'}",
            ],
        )
        processes.start(
            "kube-proxy",
            [*self.plane.binaries.command("kube-proxy"),
             f"--config={self.home / 'kube-proxy.json'}"],
        )  # fmt: skip
        self._until("kubelet", self._ready)
        processes.check("kube-proxy")

    def load(self, archive: Path) -> None:
        """Import an image archive into the node's containerd."""
        done = self._ctr("-n", "k8s.io", "images", "import", str(archive))
        if done.returncode:
            raise LabError(f"ctr images import {archive.name}: {done.stderr.strip()}")

    def stop(self) -> None:
        """Pods first, while the kubelet can still end them; then daemons and what they leave."""
        self._kubectl(
            "delete", "deploy,ds,sts,job,pod", "--all", "-A", "--grace-period=1", "--timeout=30s"
        )
        processes = self.plane.processes
        processes.stop("kube-proxy", "kubelet")
        for kind, remove in (("tasks", ["rm", "-f"]), ("containers", ["rm"])):
            for item in self._ctr("-n", "k8s.io", kind, "ls", "-q").stdout.split():
                self._ctr("-n", "k8s.io", kind, *remove, item)
        processes.stop("containerd")
        self._unmount()
        subprocess.run(["ip", "link", "del", self.cni_bridge], capture_output=True)
        for hierarchy in HIERARCHIES:
            self._remove_cgroups(Path("/sys/fs/cgroup") / hierarchy / "kubepods")
        self._remove_cgroups(Path("/sys/fs/cgroup/kubepods"))
        self._restore_rules()
        if self._lock is not None:
            self._lock.close()

    def _configure(self) -> None:
        for folder in ("containerd", "cni", "kubelet", "podlogs"):
            (self.home / folder).mkdir(exist_ok=True)
        (self.home / "containerd.toml").write_text(
            _CONTAINERD.format(home=self.home, sock=self.socket)
        )
        documents = {
            "cni/10-lab.conflist": self._cni(),
            "kubelet.json": self._kubelet(),
            "kube-proxy.json": self._proxy(),
        }
        for name, document in documents.items():
            (self.home / name).write_text(json.dumps(document))

    def _cni(self) -> dict[str, Any]:
        ipam = {
            "type": "host-local",
            "dataDir": str(self.home / "cni-ipam"),
            "ranges": [[{"subnet": self.pod_cidr}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        bridge = {
            "type": "bridge",
            "bridge": self.cni_bridge,
            "isGateway": True,
            "ipMasq": True,
            "hairpinMode": True,
            "ipam": ipam,
        }
        portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "1.0.0", "name": "lab", "plugins": [bridge, portmap]}

    def _kubelet(self) -> dict[str, Any]:
        pki = self.plane.pki
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "cgroupDriver": "cgroupfs",
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
            "resolvConf": "/etc/resolv.conf",
            # Nothing answers there; without an address each pod gets a warning event.
            "clusterDNS": [f"{self.plane.api_service_ip[:-1]}10"],
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
            "clusterCIDR": self.pod_cidr,
            "hostnameOverride": NAME,
            "clientConnection": {"kubeconfig": str(self.home / "kube-proxy.kubeconfig")},
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s",
                          "tcpCloseWaitTimeout": "0s"},
            "healthzBindAddress": f"127.0.0.1:{free_port()}",
            "metricsBindAddress": f"127.0.0.1:{free_port()}",
            "iptables": {"minSyncPeriod": "0s", "syncPeriod": "30s"},
        }  # fmt: skip

    def _until(self, name: str, check: Any) -> None:
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

    def _unmount(self) -> None:
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        etcd = str(self.home / "etcd")
        for mount in sorted(mounts, reverse=True):
            if mount.startswith(f"{self.home}/") and mount != etcd:
                subprocess.run(["umount", mount], capture_output=True)
        for namespace in Path("/run/netns").glob("cni-*"):
            subprocess.run(["umount", namespace], capture_output=True)
            namespace.unlink(missing_ok=True)

    @staticmethod
    def _remove_cgroups(top: Path) -> None:
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def _keep_sysctls(self) -> None:
        for name in SYSCTLS:
            path = Path("/proc/sys") / name.replace(".", "/")
            if path.exists():
                self._sysctls[name] = path.read_text().strip()
        for name in SYSCTLS[:2]:
            if name in self._sysctls:
                (Path("/proc/sys") / name.replace(".", "/")).write_text("1")

    def _restore_rules(self) -> None:
        proxy = [*self.plane.binaries.command("kube-proxy"), "--cleanup"]
        subprocess.run([*proxy, f"--config={self.home / 'kube-proxy.json'}"], capture_output=True)
        subnet = self.pod_cidr.rsplit(".", 1)[0]
        rules = subprocess.run(
            ["iptables", "-w", "-t", "nat", "-S"], capture_output=True, text=True
        )
        for rule in rules.stdout.splitlines():
            if rule.startswith("-A ") and subnet in rule:
                subprocess.run(f"iptables -w -t nat -D {rule[3:]}", shell=True, capture_output=True)
        for table, chains in _KUBELET_CHAINS.items():
            for chain in chains:
                for tool in ("iptables", "ip6tables"):
                    for parent in ("INPUT", "OUTPUT"):
                        subprocess.run([tool, "-w", "-t", table, "-D", parent, "-j", chain],
                                       capture_output=True)  # fmt: skip
                    for verb in ("-F", "-X"):
                        subprocess.run([tool, "-w", "-t", table, verb, chain], capture_output=True)
        for name, value in self._sysctls.items():
            (Path("/proc/sys") / name.replace(".", "/")).write_text(value)
        # What the kubelet hard-codes outside its root directory.
        shutil.rmtree("/var/lib/kubelet/device-plugins", ignore_errors=True)


_KUBELET_CHAINS = {
    "filter": ("KUBE-FIREWALL", "KUBE-KUBELET-CANARY"),
    "nat": ("KUBE-KUBELET-CANARY",),
    "mangle": ("KUBE-KUBELET-CANARY", "KUBE-IPTABLES-HINT"),
}

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
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{home}/cni"
[plugins."io.containerd.internal.v1.opt"]
  path = "{home}/containerd/opt"
"""
