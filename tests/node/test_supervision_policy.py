"""A SupervisionPolicy over a plain Deployment: its new pods are injected, a leak in one of them is
cured, and the other one serves all the while."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self

import httpx
import pytest

from plimsoll_api.times import rfc3339_micro as rfc3339
from tests.lab.images import ROOT
from tests.lab.kube import Kube, conditions, eventually
from tests.lab.lab import Lab
from tests.lab.operator import Operator
from tests.lab.webhook import Webhook

POLICY, DEPLOYMENT, CONTAINER = "engines", "vllm", "server"
SELECTED = {"app": "vllm"}
SERVED = SELECTED | {"served": "yes"}
SERVED_SELECTOR = "served=yes"
LEASE = f"{POLICY}.policy-restart-0"
SICK = "/tmp/sick"
STANDIN = ROOT / "tests" / "integration" / "standin_external.py"
ADMISSION_POLICY = ROOT / "config" / "admission-policy.yaml"
READY_S = 180
LISTED_S = 60
"""The operator lists a policy's pods each 10 s, and the machine may be busy."""
STORY_S = 240
Start = Callable[..., Operator]


class Visits:
    """``count`` clients that ask a service for its models until the block ends, each time on a new
    connection: kube-proxy chooses a pod for each."""

    def __init__(self, url: str, count: int = 2) -> None:
        self._url = f"{url}/v1/models"
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        self.answered = 0
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        eventually(lambda: self._ask() is None, f"{self._url} is forwarded")
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=30)

    def _ask(self) -> str | None:
        """What went wrong, None where nothing did."""
        try:
            status = httpx.get(self._url, timeout=10).status_code
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return None if status == 200 else f"HTTP {status}"

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            trouble = self._ask()
            with self._lock:
                if trouble is None:
                    self.answered += 1
                else:
                    self.failures.append(f"{rfc3339(time.time())}: {trouble}")


@pytest.fixture
def webhook(node: Lab, operator: Start) -> Iterator[tuple[str, ...]]:
    """The chart's objects for the webhook, and its admission policies; the operator's flags."""
    if not isinstance(node, Lab):
        pytest.skip("the API server of another cluster does not reach a webhook on this machine")
    made = Webhook(node.kube)
    made.install()
    node.kube("apply", "-f", str(ADMISSION_POLICY))
    yield made.flags
    node.kube("delete", "-f", str(ADMISSION_POLICY))
    made.remove()


def pod_spec(node: Lab) -> dict[str, Any]:
    """As a person writes it for vLLM, with the stand-in in its place."""
    arguments = ["--kind=vllm", "--host=0.0.0.0", "--port=8000", "--log=/tmp/log"]
    server = {
        "name": CONTAINER,
        "image": node.supervisor_image,
        "command": ["python", f"/code/{STANDIN.name}"],
        "args": [*arguments, f"--sick={SICK}", "--leak-mib-s=4"],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1},
        "resources": {"limits": {"memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "code", "mountPath": "/code"}],
    }
    return {
        "securityContext": {
            "runAsUser": 10001,
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [server],
        "volumes": [{"name": "code", "configMap": {"name": "code"}}],
    }


def older_pod(node: Lab) -> dict[str, Any]:
    """A pod that the policy selects and that was there before."""
    metadata = {"name": "older", "labels": SELECTED}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec(node)}


def code() -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "code"},
        "data": {STANDIN.name: STANDIN.read_text()},
    }


def policy() -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {"name": POLICY},
        "spec": {
            "selector": {"matchLabels": SELECTED},
            "memory": {"host": {"growthBudget": "64Mi", "window": "1h"}, "warmup": "5s"},
            "supervision": {"mode": "Recover", "drain": {"deadline": "5s"}},
        },
    }


def workload(node: Lab) -> list[dict[str, Any]]:
    """A Deployment and its Service, which know nothing of Plimsoll."""
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": DEPLOYMENT},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": SERVED},
            "template": {"metadata": {"labels": SERVED}, "spec": pod_spec(node)},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": DEPLOYMENT},
        "spec": {"selector": SERVED, "ports": [{"port": 80, "targetPort": "http"}]},
    }
    return [deployment, service]


def injects(kube: Kube, node: Lab) -> bool:
    """Whether a pod would be injected by now: API servers take a moment to see a webhook."""
    pod = older_pod(node)
    pod["metadata"]["name"] = "trial"
    made = kube("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(pod))
    return supervised(json.loads(made))


def supervised(pod: dict[str, Any]) -> bool:
    return any(one["name"] == "supervisor" for one in pod["spec"].get("initContainers", ()))


def served_pods(kube: Kube) -> dict[str, dict[str, Any]]:
    return {pod["metadata"]["name"]: pod for pod in kube.list("pods", SERVED_SELECTOR)}


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
    (found,) = (one for one in conditions(pod) if one["type"] == "Ready")
    return str(found["lastTransitionTime"]) if found["status"] == "True" else ""


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


def slot(kube: Kube) -> dict[str, Any]:
    return dict((kube.get("lease", LEASE) or {}).get("spec") or {})


def test_a_leak_in_one_pod_of_a_plain_deployment_is_cured_while_the_other_serves(
    node: Lab, kube: Kube, operator: Start, webhook: tuple[str, ...]
) -> None:
    kube.apply(code(), older_pod(node))
    kube("wait", "pod/older", "--for=condition=Ready", f"--timeout={READY_S}s")
    operator(*webhook)
    kube.apply(policy())
    eventually(lambda: injects(kube, node), "new pods are injected", LISTED_S)

    kube.apply(*workload(node))
    kube("wait", f"deploy/{DEPLOYMENT}", "--for=condition=Available", f"--timeout={READY_S}s")
    eventually(lambda: counts(kube) == (3, 2, 1, 0), "both pods are supervised", LISTED_S)
    before = served_pods(kube)
    assert all(map(supervised, before.values()))
    assert {pod["metadata"]["labels"]["plimsoll.dev/policy"] for pod in before.values()} == {POLICY}
    assert not supervised(kube.get("pod", "older") or {})

    leaking, other = sorted(before)
    for name in before:
        kube("wait", f"pod/{name}", "--for=condition=Ready", f"--timeout={READY_S}s")
        eventually(partial(warm, before[name]), f"a baseline of {name}", READY_S)
    before = served_pods(kube)
    address = (kube.get("service", DEPLOYMENT) or {})["spec"]["clusterIP"]
    with Visits(f"http://{address}") as visits:
        touch = f"import pathlib; pathlib.Path('{SICK}').touch()"
        kube("exec", leaking, "-c", CONTAINER, "--", "python", "-c", touch)
        eventually(lambda: slot(kube).get("holderIdentity") == leaking, "it has the slot", STORY_S)
        incident = eventually(lambda: ended_incident(kube), "the incident ends", STORY_S)
        goal = visits.answered + 40
        eventually(lambda: visits.answered >= goal, "answers after the incident")
    assert incident is not None
    print(json.dumps(incident, indent=1))
    print(f"{visits.answered} requests")
    assert visits.failures == []

    the_story_is_whole(incident, leaking)
    after = served_pods(kube)
    assert {name: pod["metadata"]["uid"] for name, pod in after.items()} == {
        name: pod["metadata"]["uid"] for name, pod in before.items()
    }
    assert restarts(after[leaking]) == {CONTAINER: 1, "supervisor": 0}
    assert restarts(after[other]) == {CONTAINER: 0, "supervisor": 0}
    assert ready_since(after[other]) == ready_since(before[other]) != ""

    eventually(lambda: not slot(kube).get("holderIdentity"), "the slot is free again", LISTED_S)
    assert slot(kube)["leaseTransitions"] == 1
    eventually(lambda: status(kube).get("openIncidents") == 0, "it is over", LISTED_S)
    assert counts(kube) == (3, 2, 1, 0)


def the_story_is_whole(incident: dict[str, Any], pod: str) -> None:
    """Resolved by a restart of the engine after a drain, in the name of the policy."""
    spec, found = incident["spec"], incident["status"]
    assert (found["phase"], found["outcome"]) == ("Resolved", "EngineRestart")
    assert (spec["kind"], spec["pod"], spec["container"]) == ("HostGrowth", pod, CONTAINER)
    assert spec["policy"] == POLICY
    assert spec["target"] == {"kind": "Deployment", "name": DEPLOYMENT}
    assert spec["service"] == DEPLOYMENT
    owner = incident["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["name"]) == ("SupervisionPolicy", POLICY)
    steps = [one["step"] for one in found["timeline"]]
    assert steps.index("Drain") < steps.index("EngineRestart")
    assert found["returnedBytes"] >= 0.9 * found["attribution"]["bytes"]
