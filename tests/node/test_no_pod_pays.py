"""Supervision must not cost a pod: what must not keep an engine's pod from starting."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.supervision_policy import SelectedEngine, SelectedEngineType
from plimsoll_operator.injection.documents import inject_document
from plimsoll_operator.injection.options import InjectionOptions
from plimsoll_operator.scraper import find_address
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab
from tests.lab.node import IPV6
from tests.lab.operator import Operator
from tests.lab.sandbox import has_ipv6
from tests.node import supervised_engines
from tests.node.supervised import (
    LISTED_S,
    POLICY,
    injects,
    policy,
    ready_since,
    status,
    supervised,
    warm,
)

Start = Callable[..., Operator]
LABELS = {"app": "llm"}
START_S = 180


def pod(node: Lab, name: str, **more: Any) -> dict[str, Any]:
    """An engine's pod that the policy selects."""
    metadata = {"name": name, "labels": LABELS}
    spec = supervised_engines.standin(node).pod_spec | more
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def injected(kube: Kube, wanted: dict[str, Any]) -> dict[str, Any]:
    """The pod as the webhook makes it now, which is not created."""
    text = json.dumps(wanted)
    made = json.loads(kube("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=text))
    assert supervised(made)
    labels = made["metadata"]["labels"]
    return {**made, "metadata": {"name": made["metadata"]["name"], "labels": labels}, "status": {}}


def serves(kube: Kube, name: str) -> bool:
    """Whether the pod is ready and its supervisor says that it has no configuration."""
    found = kube.get("pod", name)
    if found is None or not ready_since(found):
        return False
    address = found["status"]["podIP"]
    try:
        state = httpx.get(f"http://{address}:9464/state", timeout=5).json()
    except httpx.HTTPError:
        return False
    error = str(state.get("config_error"))
    return state.get("mode") == "Observe" and "no configuration" in error


def test_pods_of_a_deleted_policy_start_and_serve(
    node: Lab, kube: Kube, operator: Start, webhook: tuple[str, ...], tmp_path: Path
) -> None:
    """One was there and its node reboots; one is created while the policy is deleted."""
    engine = supervised_engines.standin(node)
    engine.prepare(kube, tmp_path)
    operator(*webhook)
    kube.apply(policy(LABELS, engine.memory))
    first, second = pod(node, "first"), pod(node, "second")
    eventually(lambda: injects(kube, first), "new pods are injected", LISTED_S)
    kube.apply(first)
    kube("wait", "pod/first", "--for=condition=Ready", f"--timeout={START_S}s")
    before = kube.get("pod", "first") or {}
    assert supervised(before)
    admitted = injected(kube, second)

    kube.delete("plsp", POLICY)
    config_map = f"{POLICY}.policy"
    eventually(lambda: kube.get("configmap", config_map) is None, "its ConfigMap is gone", LISTED_S)
    kube.create(admitted)
    eventually(partial(serves, kube, "second"), "the pod that came late serves", START_S)

    assert node.node is not None
    since = ready_since(before)
    node.node.reboot(before["metadata"]["uid"])

    def again() -> bool:
        found = kube.get("pod", "first") or {}
        return ready_since(found) not in ("", since) and serves(kube, "first")

    eventually(again, "the pod serves after a reboot of its node", START_S)
    assert (kube.get("pod", "first") or {})["metadata"]["uid"] == before["metadata"]["uid"]


def test_a_guaranteed_pod_stays_guaranteed_and_a_quota_admits_it(
    node: Lab, kube: Kube, operator: Start, webhook: tuple[str, ...], tmp_path: Path
) -> None:
    """A quota that counts limits rejects a pod if one of its containers has none."""
    engine = supervised_engines.standin(node)
    engine.prepare(kube, tmp_path)
    hard = {f"{kind}.{name}": "64" for kind in ("limits", "requests") for name in ("cpu", "memory")}
    hard |= {name: "64Gi" for name in hard if name.endswith("memory")}
    metadata = {"name": "all"}
    kube.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata,
                "spec": {"hard": hard}})  # fmt: skip
    operator(*webhook)
    kube.apply(policy(LABELS, engine.memory))
    kube.patch("plsp", POLICY, {"spec": {"probe": {"enabled": True}}})
    wanted = pod(node, "chat")
    amounts = {"cpu": "500m", "memory": "512Mi"}
    wanted["spec"]["containers"][0] |= {"resources": {"limits": amounts, "requests": amounts}}
    eventually(lambda: probed(kube, wanted), "new pods get the probe", LISTED_S)
    kube.create(wanted)
    kube("wait", "pod/chat", "--for=condition=Ready", f"--timeout={START_S}s")
    found = kube.get("pod", "chat") or {}
    assert supervised(found)
    assert found["status"]["qosClass"] == "Guaranteed"


def probed(kube: Kube, wanted: dict[str, Any]) -> bool:
    made = kube("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(wanted))
    containers = json.loads(made)["spec"].get("initContainers", ())
    return [one["name"] for one in containers] == ["plimsoll-probe", "supervisor"]


AMOUNTS = {"cpu": "100m", "memory": "512Mi"}
QUOTA = {
    "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"},
    "spec": {"hard": {"limits.memory": "600Mi"}},
}  # fmt: skip
RANGE = {
    "apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "team"},
    "spec": {"limits": [{"type": "Container", "min": {"memory": "300Mi"}}]},
}  # fmt: skip
RULE = {
    "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
    "metadata": {"name": "no-supervisor"},
    "spec": {
        "matchConstraints": {"resourceRules": [{
            "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"],
            "resources": ["pods"],
        }]},
        "validations": [{
            "expression": "object.spec.?initContainers.orValue([])"
            ".all(one, !one.image.contains('sidecar') && one.name != 'supervisor')",
            "message": "images of this registry only",
        }],
    },
}  # fmt: skip
REFUSALS = ((QUOTA, "exceeded quota: team"), (RANGE, "minimum memory usage per Container"),
            (RULE, "images of this registry only"))  # fmt: skip


def test_a_rule_that_refuses_the_supervisor_costs_no_pod(
    node: Lab, kube: Kube, operator: Start, webhook: tuple[str, ...], tmp_path: Path
) -> None:
    """The engine comes back without one, the policy names the rule, and a retry brings it back.

    The namespace is held to the pod security standard ``restricted`` all the time.
    """
    engine = supervised_engines.standin(node)
    engine.prepare(kube, tmp_path)
    operator(*webhook)
    kube.apply(policy(LABELS, engine.memory))
    eventually(lambda: injects(kube, pod(node, "first")), "new pods are injected", LISTED_S)
    resources = {"limits": AMOUNTS, "requests": AMOUNTS}
    container = engine.pod_spec["containers"][0] | {"resources": resources}
    made = {"metadata": {"labels": LABELS}, "spec": engine.pod_spec | {"containers": [container]}}
    spec = {"replicas": 1, "selector": {"matchLabels": LABELS}, "template": made}
    metadata = {"name": "llm"}
    kube.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})

    def serving(with_supervisor: bool) -> bool:
        found = kube.list("pods", "app=llm")
        there = [one for one in found if not one["metadata"].get("deletionTimestamp")]
        fits = [one for one in there if supervised(one) is with_supervisor and ready_since(one)]
        return len(fits) == len(there) == 1

    eventually(lambda: serving(True), "the pod serves with a supervisor", START_S)
    proven = "the image is proven"
    eventually(lambda: status(kube).get("injection", {}).get("proven"), proven, LISTED_S)
    for number, (rule, said) in enumerate(REFUSALS):
        with applied(kube, rule):
            kube.delete("pod", selector="app=llm")
            eventually(lambda: serving(False), f"{said}: the pod serves without one", START_S)
            eventually(partial(names, kube, said), said, LISTED_S)
            assert condition(kube, "InjectionStopped")[0] == "True"
            assert "ReplicaSet llm-" in condition(kube, "InjectionStopped")[1]
            eventually(lambda: status(kube).get("waitingForRestart") == 1, "counted", LISTED_S)
            assert condition(kube, "Ready")[0] == "False"
            assert "0 of 1 selected pods are supervised" in condition(kube, "Ready")[1]
        kube("annotate", "plsp", POLICY, f"plimsoll.dev/retry-injection={number}", "--overwrite")
        eventually(lambda: condition(kube, "InjectionStopped")[0] == "False", "again", LISTED_S)
        eventually(lambda: injects(kube, pod(node, "first")), "new pods are injected", LISTED_S)
        kube.delete("pod", selector="app=llm")
        eventually(lambda: serving(True), "the pod serves with a supervisor again", START_S)


def condition(kube: Kube, kind: str) -> tuple[str, str]:
    """Status and message of a condition of the policy, empty without it."""
    held = status(kube).get("conditions") or ()
    found = {one["type"]: (one["status"], one["message"]) for one in held}
    return found.get(kind, ("", ""))


def names(kube: Kube, rule: str) -> bool:
    """Whether the policy says that ``rule`` stopped the injection."""
    return rule in condition(kube, "InjectionStopped")[1]


@contextmanager
def applied(kube: Kube, rule: dict[str, Any]) -> Iterator[None]:
    """``rule``, and what binds it to the namespace where it is the cluster's."""
    kind, name = rule["kind"], rule["metadata"]["name"]
    kube.apply(rule)
    bound = kind == "ValidatingAdmissionPolicy"
    if bound:
        where = {"matchLabels": {"kubernetes.io/metadata.name": kube.namespace}}
        kube.apply({
            "apiVersion": rule["apiVersion"], "kind": f"{kind}Binding", "metadata": {"name": name},
            "spec": {
                "policyName": name, "validationActions": ["Deny"],
                "matchResources": {"namespaceSelector": where},
            },
        })  # fmt: skip
        time.sleep(5)  # until the API server knows of it
    try:
        yield
    finally:
        kube.delete(kind, name)
        if bound:
            kube.delete(f"{kind}Binding", name)
            time.sleep(5)


def test_a_supervisor_that_cannot_start_costs_two_pods_at_most(
    node: Lab, kube: Kube, operator: Start, webhook: tuple[str, ...], tmp_path: Path
) -> None:
    """The third pod of the workload serves without it, and so do all later ones."""
    engine = supervised_engines.standin(node)
    engine.prepare(kube, tmp_path)
    absent = "localhost/absent:1"
    running = operator(*webhook, f"--supervisor-image={absent}")
    kube.apply(policy(LABELS, engine.memory))
    eventually(lambda: injects(kube, pod(node, "first")), "new pods are injected", LISTED_S)
    made = {"metadata": {"labels": LABELS}, "spec": engine.pod_spec}
    spec = {"replicas": 3, "selector": {"matchLabels": LABELS}, "template": made}
    metadata = {"name": "llm"}
    kube.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})

    def serving(with_supervisor: bool) -> int:
        found = kube.list("pods", "app=llm")
        return sum(supervised(one) is with_supervisor and bool(ready_since(one)) for one in found)

    eventually(lambda: serving(False) == 1, "the third pod serves without a supervisor", START_S)

    def stopped() -> str:
        held = status(kube).get("conditions") or ()
        found = [one for one in held if one["type"] == "InjectionStopped"]
        return str(found[0]["message"]) if found and found[0]["status"] == "True" else ""

    said = eventually(stopped, "the policy says that the injection is stopped", LISTED_S + 60)
    assert f"image {absent}" in said

    def events() -> list[str]:
        found = [one for one in kube.list("events") if one["reason"] == "InjectionStopped"]
        return [one["type"] for one in found]

    assert eventually(events, "an Event says it too", LISTED_S) == ["Warning"]
    kube.delete("pod", selector="app=llm,plimsoll.dev/policy")
    eventually(lambda: serving(False) == 3, "all pods serve without a supervisor", START_S)

    kube("annotate", "plsp", POLICY, "plimsoll.dev/retry-injection=1", "--overwrite")
    eventually(lambda: not stopped(), "a person asks for another try", LISTED_S)
    running.stop()
    operator(*webhook)
    eventually(lambda: injects(kube, pod(node, "first")), "new pods are injected", LISTED_S)
    kube("rollout", "restart", "deployment/llm")
    eventually(lambda: serving(True) >= 2, "pods serve with a supervisor", START_S)
    eventually(lambda: status(kube)["injection"]["proven"], "the image is proven", LISTED_S)


def test_a_pod_with_an_ipv6_address_alone_is_supervised(
    node: Lab, kube: Kube, operator: Start, webhook: tuple[str, ...], tmp_path: Path
) -> None:
    """The kubelet probes, and the operator reads, the pod's one address."""
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    kube.apply(
        {
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": {"name": IPV6},
            "handler": IPV6,
        }
    )
    engine = supervised_engines.standin(node)
    engine.prepare(kube, tmp_path)
    operator(*webhook)
    kube.apply(policy(LABELS, engine.memory))
    eventually(lambda: injects(kube, pod(node, "six")), "new pods are injected", LISTED_S)
    wanted = pod(node, "six", runtimeClassName=IPV6)
    (container,) = wanted["spec"]["containers"] = [dict(engine.container)]
    container["args"] = [word.replace("0.0.0.0", "::") for word in container["args"]]
    kube.apply(wanted)
    kube("wait", "pod/six", "--for=condition=Ready", f"--timeout={START_S}s")
    found = kube.get("pod", "six") or {}
    assert supervised(found)
    (only,) = found["status"]["podIPs"]
    address = find_address(found)
    assert address == f"[{only['ip']}]"

    def sees() -> bool:
        page = httpx.get(f"http://{address}:9464/state", timeout=5).json()
        return str(page.get("engine_state")) == "serving"

    eventually(sees, "its supervisor sees its engine", LISTED_S)
    eventually(lambda: status(kube).get("supervised") == 1, "the policy counts it", LISTED_S)


def test_two_engines_on_the_nodes_network_run_with_their_supervisors(
    node: Lab, kube: Kube, operator: Start, webhook: tuple[str, ...], tmp_path: Path
) -> None:
    """All ports are the node's there: the engines' differ, and so must the supervisors'."""
    allowed = "pod-security.kubernetes.io/enforce=privileged"
    kube("label", "namespace", kube.namespace, allowed, "--overwrite")
    engine = supervised_engines.standin(node)
    engine.prepare(kube, tmp_path)
    operator(*webhook)
    kube.apply(policy(LABELS, engine.memory))
    eventually(lambda: injects(kube, pod(node, "first")), "new pods are injected", LISTED_S)
    for name, port in (("first", 18_000), ("second", 18_001)):
        wanted = pod(node, name, hostNetwork=True)
        (container,) = wanted["spec"]["containers"] = [dict(engine.container)]
        words = [word for word in container["args"] if not word.startswith("--port=")]
        container["args"] = [*words, f"--port={port}"]
        container["ports"] = [{"name": "http", "containerPort": port}]
        probe = container["readinessProbe"]
        container["readinessProbe"] = probe | {"httpGet": probe["httpGet"] | {"port": port}}
        kube.apply(wanted)
    pages = set()
    for name in ("first", "second"):
        kube("wait", f"pod/{name}", "--for=condition=Ready", f"--timeout={START_S}s")
        found = kube.get("pod", name) or {}
        assert supervised(found)
        address = find_address(found)
        assert address is not None

        def sees(page: str = f"http://{address}/state") -> bool:
            return str(httpx.get(page, timeout=5).json().get("engine_state")) == "serving"

        eventually(sees, f"the supervisor of {name} sees its engine", LISTED_S)
        pages.add(address)
    assert len(pages) == 2
    eventually(lambda: status(kube).get("supervised") == 2, "the policy counts both", LISTED_S)


def test_the_engine_of_a_job_may_be_a_native_sidecar(node: Lab, kube: Kube, tmp_path: Path) -> None:
    """Without operator: its leak is cured by a restart, and the Job's own container goes on."""
    engine = supervised_engines.standin(node)
    engine.prepare(kube, tmp_path)
    task = {
        "name": "task",
        "image": node.supervisor_image,
        "command": ["python", "-c", "import time; time.sleep(3600)"],
        "securityContext": supervised_engines.LIMITED,
    }
    spec = engine.pod_spec | {
        "restartPolicy": "Never",
        "initContainers": [engine.container | {"restartPolicy": "Always"}],
        "containers": [task],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "batch"},
        "spec": {"template": {"metadata": {"labels": LABELS}, "spec": spec}},
    }
    options = InjectionOptions(
        node.supervisor_image,
        SelectedEngine(type=SelectedEngineType.VLLM, container=supervised_engines.CONTAINER),
        MemoryPolicy(host=MemoryBudget(growth_bytes=64 << 20, window_s=3600.0), warmup_s=5.0),
        Supervision(mode=Mode.RECOVER),
    )
    made = inject_document(job, options)
    assert made.config_map is not None
    kube.apply(made.config_map, made.document)

    def pod_of_job() -> dict[str, Any]:
        return next(iter(kube.list("pods", "app=llm")), {"status": {}})

    def container(name: str) -> dict[str, Any]:
        status = pod_of_job()["status"]
        listed = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
        return next((one for one in listed if one["name"] == name), {"restartCount": 0})

    eventually(lambda: ready_since(pod_of_job()), "the pod is ready", START_S)
    began = [container(one)["state"]["running"]["startedAt"] for one in ("supervisor", "server")]
    assert began == sorted(began), "the supervisor first"
    eventually(lambda: warm(pod_of_job()), "a baseline", START_S)
    name = pod_of_job()["metadata"]["name"]
    kube("exec", name, "-c", supervised_engines.CONTAINER, "--", "sh", "-c", engine.leak)
    eventually(lambda: container("server")["restartCount"], "the engine is restarted", 240)
    eventually(lambda: ready_since(pod_of_job()), "the pod is ready again", START_S)
    assert container("task")["restartCount"] == 0
    assert container("supervisor")["restartCount"] == 0
