"""KEDA's real operator and admission webhook beside the lab's control plane."""

from __future__ import annotations

import base64
import shutil
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.lab import binaries
from tests.lab.certs import Authority
from tests.lab.controlplane import free_port
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab
from tests.lab.operator import account_kubeconfig

HOST = "127.0.0.1"
NAMESPACE = "keda"
OPERATOR, WEBHOOKS = "keda-operator", "keda-webhooks"
MANIFESTS = (
    "general/namespace.yaml",
    "crd/bases/*.yaml",
    "service_account/service_account.yaml",
    "rbac/role*.yaml",
)
"""Of KEDA's own installation, below its folder ``config``."""
READY_S = 60.0


def build() -> Path:
    """The folder of its programs; built once, in about 13 minutes on two cores."""
    packages = {OPERATOR: "cmd/operator", WEBHOOKS: "cmd/webhooks"}
    return binaries.programs(binaries.KEDA, packages)


class Keda:
    """An installation in a lab, with the rights of KEDA's own ClusterRole."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._programs = lab, build()
        self._config = binaries.module(binaries.KEDA) / "config"
        self._folder = lab.home / NAMESPACE
        self._health = {name: free_port() for name in (OPERATOR, WEBHOOKS)}
        self._port = free_port()
        files = [path for one in MANIFESTS for path in sorted(self._config.glob(one))]
        loaded = [one for path in files for one in yaml.safe_load_all(path.read_text())]
        self._objects = [one for one in loaded if one]
        self._definitions = [
            one["metadata"]["name"]
            for one in self._objects
            if one["kind"] == "CustomResourceDefinition"
        ]

    def start(self) -> None:
        """Returns when the operator and the webhooks serve."""
        authority = Authority(self._folder / "pki")
        authority.serving("tls", OPERATOR, [HOST])
        self._kube.apply(*self._objects)
        self._kube.established(*self._definitions)
        there = Kube(self._kube.kubectl, self._kube.kubeconfig, NAMESPACE)
        account_kubeconfig(there, OPERATOR, self._folder / "kubeconfig")
        certificates = f"--cert-dir={authority.folder}"
        metrics = f"--metrics-service-bind-address={HOST}:{free_port()}"
        self._run(OPERATOR, certificates, metrics)
        self._run(WEBHOOKS, certificates, f"--port={self._port}")
        for name in self._health:
            eventually(partial(self._ready, name), f"{name} is ready", READY_S)
        self._kube.apply(self._webhook(authority.ca))

    def stop(self) -> None:
        """The definitions first: the operator takes its finalizers from the objects."""
        for kind, names in (
            ("crd", self._definitions),
            ("validatingwebhookconfiguration", [WEBHOOKS]),
        ):
            self._kube("delete", kind, "--ignore-not-found", *names)
        self._lab.plane.processes.stop(*self._health)
        self._kube.delete("namespace", NAMESPACE)
        shutil.rmtree(self._folder)

    @property
    def _kube(self) -> Kube:
        return self._lab.kube

    def _run(self, name: str, *flags: str) -> None:
        environment = {
            "WATCH_NAMESPACE": "",
            "POD_NAMESPACE": NAMESPACE,
            "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE,
        }
        argv = ["env", *(f"{key}={value}" for key, value in environment.items())]
        argv += [str(self._programs / name), f"--kubeconfig={self._folder / 'kubeconfig'}"]
        argv += [f"--health-probe-bind-address={HOST}:{self._health[name]}"]
        argv += ["--metrics-bind-address=0", "--zap-log-level=debug", *flags]
        self._lab.plane.processes.start(name, argv)

    def _webhook(self, authority: Path) -> dict[str, Any]:
        """As its installation has it, at an address beside the cluster."""
        bundle = base64.b64encode(authority.read_bytes()).decode()
        text = (self._config / "webhooks" / "validation_webhooks.yaml").read_text()
        document: dict[str, Any] = yaml.safe_load(text)
        document["metadata"] = {"name": WEBHOOKS}
        for webhook in document["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            url = f"https://{HOST}:{self._port}{path}"
            webhook["clientConfig"] = {"url": url, "caBundle": bundle}
        return document

    def _ready(self, name: str) -> bool:
        self._lab.plane.processes.check(name)
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._health[name]}/readyz", timeout=5):
                return True
        except OSError:
            return False
