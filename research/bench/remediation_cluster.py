"""A real API server for supervisors of replicas that run beside it, with what the operator makes.

The operator itself is not there: the service's slot Lease and its supervisors' account are applied
as it renders them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from bench.control_plane import NAMESPACE, control_plane
from leaklab import supervise_in_lab
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import API_VERSION, INCIDENT_PLURAL, SERVICE_KIND
from plimsoll_api.names import SERVICE_RESTARTS_ANNOTATION as ANNOTATION
from plimsoll_cli.local.plan import Plan
from plimsoll_operator.render import objects
from tests.lab.kube import Kube

WRAPPER = Path(supervise_in_lab.__file__)
LIFETIME = "2h"


@dataclass(frozen=True)
class Service:
    """One service in the cluster. ``account`` is the folder of its supervisors' token."""

    name: str
    uid: str
    slots: tuple[str, ...]
    account: Path
    api_port: int
    kube: Kube

    def joined(self, plan: Plan, pod: str) -> Plan:
        """The plan of a replica whose supervisor is that of ``pod`` of this service."""
        ref = msgspec.structs.replace(plan.config.service, uid=self.uid, namespace=NAMESPACE)
        config = msgspec.structs.replace(plan.config, service=ref, slots=self.slots)
        arguments = plan.supervisor.argv[3:]  # after: python -m plimsoll_sidecar.launcher
        argv = (sys.executable, str(WRAPPER), "launch", str(self.account), *arguments)
        env = {
            **plan.supervisor.env,
            "POD_NAME": pod,
            "POD_NAMESPACE": NAMESPACE,
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self.api_port),
        }
        return replace(plan, config=config, supervisor=replace(plan.supervisor, argv=argv, env=env))

    def recorded(self) -> list[dict[str, Any]]:
        """The LeakIncidents of the service."""
        return self.kube.list(INCIDENT_PLURAL)

    def restarts(self) -> int:
        """How many restarts the slots' own count has."""
        found = (self.kube.get("lease", slot) or {} for slot in self.slots)
        counts = (one["metadata"].get("annotations", {}).get(ANNOTATION, "[]") for one in found)
        return sum(len(json.loads(count)) for count in counts)


@contextmanager
def cluster(name: str, folder: Path) -> Iterator[Service]:
    """A control plane with one service called ``name``; all of it ends with the block."""
    with control_plane() as (lab, _):
        kube = replace(lab.kube, namespace=NAMESPACE)
        manifest = {
            "apiVersion": API_VERSION,
            "kind": SERVICE_KIND,
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"replicas": 2, "model": {"uri": "file:///models/tiny"}},
        }
        service = InferenceService.model_validate(manifest)
        slots = objects.make_slot_leases(service)
        account = objects.make_service_account(service)
        made = [*slots, account, objects.make_role(service), objects.make_role_binding(service)]
        kube.apply(manifest, *made)
        found = kube.get("inferenceservice", name)
        assert found is not None
        token = kube("create", "token", account["metadata"]["name"], f"--duration={LIFETIME}")
        folder.mkdir(mode=0o700)
        (folder / "token").write_text(token)
        (folder / "ca.crt").write_bytes((lab.plane.pki / "ca.crt").read_bytes())
        names = tuple(slot["metadata"]["name"] for slot in slots)
        yield Service(name, found["metadata"]["uid"], names, folder, lab.plane.api_port, kube)
