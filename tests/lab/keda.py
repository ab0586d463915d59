"""KEDA's real operator, admission webhook and metrics server beside the lab's control plane."""

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
from tests.lab.kube import Kube, conditions, eventually
from tests.lab.lab import Lab
from tests.lab.operator import account_kubeconfig
from tests.ports import free_port

HOST = "127.0.0.1"
NAMESPACE = "keda"
OPERATOR, WEBHOOKS, METRICS = "keda-operator", "keda-webhooks", "keda-metrics-apiserver"
MANIFESTS = (
    "general/namespace.yaml",
    "crd/bases/*.yaml",
    "service_account/service_account.yaml",
    "rbac/role*.yaml",
    "metrics-server/role*.yaml",
)
"""Of KEDA's own installation, below its folder ``config``."""
API = "v1beta1.external.metrics.k8s.io"
READY_S = 60.0


def build() -> Path:
    """The folder of its programs; built once, in about 15 minutes on two cores."""
    packages = {OPERATOR: "cmd/operator", WEBHOOKS: "cmd/webhooks", METRICS: "cmd/adapter"}
    return binaries.programs(binaries.KEDA, packages)


class Keda:
    """An installation in a lab, with the rights of KEDA's own ClusterRole."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._programs = lab, build()
        self._config = binaries.module(binaries.KEDA) / "config"
        self._folder = lab.home / NAMESPACE
        self._health = {name: free_port() for name in (OPERATOR, WEBHOOKS)}
        self._grpc, self._port, self._metrics = free_port(), free_port(), free_port()
        files = [path for one in MANIFESTS for path in sorted(self._config.glob(one))]
        loaded = [one for path in files for one in yaml.safe_load_all(path.read_text())]
        self._objects = [one for one in loaded if one]
        self._definitions = [
            one["metadata"]["name"]
            for one in self._objects
            if one["kind"] == "CustomResourceDefinition"
        ]

    def start(self) -> None:
        """Returns when all of it serves."""
        authority = Authority(self._folder / "pki")
        authority.serving("tls", OPERATOR, [HOST])
        self._kube.apply(*self._objects)
        self._kube.established(*self._definitions)
        there = Kube(self._kube.kubectl, self._kube.kubeconfig, NAMESPACE)
        account_kubeconfig(there, OPERATOR, self._kubeconfig)
        certificates = f"--cert-dir={authority.folder}"
        self._run(OPERATOR, certificates, f"--metrics-service-bind-address={HOST}:{self._grpc}")
        self._run(WEBHOOKS, certificates, f"--port={self._port}")
        for name in self._health:
            eventually(partial(self._ready, name), f"{name} is ready", READY_S)
        self._kube.apply(self._webhook(authority.ca))
        self._run_metrics(authority)
        self._kube.apply(*self._external_metrics(authority.ca))
        eventually(self._available, "external metrics are available", READY_S)

    def stop(self) -> None:
        """The definitions first: the operator takes its finalizers from the objects."""
        for kind, names in (
            ("crd", self._definitions),
            ("validatingwebhookconfiguration", [WEBHOOKS]),
            ("apiservice", [API]),
        ):
            self._kube("delete", kind, "--ignore-not-found", *names)
        self._lab.plane.processes.stop(*self._health, METRICS)
        self._kube.delete("namespace", NAMESPACE)
        shutil.rmtree(self._folder)

    @property
    def _kube(self) -> Kube:
        return self._lab.kube

    @property
    def _kubeconfig(self) -> Path:
        return self._folder / "kubeconfig"

    def _run(self, name: str, *flags: str) -> None:
        health = f"--health-probe-bind-address={HOST}:{self._health[name]}"
        self._start(name, health, "--metrics-bind-address=0", *flags)

    def _start(self, name: str, *flags: str) -> None:
        environment = {
            "KUBECONFIG": str(self._kubeconfig),
            "WATCH_NAMESPACE": "",
            "POD_NAMESPACE": NAMESPACE,
            "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE,
        }
        argv = ["env", *(f"{key}={value}" for key, value in environment.items())]
        argv += [str(self._programs / name), *flags, "--zap-log-level=debug"]
        self._lab.plane.processes.start(name, argv)

    def _run_metrics(self, authority: Authority) -> None:
        """Its certificate folder is that of a client of the operator."""
        authority.serving("metrics", METRICS, [f"{METRICS}.{NAMESPACE}.svc"])
        authority.client("client", METRICS)
        folder = self._folder / "client"
        folder.mkdir()
        for name, copy in (
            ("ca.crt", "ca.crt"),
            ("client.crt", "tls.crt"),
            ("client.key", "tls.key"),
        ):
            shutil.copy(authority.folder / name, folder / copy)
        self._start(
            METRICS,
            f"--bind-address={HOST}",
            f"--secure-port={self._metrics}",
            f"--port={free_port()}",
            f"--cert-dir={folder}",
            f"--tls-cert-file={authority.folder / 'metrics.crt'}",
            f"--tls-private-key-file={authority.folder / 'metrics.key'}",
            f"--metrics-service-address={HOST}:{self._grpc}",
            *(
                f"--{part}-kubeconfig={self._kubeconfig}"
                for part in ("authentication", "authorization", "lister")
            ),
        )

    def _external_metrics(self, authority: Path) -> list[dict[str, Any]]:
        """As its installation has them, at an address beside the cluster."""
        text = (self._config / "metrics-server" / "api_service.yaml").read_text()
        document: dict[str, Any] = yaml.safe_load(text)
        document["spec"]["service"]["port"] = self._metrics
        document["spec"]["caBundle"] = base64.b64encode(authority.read_bytes()).decode()
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": METRICS, "namespace": NAMESPACE},
            "spec": {"type": "ExternalName", "externalName": "localhost"},
        }
        return [service, document]

    def _available(self) -> bool:
        self._lab.plane.processes.check(METRICS)
        found = conditions(self._kube.get("apiservice", API) or {})
        return any(one["type"] == "Available" and one["status"] == "True" for one in found)

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
