"""What the tests of SupervisionPolicies look at: pods, incidents, slots, the policy's status."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import httpx

from tests.lab.kube import Kube, conditions
from tests.lab.lab import Lab
from tests.node import supervised_engines

POLICY = "engines"
LISTED_S = 60
"""The operator lists a policy's pods each 10 s, and the machine may be busy."""
AFTER = 40
"""Requests after the incident."""


def policy(selected: dict[str, Any], memory: dict[str, Any], **supervision: Any) -> dict[str, Any]:
    """One in the mode Recover for the pods with these labels."""
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {"name": POLICY},
        "spec": {
            "selector": {"matchLabels": selected},
            "memory": memory,
            "supervision": {"mode": "Recover", "drain": {"deadline": "10s"}} | supervision,
        },
    }


def older_pod(node: Lab, selected: dict[str, Any]) -> dict[str, Any]:
    """A pod that the policy selects and that was there before."""
    metadata = {"name": "older", "labels": selected}
    spec = supervised_engines.standin(node).pod_spec
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def injects(kube: Kube, pod: dict[str, Any]) -> bool:
    """Whether such a pod would be injected by now: API servers take a moment to see a webhook."""
    trial = pod | {"metadata": pod["metadata"] | {"name": "trial"}}
    made = kube("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(trial))
    return supervised(json.loads(made))


def supervised(pod: dict[str, Any]) -> bool:
    return any(one["name"] == "supervisor" for one in pod["spec"].get("initContainers", ()))


def warm(pod: dict[str, Any]) -> bool:
    """The supervisor has a baseline: from now on growth is growth."""
    address = pod["status"]["podIP"]
    text = httpx.get(f"http://{address}:9464/metrics", timeout=10).text
    return 'plimsoll_memory_baseline_bytes{kind="host"}' in text


def restarts(pod: dict[str, Any]) -> dict[str, int]:
    status = pod["status"]
    both = status["containerStatuses"] + status["initContainerStatuses"]
    return {one["name"]: one["restartCount"] for one in both}


def ready_since(pod: dict[str, Any]) -> str:
    """When the pod became ready; empty where it is not."""
    found = [one for one in conditions(pod) if one["type"] == "Ready" and one["status"] == "True"]
    return str(found[0]["lastTransitionTime"]) if found else ""


def status(kube: Kube) -> dict[str, Any]:
    return dict((kube.get("plsp", POLICY) or {}).get("status") or {})


def counts(kube: Kube) -> tuple[Any, ...]:
    found = status(kube)
    fields = ("selected", "supervised", "waitingForRestart", "refused")
    return tuple(found.get(field) for field in fields)


def ended_incident(kube: Kube) -> dict[str, Any] | None:
    ends = ("Resolved", "Unresolved", "Suppressed")
    found = kube.list("leakincidents")
    return next((one for one in found if one.get("status", {}).get("phase") in ends), None)


def step_time(incident: dict[str, Any], step: str) -> str:
    found = (one for one in incident["status"]["timeline"] if one["step"] == step)
    return str(next(found)["time"])


def unix(text: str) -> float:
    """Unix time of a Kubernetes time."""
    return datetime.fromisoformat(text).timestamp()


def held_slots(kube: Kube) -> dict[str, dict[str, Any]]:
    """The restart slots that are held, by holder."""
    found = [one["spec"] for one in kube.list("leases", "plimsoll.dev/service")]
    return {one["holderIdentity"]: one for one in found if one.get("holderIdentity")}
