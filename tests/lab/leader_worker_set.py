"""The real controller of LeaderWorkerSets beside the lab's control plane, with its webhooks."""

from __future__ import annotations

import base64
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.lab import binaries
from tests.lab.certs import Authority
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab
from tests.ports import free_port

HOST = "127.0.0.1"
NAME = "lws-controller"
PODS = ("mpod.kb.io", "vpod.kb.io")
"""Webhooks that its installation restricts to the pods of LeaderWorkerSets."""
OF_SETS = {"matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]}
READY_S = 180.0


class LeaderWorkerSets:
    """Its installation in a lab, from :meth:`start` to :meth:`stop`."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._manager, self._manifests = binaries.leader_worker_set()
        self._folder = lab.home / NAME
        self._port, self._health = free_port(), free_port()

    def start(self) -> None:
        """Returns when it serves. Definitions first: it watches them from its start on."""
        self._folder.mkdir()
        authority = Authority(self._folder / "pki")
        authority.serving("tls", NAME, [HOST])
        definitions = sorted((self._manifests / "crd" / "bases").glob("*.yaml"))
        flags = [argument for path in definitions for argument in ("-f", str(path))]
        applied = self._kube("apply", "--server-side", "-o", "name", *flags).split()
        self._kube.established(*(one.partition("/")[2] for one in applied), timeout_s=READY_S)
        configuration = self._folder / "configuration.yaml"
        configuration.write_text(yaml.safe_dump(self._configuration()))
        self.run()
        eventually(self._ready, "the controller of LeaderWorkerSets is ready", READY_S)
        self._kube.apply(*self._webhooks(authority.ca))

    def run(self) -> None:
        """Start its process, the first time or after a kill; returns at once."""
        argv = [str(self._manager), f"--config={self._folder / 'configuration.yaml'}"]
        argv += [f"--kubeconfig={self._lab.kubeconfig}", "--zap-log-level=info"]
        self._lab.plane.processes.start(NAME, argv)

    @property
    def pid(self) -> int:
        """Of its process, which may have ended."""
        return self._lab.plane.processes.running[NAME]

    def stop(self) -> None:
        """Its webhooks first: without it they would refuse pods."""
        kinds = "mutatingwebhookconfiguration,validatingwebhookconfiguration"
        self._kube("delete", kinds, "-l", f"app={NAME}")
        self._lab.plane.processes.stop(NAME)
        shutil.rmtree(self._folder)

    @property
    def _kube(self) -> Kube:
        return self._lab.kube

    def _configuration(self) -> dict[str, Any]:
        return {
            "apiVersion": "config.lws.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": f"{HOST}:{self._health}"},
            "webhook": {"host": HOST, "port": self._port, "certDir": str(self._folder / "pki")},
        }

    def _webhooks(self, authority: Path) -> list[dict[str, Any]]:
        """As its installation has them, at an address beside the cluster."""
        bundle = base64.b64encode(authority.read_bytes()).decode()
        text = (self._manifests / "webhook" / "manifests.yaml").read_text()
        documents = [one for one in yaml.safe_load_all(text) if one]
        for document in documents:
            metadata = document["metadata"]
            document["metadata"] = {"name": f"lws-{metadata['name']}", "labels": {"app": NAME}}
            for webhook in document["webhooks"]:
                path = webhook["clientConfig"]["service"]["path"]
                url = f"https://{HOST}:{self._port}{path}"
                webhook["clientConfig"] = {"url": url, "caBundle": bundle}
                if webhook["name"] in PODS:
                    webhook["objectSelector"] = OF_SETS
        return documents

    def _ready(self) -> bool:
        self._lab.plane.processes.check(NAME)
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._health}/readyz", timeout=5):
                return True
        except OSError:
            return False
