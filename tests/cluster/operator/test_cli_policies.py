"""The command line on SupervisionPolicies: what top and doctor say, and which pods actions mean."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner, Result

from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.main import app
from tests.cluster.operator.test_adopt import DEPLOYMENT
from tests.lab.webhook import NAME

LISTED_S = 40.0
"""The operator lists the pods of a policy every ten seconds."""
LABELS = {"app": "vllm"}
Checks = dict[str, dict[str, Any]]


def policy(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {"name": name},
        "spec": {
            "selector": {
                "matchExpressions": [{"key": "app", "operator": "In", "values": ["vllm", "sglang"]}]
            },
            "supervision": {"mode": "Recover"},
        },
    }


def plimsoll(kubectl: Any, *arguments: str) -> Result:
    flags = ["--kubeconfig", str(kubectl.kubeconfig), "-n", kubectl.namespace]
    return CliRunner().invoke(app, [*arguments, *flags])


def doctor(kubectl: Any, *arguments: str) -> Checks:
    done = plimsoll(kubectl, "doctor", *arguments, "-o", "json")
    return {one["name"]: one for one in json.loads(done.stdout)}


def rows(kubectl: Any) -> list[list[str]]:
    return [line.split() for line in plimsoll(kubectl, "top", "-o", "wide").stdout.splitlines()]


def test_doctor_and_top_follow_a_policy_from_waiting_to_conflicting(
    kubectl: Any, flags: tuple[str, ...], start: Callable[..., Any], eventually: Any
) -> None:
    operator = start(*flags)
    kubectl.apply(DEPLOYMENT)
    eventually(lambda: len(kubectl.list("pods", "app=vllm")) == 2)
    kubectl.apply(policy("engines"))

    found = eventually(lambda: waiting(kubectl), LISTED_S)
    assert found["policy engines"]["ok"] is False
    assert "2 get a supervisor when they are recreated" in found["policy engines"]["text"]
    assert found["policy engines waiting"]["text"].endswith(
        ": kubectl rollout restart deployment/vllm"
    )
    assert found["permission to list supervisionpolicies"]["ok"] is True
    trial = "webhook for policy engines"
    found = eventually(lambda: answering(kubectl, trial), LISTED_S)
    assert found["webhook certificate"]["ok"] is True
    assert "issued 0 days ago, expires on 20" in found["webhook certificate"]["text"]
    assert not kubectl.list("pods", "app=sglang"), "the trial stores no pod"

    kubectl("rollout", "restart", "deployment/vllm")
    eventually(lambda: top(kubectl)[:4] == ["SupervisionPolicy", "2/2", "?", "?"], LISTED_S)
    assert rows(kubectl)[0][:3] == ["NAME", "KIND", "PODS"]
    # There is no node: the pods have supervisors, and the first cause says why none is ready.
    eventually(lambda: top(kubectl)[4:] == ["?", "0", "Unschedulable", "Recover"], LISTED_S)
    found = doctor(kubectl)
    assert found["policy engines"]["ok"] is False
    assert found["policy engines"]["text"].startswith("Unschedulable: ")
    assert "policy engines waiting" not in found
    pods = {pod["metadata"]["name"] for pod in kubectl.list("pods", "app=vllm")}
    assert {name for name in found if name in pods} == pods, "each supervisor is asked"
    assert all(found[name]["text"].startswith("the pod is Pending") for name in pods)
    pull_fails = waits("supervisor", "ImagePullBackOff", "no such image")
    one = sorted(pods)[0]
    kubectl.patch("pod", one, {"status": {"initContainerStatuses": [pull_fails]}}, "status")
    assert doctor(kubectl)[one]["text"].endswith(": supervisor: ImagePullBackOff (no such image)")

    kubectl.apply(policy("later"))
    found = eventually(lambda: conflicting(kubectl), LISTED_S)
    assert "policy later" in found
    assert "the older policy engines supervises" in found["webhook for policy later"]["text"]
    assert "narrow the selector of one policy" in found["policy later conflict"]["text"]
    only = doctor(kubectl, "--policy", "engines")
    assert {name for name in only if "later" in name} == set()
    kubectl("delete", "plsp", "later")

    assert operator.stop() == 0
    eventually(lambda: doctor(kubectl)[trial]["ok"] is False)
    assert "gets no supervisor (dry run)" in doctor(kubectl)[trial]["text"]
    kubectl("delete", "mutatingwebhookconfiguration", NAME)
    assert "webhook.enabled=true" in doctor(kubectl)["webhook certificate"]["text"]


def waits(container: str, reason: str, message: str) -> dict[str, Any]:
    """The status of a container that cannot start."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {"name": container, "ready": False, "restartCount": 0, "image": "x", "imageID": "",
            "state": state}  # fmt: skip


def test_doctor_and_the_reason_column_name_the_first_cause_of_a_service(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    start()
    kubectl.apply(manifest)
    (pod,) = eventually(lambda: kubectl.list("pods", "plimsoll.dev/service=tiny"))
    name = pod["metadata"]["name"]
    running = {"ready": True, "started": True, "state": {"running": {}}}
    found = {
        "containerStatuses": [waits("engine", "ErrImagePull", "no such image")],
        "initContainerStatuses": [waits("supervisor", "", "") | running],
    }
    kubectl.patch("pod", name, {"status": found}, "status")
    eventually(lambda: kubectl.holds("tiny", Ready="ImagePullBackOff"))
    header, row = kubectl("get", "plinf", "tiny").splitlines()
    assert "REASON" in header
    assert "ImagePullBackOff" in row
    checks = doctor(kubectl)
    assert checks["service tiny"]["ok"] is False
    assert checks["service tiny"]["text"].startswith("ImagePullBackOff: 0 of 1 replicas are ready")
    assert checks["service tiny"]["text"].count("no such image") == 1
    assert checks[name]["text"] == "the pod is Pending: engine: ImagePullBackOff (no such image)"
    absent = doctor(kubectl, "--service", "absent")["service absent"]
    assert f"does not exist in namespace {kubectl.namespace}" in absent["text"]


def test_doctor_names_the_policy_that_is_not_there(kubectl: Any) -> None:
    done = plimsoll(kubectl, "doctor", "--policy", "absent", "-o", "json")
    assert done.exit_code == 1
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert f"does not exist in namespace {kubectl.namespace}" in found["policy absent"]["text"]


def test_an_action_on_a_workload_finds_its_supervised_pods(kubectl: Any, eventually: Any) -> None:
    """No kubelet runs here, so the action ends at the first pod."""
    with_supervisor: dict[str, Any] = copy.deepcopy(DEPLOYMENT)
    template = with_supervisor["spec"]["template"]
    template["metadata"]["labels"]["plimsoll.dev/policy"] = "engines"
    container = template["spec"]["containers"][0]
    template["spec"]["initContainers"] = [
        container | {"name": "supervisor", "restartPolicy": "Always"}
    ]
    kubectl.apply(with_supervisor, policy("engines"))
    eventually(lambda: len(pods(kubectl)) == 2)
    names = sorted(pods(kubectl))
    for target in ("deployment/vllm", "deploy/vllm", "plsp/engines", "supervisionpolicy/engines"):
        done = plimsoll(kubectl, "restart", target, "--yes")
        assert isinstance(done.exception, RunError), done.output
        assert str(done.exception).endswith(f"; these pods were not changed: {names[1]}"), (
            done.exception
        )
        assert names[0] in str(done.exception)
    absent = plimsoll(kubectl, "resume", "statefulset/vllm", "--yes")
    assert str(absent.exception).startswith(
        f"statefulset/vllm has no supervised pods in namespace {kubectl.namespace}"
    )
    gone = plimsoll(kubectl, "resume", "plsp/absent", "--yes")
    assert str(gone.exception).startswith("supervisionpolicy/absent does not exist in namespace")
    drain = plimsoll(kubectl, "drain", "deployment/vllm", "--yes")
    assert isinstance(drain.exception, UsageError)
    assert "name a single pod" in str(drain.exception)


def pods(kubectl: Any) -> list[str]:
    """Names of the Deployment's pods."""
    return [pod["metadata"]["name"] for pod in kubectl.list("pods", "app=vllm")]


def waiting(kubectl: Any) -> Checks | None:
    found = doctor(kubectl)
    return found if "2 selected" in found.get("policy engines", {}).get("text", "") else None


def answering(kubectl: Any, trial: str) -> Checks | None:
    found = doctor(kubectl)
    return found if found[trial]["ok"] and found["webhook certificate"]["ok"] else None


def conflicting(kubectl: Any) -> Checks | None:
    found = doctor(kubectl)
    return found if {"policy engines conflict", "policy later conflict"} <= set(found) else None


def top(kubectl: Any) -> list[str]:
    """The policy's row, without its name."""
    return next(row[1:] for row in rows(kubectl) if row[0] == f"{kubectl.namespace}/engines")
