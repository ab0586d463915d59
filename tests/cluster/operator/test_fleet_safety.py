"""A bad revision is named, held and rolled back; the circuit breaker bounds the fleet; pods that
are asked for are replaced; kills for memory are told. On a real API server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SELECTOR = "plimsoll.dev/service=tiny"
OPENED = "2026-01-01T00:00:00Z"


def incident(name: str, pod: str, service: str = "tiny") -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LeakIncident",
        "metadata": {"name": name},
        "spec": {
            "id": name,
            "workloadRef": {"kind": "InferenceService", "name": service},
            "pod": pod,
            "container": "engine",
            "epoch": "b:1",
            "openedAt": OPENED,
            "kind": "HostGrowth",
        },
    }


def leaking(kubectl: Any, name: str, pod: str, service: str = "tiny", **more: Any) -> None:
    kubectl.apply(incident(name, pod, service))
    status = {"phase": "Confirmed", "attribution": {"segment": "python_objects"}} | more
    kubectl.patch("leakincident", name, {"status": status}, "status")


def deployment(kubectl: Any) -> dict[str, Any]:
    found: dict[str, Any] = kubectl.get("deployment", "tiny")
    return found


def unpaused(kubectl: Any) -> dict[str, Any]:
    """The Deployment once it is not paused, else nothing."""
    found = deployment(kubectl)
    return {} if found["spec"].get("paused") else found


def argument(found: dict[str, Any]) -> str:
    """The last argument of a Deployment's engine."""
    return str(found["spec"]["template"]["spec"]["containers"][0]["command"][-1])


@pytest.mark.parametrize("on_leak", ["Hold", "Rollback"])
def test_a_revision_that_leaks_everywhere(
    kubectl: Any,
    start: Callable[..., Any],
    manifest: dict[str, Any],
    eventually: Any,
    on_leak: str,
) -> None:
    operator = start()
    manifest["spec"] |= {"replicas": 4, "rollout": {"onLeak": on_leak, "maxSurge": 2}}
    kubectl.apply(manifest)
    eventually(lambda: len(kubectl.list("pods", SELECTOR)) == 4)
    kubectl.play_kubelet("tiny")
    first = eventually(lambda: revisions(kubectl).get("current"))
    old = {pod["metadata"]["name"] for pod in kubectl.list("pods", SELECTOR)}

    manifest["spec"]["engine"]["args"].append("--max-num-seqs=7")
    kubectl.apply(manifest)
    new = eventually(lambda: at_least(2, names(kubectl) - old), 30)
    # The pods may be there before the status that names their revision.
    update = eventually(lambda: (seen := revisions(kubectl).get("update")) != first and seen)
    for pod in new:
        leaking(kubectl, f"leak-{pod}", pod)
    suspect = eventually(lambda: kubectl.get("plinf", "tiny")["status"].get("suspectRevision"), 30)
    assert suspect["revision"] == update
    assert suspect["leak"] == "HostGrowth in python_objects"
    assert any("command" in change for change in suspect["changed"]), suspect
    eventually(lambda: kubectl.holds("tiny", SuspectRevision="True"))
    eventually(lambda: operator.metric("plimsoll_operator_suspect_revisions") == 1)
    if on_leak == "Hold":
        eventually(lambda: kubectl.get("deployment", "tiny")["spec"].get("paused"))
        eventually(lambda: kubectl.holds("tiny", Stalled="HeldForLeak"))
        manifest["spec"]["rollout"]["onLeak"] = "Continue"
        kubectl.apply(manifest)
        going_on = eventually(lambda: unpaused(kubectl))
        assert argument(going_on) == "--max-num-seqs=7"
        kubectl.patch("plinf", "tiny", {"spec": {"rollout": {"revision": "LastGood"}}})
        eventually(lambda: argument(deployment(kubectl)) != "--max-num-seqs=7")
        eventually(lambda: revisions(kubectl)["current"] == first)
        kubectl.patch("plinf", "tiny", {"spec": {"rollout": {"revision": "Spec"}}})
        eventually(lambda: argument(deployment(kubectl)) == "--max-num-seqs=7")
    else:
        eventually(lambda: argument(deployment(kubectl)) != "--max-num-seqs=7")
        eventually(lambda: kubectl.holds("tiny", Stalled="RolledBackForLeak"))
        eventually(lambda: not (set(new) & names(kubectl)), 40)


def revisions(kubectl: Any) -> dict[str, str]:
    status = kubectl.get("plinf", "tiny").get("status") or {}
    return dict(status.get("revisions") or {})


def at_least(count: int, found: set[str]) -> set[str]:
    """``found`` once it has ``count`` members, else nothing."""
    return found if len(found) >= count else set()


def names(kubectl: Any) -> set[str]:
    return {
        pod["metadata"]["name"]
        for pod in kubectl.list("pods", SELECTOR)
        if not pod["metadata"].get("deletionTimestamp")
    }


@pytest.fixture
def own_slots(kubectl: Any) -> Iterator[None]:
    """The policy that lets only a slot's own supervisor and the operator take it."""
    policy = str(ROOT / "config" / "admission-policy.yaml")
    kubectl("apply", "-f", policy)
    yield
    kubectl("delete", "-f", policy)


@pytest.mark.usefixtures("own_slots")
def test_the_breaker_shuts_and_opens(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    start("--max-disruptions", "1")
    services = ("one", "two", "three")
    for service in services:
        kubectl.apply(manifest | {"metadata": {"name": service}})
    eventually(lambda: all(kubectl.get("lease", f"{s}-restart-0") for s in services))
    eventually(lambda: all(kubectl.list("pods", f"plimsoll.dev/service={s}") for s in services))

    def holders() -> list[str]:
        leases = [kubectl.get("lease", f"{service}-restart-0") for service in services]
        return [(one.get("spec") or {}).get("holderIdentity", "") for one in leases]

    for service in services:
        pod = kubectl.list("pods", f"plimsoll.dev/service={service}")[0]["metadata"]["name"]
        leaking(kubectl, f"leak-{service}", pod, service)
    eventually(lambda: holders().count("plimsoll-operator") == 2)
    free = services[holders().index("")]
    pod = kubectl.list("pods", f"plimsoll.dev/service={free}")[0]["metadata"]["name"]
    kubectl.patch("lease", f"{free}-restart-0", {"spec": {"holderIdentity": pod}})
    eventually(lambda: sorted(set(holders())) == sorted({pod, "plimsoll-operator"}))

    for service in services:
        kubectl.patch(
            "leakincident",
            f"leak-{service}",
            {"status": {"phase": "Resolved"}},
            "status",
        )
    eventually(lambda: "plimsoll-operator" not in holders())


def test_a_pod_is_replaced_when_its_supervisor_asks(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    start()
    kubectl.apply(manifest)
    (pod,) = eventually(lambda: names(kubectl))
    kubectl.play_kubelet("tiny")
    step = {"time": OPENED, "step": "PodReplace", "outcome": "Requested"}
    leaking(kubectl, "leak", pod, timeline=[step])
    eventually(lambda: names(kubectl) and pod not in names(kubectl), 30)
    kubectl.run("delete", "pod", pod, "--force", "--grace-period=0")

    def outcome() -> Any:
        return kubectl.get("leakincident", "leak")["status"].get("outcome")

    assert eventually(outcome, 60) == "PodReplaced"


def test_an_eviction_that_the_api_server_cannot_do_leaves_the_service_ready(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    """A pod with two PodDisruptionBudgets: the API server answers each eviction with 500."""
    operator = start("--clock=evict-again=1")
    manifest["spec"] |= {"replicas": 2}
    kubectl.apply(manifest)
    pod = min(eventually(lambda: len(found := names(kubectl)) == 2 and found))
    kubectl.play_kubelet("tiny")
    eventually(lambda: kubectl.condition("tiny", "Ready").get("status") == "True")
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": {"plimsoll.dev/service": "tiny"}}}
    kubectl.apply(
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
         "metadata": {"name": "own"}, "spec": budget}
    )  # fmt: skip
    step = {"time": OPENED, "step": "PodReplace", "outcome": "Requested"}
    leaking(kubectl, "leak", pod, timeline=[step])
    eventually(lambda: kubectl.get("plinf", "tiny")["status"]["openIncidents"] == 1)
    time.sleep(5.0)
    assert kubectl.condition("tiny", "Ready")["status"] == "True", kubectl.conditions("tiny")
    assert pod in names(kubectl)
    owner = f'{{inferenceservice="{kubectl.namespace}/tiny",supervisionpolicy=""}}'
    assert operator.metric(f"plimsoll_operator_refused_evictions_total{owner}") >= 2
    kubectl.delete("pdb", "own")
    eventually(lambda: pod not in names(kubectl), 30)


def test_a_kill_for_memory_becomes_an_incident_and_a_condition(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    start()
    kubectl.apply(manifest)
    eventually(lambda: names(kubectl))
    kubectl.play_kubelet("tiny")
    (pod,) = kubectl.list("pods", SELECTOR)
    status = pod["status"]
    killed = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": OPENED, "startedAt": OPENED}
    status["containerStatuses"][0] |= {"lastState": {"terminated": killed}, "restartCount": 1}
    kubectl.patch("pod", pod["metadata"]["name"], {"status": status}, "status")
    (told,) = eventually(lambda: kubectl.list("leakincidents"))
    assert told["spec"]["kind"] == "OutOfMemoryKill"
    eventually(lambda: kubectl.list("leakincidents")[0].get("status", {}).get("endedAt"))
    eventually(lambda: kubectl.condition("tiny", "OOMKilled").get("status") == "True")
    assert len(kubectl.list("leakincidents")) == 1
