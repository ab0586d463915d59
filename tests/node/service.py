"""The service of the node tests: its manifest, its state, its clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.lab.kube import Kube, eventually
from tests.node.streams import Streams

SERVICE = "leaky"
SELECTOR = f"plimsoll.dev/service={SERVICE}"
READY_S = 480
"""Several engines that import PyTorch on two busy cores need minutes."""
Manifest = Callable[..., dict[str, Any]]


def plain(manifest: Manifest, **spec: Any) -> dict[str, Any]:
    """A service without a fault, whose supervisor only looks: these tests are about the rest."""
    made = manifest("", mode="Observe")
    del made["spec"]["engine"]["env"]
    made["spec"]["engine"]["args"].remove("--allow-inject")
    made["spec"] |= spec
    return made


def ready(kube: Kube) -> None:
    eventually(lambda: condition(kube, "Ready") == "True", "it is ready", READY_S)


def streaming(kube: Kube, count: int = 2) -> Streams:
    address = (kube.get("service", SERVICE) or {})["spec"]["clusterIP"]
    return Streams(f"http://{address}", SERVICE, count)


def pods(kube: Kube) -> list[dict[str, Any]]:
    found = kube.list("pods", SELECTOR)
    return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]


def status(kube: Kube) -> dict[str, Any]:
    return dict((kube.get("plinf", SERVICE) or {}).get("status") or {})


def condition(kube: Kube, type_: str) -> str:
    found = [one for one in status(kube).get("conditions", []) if one["type"] == type_]
    return str(found[0]["status"]) if found else ""
