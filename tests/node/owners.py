"""What makes the pods of an engine: workloads as people and other controllers write them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from tests.node.supervised_engines import PORT, Engine

Document = dict[str, Any]
NAME = "llm"
TEAM = {"team": "inference"}
SERVED = {"app": NAME}
KSERVE = f"{NAME}-predictor"


@dataclass(frozen=True)
class Owner:
    """``selected`` are labels of the pods by which a policy finds them, ``served`` those by which
    the Service does. ``container`` is the name that the engine's container has there, and
    ``title`` what a person calls the whole."""

    title: str
    kind: str
    workload: str
    selected: Document
    served: Document
    container: str
    document: Document
    service: Document

    @property
    def selector(self) -> str:
        """The pods of the Service, as kubectl takes it."""
        return ",".join(f"{key}={value}" for key, value in self.served.items())

    @property
    def scaled(self) -> str:
        """The workload for ``kubectl scale``."""
        return f"{self.kind.lower()}/{self.workload}"


def deployment(engine: Engine) -> Owner:
    """A Deployment and its Service."""
    made = _workload("Deployment", NAME, SERVED, TEAM, engine.pod_spec)
    return _owner(made, TEAM, _service(NAME, SERVED))


def stateful_set(engine: Engine) -> Owner:
    """A StatefulSet, which starts its pods one after the other, and a Service before them."""
    made = _workload("StatefulSet", NAME, SERVED, TEAM, engine.pod_spec)
    made["spec"]["serviceName"] = NAME
    return _owner(made, TEAM, _service(NAME, SERVED))


def kserve(engine: Engine) -> Owner:
    """What KServe makes of an InferenceService in its Standard (RawDeployment) mode: the container
    is called kserve-container and listens on 8080, its readiness is that of its TCP port, and the
    Service targets the port by number."""
    spec = copy.deepcopy(engine.pod_spec)
    (container,) = spec["containers"]
    port, probe = 8080, {"timeoutSeconds": 1, "periodSeconds": 10, "failureThreshold": 3}
    container["name"] = "kserve-container"
    container["args"] = [
        word.replace(f"--port={PORT}", f"--port={port}") for word in container["args"]
    ]
    container["ports"] = [{"name": "http1", "containerPort": port, "protocol": "TCP"}]
    for name in {"startupProbe", "livenessProbe"} & set(container):
        container[name]["httpGet"]["port"] = port
    container["readinessProbe"] = {"tcpSocket": {"port": port}, "successThreshold": 1, **probe}
    spec |= {"terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst"}
    served = {"app": f"isvc.{KSERVE}"}
    selected = {"serving.kserve.io/inferenceservice": NAME}
    made = _workload("Deployment", KSERVE, served, selected | {"component": "predictor"}, spec)
    mode = {"serving.kserve.io/deploymentMode": "RawDeployment"}
    made["spec"]["template"]["metadata"]["annotations"] = mode
    made["spec"] |= {
        "revisionHistoryLimit": 10,
        "progressDeadlineSeconds": 600,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxUnavailable": "25%", "maxSurge": "25%"},
        },
    }
    service = _service(KSERVE, served)
    service["spec"]["ports"] = [{"name": "http1", "port": 80, "targetPort": port}]
    return _owner(made, selected, service, "Deployment made as KServe does")


def _owner(made: Document, selected: Document, service: Document, title: str = "") -> Owner:
    (container,) = made["spec"]["template"]["spec"]["containers"]
    return Owner(
        title=title or made["kind"],
        kind=made["kind"],
        workload=made["metadata"]["name"],
        selected=selected,
        served=service["spec"]["selector"],
        container=container["name"],
        document=made,
        service=service,
    )


def _workload(kind: str, name: str, served: Document, more: Document, spec: Document) -> Document:
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": served},
            "template": {"metadata": {"labels": served | more}, "spec": spec},
        },
    }


def _service(name: str, served: Document) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": served, "ports": [{"port": 80, "targetPort": "http"}]},
    }
