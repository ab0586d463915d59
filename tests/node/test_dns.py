"""The lab's DNS (``tests/lab/dns.py``): the pods of a headless Service, ready or not, by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.dns import ClusterDNS
from tests.lab.errors import MissingError
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab

SEEN_S = 60.0
LIMITED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
RESOLVE = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"


def pod(image: str) -> dict[str, Any]:
    """One that is never ready, as a leader is before its workers have joined."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "leader", "labels": {"app": "group"}},
        "spec": {
            "hostname": "leader",
            "subdomain": "group",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsUser": 10001,
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "main",
                    "image": image,
                    "command": ["sleep", "600"],
                    "readinessProbe": {"exec": {"command": ["cat", "/absent"]}},
                    "securityContext": LIMITED,
                }
            ],
        },
    }


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_pod_finds_another_by_name_before_it_is_ready(node: Lab, kube: Kube) -> None:
    if not isinstance(node, Lab):
        pytest.skip("another cluster has a DNS of its own")
    try:
        dns = ClusterDNS(node)
    except MissingError as missing:
        pytest.skip(str(missing))
    headless = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "group"}}
    metadata = {"name": "group"}
    kube.apply({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": headless})
    kube.apply(pod(node.supervisor_image))
    dns.start()
    try:

        def address(name: str) -> str:
            return kube.run("exec", "leader", "--", "python", "-c", RESOLVE, name).stdout.strip()

        own = f"leader.group.{kube.namespace}"
        found = eventually(lambda: address(own), f"{own} is resolved", SEEN_S)
        assert found == (kube.get("pod", "leader") or {})["status"]["podIP"]
        assert address("kubernetes.default") == node.plane.slot.api_service_ip
        assert address(f"nobody.group.{kube.namespace}") == ""
    finally:
        dns.stop()
