"""The cluster's DNS: the real CoreDNS beside the lab's control plane, with the kubernetes plugin.

It answers for Services, and for the pods of headless ones by their names. It forwards nothing: the
node is offline. Pods find it at the address that the kubelet gives them, as in any cluster.
"""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

from tests.lab import binaries
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab
from tests.ports import free_port

NAME, SERVICE = "coredns", "kube-dns"
PROGRAM = Path(__file__).parent / NAME
READY_S = 60.0
CONFIGURATION = """\
.:{port} {{
    bind {address}
    errors
    ready {address}:{health}
    kubernetes cluster.local {{
        kubeconfig {kubeconfig}
        ttl 1
    }}
}}
"""


def build() -> Path:
    """The program; built once, in 12 minutes on two busy cores."""
    return binaries.programs(binaries.COREDNS, {NAME: f"cmd/{NAME}"}, own=PROGRAM) / NAME


class ClusterDNS:
    """The DNS of a lab with a node, from :meth:`start` to :meth:`stop`."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._program = lab, build()
        self._address = lab.plane.slot.host_ip
        self._port, self._health = free_port(), free_port()

    def start(self) -> None:
        """Returns when it knows the cluster's Services."""
        file = self._lab.home / "Corefile"
        file.write_text(
            CONFIGURATION.format(
                address=self._address,
                port=self._port,
                health=self._health,
                kubeconfig=self._lab.kubeconfig,
            )
        )
        self._lab.plane.processes.start(NAME, [str(self._program), f"-conf={file}"])
        eventually(self._ready, "the cluster's DNS is ready", READY_S)
        self._kube.apply(*self._service())

    def stop(self) -> None:
        """Its Service too: names are then unknown at once, not after a timeout."""
        self._kube.delete("service", SERVICE)
        self._kube.delete("endpointslice", SERVICE)
        self._lab.plane.processes.stop(NAME)

    @property
    def _kube(self) -> Kube:
        return Kube(self._lab.kube.kubectl, self._lab.kubeconfig, "kube-system")

    def _service(self) -> list[dict[str, Any]]:
        """The Service at the kubelet's ``clusterDNS``, with an address beside the cluster."""
        protocols = {"dns": "UDP", "dns-tcp": "TCP"}
        metadata = {"name": SERVICE, "namespace": "kube-system"}
        return [
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": metadata,
                "spec": {
                    "clusterIP": self._lab.plane.slot.dns_ip,
                    "ports": [
                        {"name": name, "protocol": protocol, "port": 53, "targetPort": self._port}
                        for name, protocol in protocols.items()
                    ],
                },
            },
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": metadata | {"labels": {"kubernetes.io/service-name": SERVICE}},
                "addressType": "IPv4",
                "ports": [
                    {"name": name, "protocol": protocol, "port": self._port}
                    for name, protocol in protocols.items()
                ],
                "endpoints": [{"addresses": [self._address], "conditions": {"ready": True}}],
            },
        ]

    def _ready(self) -> bool:
        self._lab.plane.processes.check(NAME)
        try:
            url = f"http://{self._address}:{self._health}/ready"
            with urllib.request.urlopen(url, timeout=5):
                return True
        except OSError:
            return False
