"""The chart's objects for the admission webhook, for an operator that runs beside the cluster."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.lab import binaries
from tests.lab.helm import CHART, RELEASE, Helm
from tests.lab.kube import Kube
from tests.ports import free_port

HOST = "127.0.0.1"
NAMESPACE = "plimsoll-system"
NAME = f"{RELEASE}-webhook"
"""Of the Secret, the Service and the MutatingWebhookConfiguration."""


class Webhook:
    """``flags`` are the operator's, whose account is that of ``config/``."""

    def __init__(self, admin: Kube) -> None:
        self._system = Kube(admin.kubectl, admin.kubeconfig, NAMESPACE)
        self._text = _rendered(admin.kubeconfig)
        self.port = free_port()
        self.flags = (
            f"--webhook={NAMESPACE}/{NAME}",
            f"--webhook-port={self.port}",
            f"--webhook-url=https://{HOST}:{self.port}/pods",
        )

    def install(self) -> None:
        self._system("apply", "-f", "-", stdin=self._text)

    def remove(self) -> None:
        self._system("delete", "--ignore-not-found", "-f", "-", stdin=self._text)


@cache
def _rendered(kubeconfig: Path) -> str:
    """The chart's objects, once for all tests of a lab."""
    values = {
        "serviceAccount": {"create": False, "name": "plimsoll-operator"},
        "webhook": {"enabled": True},
    }
    only = ("--show-only=templates/webhook.yaml", f"--kube-version={binaries.VERSION}")
    helm = Helm(binaries.helm(4), Kube([], kubeconfig, NAMESPACE))
    return helm("template", RELEASE, str(CHART), *only, values=values)
