"""A policy's supervisors, from the files and the environment that they get, take the slots of their
own workload on a real API server, with the rights that the operator grants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from plimsoll_api.engines import EngineType
from plimsoll_api.incidents import WaitReason
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervisor_config import POD_ENGINE_ENV, EngineEndpoint, PodEngine
from plimsoll_api.workloads import Membership, SlotOwner, WorkloadRef, make_slot_names
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.fleet.workloads import group_pods_by_workload
from plimsoll_operator.kinds import parse_object
from plimsoll_operator.plans.policy import render_objects
from plimsoll_sidecar.govern.command import Command, Outcome, Result, Verb
from plimsoll_sidecar.main import build_supervisor, create_parser
from tests.cluster.test_supervisor_kube import SERVICE, Rig, _eventually, rig
from tests.lab.kube import eventually

__all__ = ["rig"]
VLLM, LLAMA = WorkloadRef("Deployment", "vllm"), WorkloadRef("StatefulSet", "llama")
PODS = {"vllm-a": VLLM, "vllm-b": VLLM, "llama-0": LLAMA, "bare": None}


class Policy:
    """What the operator makes for a policy with these pods, in the rig's namespace."""

    def __init__(self, rig: Rig, folder: Path, **supervision: Any) -> None:
        self._rig, self._folder = rig, folder
        manifest = {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "SupervisionPolicy",
            "metadata": {"name": "engines", "namespace": rig.namespace},
            "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "supervision": supervision},
        }
        path = f"/apis/plimsoll.dev/v1alpha1/namespaces/{rig.namespace}/supervisionpolicies"
        made = _eventually(lambda: rig.admin.create(path, manifest))
        pods = [
            SelectedPod(
                name, "x", SupervisionState.SUPERVISED, member=Membership(ref), may_hold_slot=True
            )
            for name, ref in PODS.items()
        ]
        account = f"{SERVICE}-supervisor"
        groups = {
            "ConfigMap": "/api/v1",
            "Lease": "/apis/coordination.k8s.io/v1",
            "Role": "/apis/rbac.authorization.k8s.io/v1",
            "RoleBinding": "/apis/rbac.authorization.k8s.io/v1",
            "Service": "/api/v1",
        }
        for one in render_objects(
            parse_object(SupervisionPolicy, made), [account], group_pods_by_workload(pods)
        ):
            kind, name = one["kind"], one["metadata"]["name"]
            where = f"{groups[kind]}/namespaces/{rig.namespace}/{kind.lower()}s/{name}"
            rig.admin.apply(where, one)
            if kind == "ConfigMap":
                self._config = str(one["data"]["supervisor.json"])

    def take(self, pod: str, monkeypatch: pytest.MonkeyPatch) -> Result:
        """The answer to the supervisor of ``pod``, built as its container builds it."""
        state = self._folder / pod
        state.mkdir(exist_ok=True)
        (state / "supervisor.json").write_text(self._config)
        url = "http://127.0.0.1:9"
        own = PodEngine(EngineEndpoint(EngineType.VLLM, url, url, container="engine"), PODS[pod])
        monkeypatch.setenv("POD_NAME", pod)
        monkeypatch.setenv(POD_ENGINE_ENV, msgspec.json.encode(own).decode())
        folders = ("--run-dir", str(state), "--state-dir", str(state))
        arguments = create_parser().parse_args(
            ["--config", str(state / "supervisor.json"), *folders]
        )
        supervisor, _ = build_supervisor(arguments, self._rig.kube)
        command = Command(
            verb=Verb.TAKE_SLOT,
            operation_id=f"{pod}-1",
            incident=f"{pod}-1",
            epoch="b:1",
            leaves=True,
            at=1.0,
        )
        return supervisor._actuator.execute(command)

    def _lease(self, workload: WorkloadRef | None) -> str:
        (name,) = make_slot_names("engines", SlotOwner(workload), 1)
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._rig.namespace}/leases/{name}"

    def holder(self, workload: WorkloadRef | None) -> str:
        spec = self._rig.admin.get(self._lease(workload)).get("spec") or {}
        return str(spec.get("holderIdentity", ""))

    def free(self, workload: WorkloadRef | None) -> None:
        lease = self._rig.admin.get(self._lease(workload))
        lease["spec"]["holderIdentity"] = ""
        self._rig.admin.put(self._lease(workload), lease)


def test_each_workload_restarts_by_its_own_slot(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(rig, tmp_path)

    def first() -> bool:
        # The binding is in force a moment after it was made.
        return policy.take("vllm-a", monkeypatch).outcome is Outcome.SUCCEEDED

    eventually(first, "a slot", 20.0)
    assert policy.holder(VLLM) == "vllm-a"
    assert (policy.holder(LLAMA), policy.holder(None)) == ("", "")
    second = policy.take("vllm-b", monkeypatch)
    assert (second.outcome, second.waits) == (Outcome.REFUSED, WaitReason.SLOT_HELD)
    for pod, ref in (("llama-0", LLAMA), ("bare", None)):
        assert policy.take(pod, monkeypatch).outcome is Outcome.SUCCEEDED
        assert policy.holder(ref) == pod


def test_the_restarts_of_one_workload_cost_another_nothing(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(rig, tmp_path, restartBudget={"count": 1})

    def taken(pod: str) -> bool:
        return policy.take(pod, monkeypatch).outcome is Outcome.SUCCEEDED

    eventually(lambda: taken("vllm-a"), "a slot", 20.0)
    policy.free(VLLM)
    spent = policy.take("vllm-b", monkeypatch)
    assert spent.waits is WaitReason.SERVICE_RESTART_BUDGET
    assert "had 1 restarts" in spent.message
    assert taken("llama-0"), "another workload has its own budget"
