"""A supervisor's token writes incidents and restart slots of its own pod and of no other, on a real
API server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.workloads import Membership, SlotOwner, WorkloadRef, make_slot_names
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.fleet.workloads import group_pods_by_workload
from plimsoll_operator.kinds import parse_object
from plimsoll_operator.plans import policy as policies
from plimsoll_operator.plans.service import parse_service
from plimsoll_operator.render import Images, objects, render_objects
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab, namespace

POLICY = Path(__file__).parents[2] / "config" / "admission-policy.yaml"
Write = Callable[..., subprocess.CompletedProcess[str]]
NOW = "2026-01-01T00:00:00Z"
MAX_BYTES = 32 << 10
"""Of a LeakIncident as etcd has it."""
DRY_RUN = "--dry-run=server"
"""Until the policy is in force, what it is to refuse would be stored."""


@pytest.fixture
def kube(cluster: Lab) -> Iterator[Kube]:
    """A namespace with two services' accounts and a pod each, under the policy."""
    cluster.kube("apply", "-f", str(POLICY))
    with namespace(cluster.kube) as kube:
        for service in ("qwen", "llama"):
            kube.apply(*account(kube, service), pod(service))
        yield kube
    cluster.kube("delete", "-f", str(POLICY))


def account(kube: Kube, name: str) -> list[dict[str, Any]]:
    service = service_of(kube, name)
    return [
        objects.make_service_account(service),
        objects.make_role(service),
        objects.make_role_binding(service),
    ]


def service_of(kube: Kube, name: str) -> InferenceService:
    return parse_service(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": kube.namespace},
            "spec": {"model": {"uri": "file:///m"}},
        }
    )


def pod(service: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{service}-0"},
        "spec": {
            "serviceAccountName": f"{service}-supervisor",
            "nodeSelector": {"plimsoll.dev/no-node": "true"},
            "containers": [{"name": "engine", "image": "none"}],
        },
    }


def incident(pod: str, service: str = "qwen", name: str = "") -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LeakIncident",
        "metadata": {"name": name or f"{pod}-0"},
        "spec": {
            "id": "an-incident",
            "workloadRef": workload(service, "InferenceService", "plimsoll.dev"),
            "pod": pod,
            "container": "engine",
            "epoch": "b:1",
            "openedAt": "2026-01-01T00:00:00Z",
            "kind": "HostGrowth",
        },
    }


def workload(name: str, kind: str, api_group: str = "apps") -> dict[str, Any]:
    return {"apiGroup": api_group, "kind": kind, "name": name}


def slot(kube: Kube, service: str, **spec: Any) -> dict[str, Any]:
    """The service's slot Lease as it is, with ``spec`` changed."""
    found = kube.get("lease", f"{service}-restart-0") or {}
    return found | {"spec": (found.get("spec") or {}) | spec}


def writer(kube: Kube, folder: Path, *bound: str, account: str = "qwen-supervisor") -> Write:
    """Writes as qwen's supervisor, with a token that is bound to a pod or to none."""
    objects = ["--bound-object-kind=Pod", f"--bound-object-name={bound[0]}"] if bound else []
    token = kube("create", "token", account, *objects).strip()
    config = yaml.safe_load(kube.kubeconfig.read_text())
    config["users"] = [{"name": "supervisor", "user": {"token": token}}]
    config["contexts"][0]["context"]["user"] = "supervisor"
    file = folder / f"kubeconfig-{'-'.join((account, *bound))}"
    file.write_text(yaml.safe_dump(config))

    def write(
        item: dict[str, Any], *more: str, verb: str = "apply --server-side"
    ) -> subprocess.CompletedProcess[str]:
        command = [*kube.kubectl, f"--kubeconfig={file}", f"-n={kube.namespace}"]
        return subprocess.run(
            [*command, *verb.split(), "-f", "-", *more],
            input=json.dumps(item),
            capture_output=True,
            text=True,
            timeout=60,
        )

    return write


def refused(done: subprocess.CompletedProcess[str], said: str) -> bool:
    return done.returncode != 0 and said in done.stderr


def test_only_slots_for_the_own_pod(kube: Kube, tmp_path: Path) -> None:
    own, unbound = writer(kube, tmp_path, "qwen-0"), writer(kube, tmp_path)
    foreign = "is not the pod of this token"
    for service in ("qwen", "llama"):
        kube.apply(slots(kube, service))

    def put(write: Write, service: str, **spec: Any) -> subprocess.CompletedProcess[str]:
        return write(slot(kube, service, **spec), verb="replace")

    theirs = slot(kube, "qwen", holderIdentity="qwen-1")
    eventually(lambda: refused(own(theirs, DRY_RUN, verb="replace"), foreign), "in force")
    assert refused(put(own, "qwen", holderIdentity="qwen-1"), foreign)
    assert refused(put(own, "qwen", holderIdentity="plimsoll-operator"), foreign)
    assert refused(put(unbound, "qwen", holderIdentity="qwen-0"), "it is bound to none")
    assert not (kube.get("lease", "qwen-restart-0") or {}).get("spec")

    # It takes, renews and gives back its own.
    times = ("2026-01-01T00:00:00.000000Z", "2026-01-01T00:00:15.000000Z")
    for renewed in times:
        done = put(own, "qwen", holderIdentity="qwen-0", renewTime=renewed)
        assert done.returncode == 0, done.stderr
    done = put(own, "qwen", holderIdentity="", renewTime=times[1])
    assert done.returncode == 0, done.stderr

    # What somebody else holds it cannot free, and its annotations it can write.
    kube("patch", "lease", "qwen-restart-0", "--type=merge",
         "-p", json.dumps({"spec": {"holderIdentity": "plimsoll-operator"}}))  # fmt: skip
    assert refused(put(own, "qwen", holderIdentity=""), foreign)
    assert refused(put(own, "qwen", renewTime=times[0]), foreign)
    counted = slot(kube, "qwen")
    counted["metadata"]["annotations"] = {"plimsoll.dev/restarts": "[]"}
    done = own(counted, verb="replace")
    assert done.returncode == 0, done.stderr
    relabelled = slot(kube, "qwen")
    relabelled["metadata"]["labels"]["plimsoll.dev/service"] = "llama"
    assert refused(own(relabelled, verb="replace"), "only the operator may set")


def test_no_tenant_forges_a_slot(kube: Kube, tmp_path: Path) -> None:
    """Who may edit everything in a namespace makes no Lease that looks like one of ours, and takes
    none: not as themselves, and not with another service's token."""
    kube.apply(slots(kube, "llama"))
    binding = ("create", "rolebinding")
    for account in ("qwen-supervisor", "tenant"):
        if account == "tenant":
            kube("create", "serviceaccount", account)
        subject = f"--serviceaccount={kube.namespace}:{account}"
        kube(*binding, f"{account}-edits", "--clusterrole=edit", subject)
    tenant = writer(kube, tmp_path, account="tenant")
    supervisor = writer(kube, tmp_path, "qwen-0")
    taken = "this slot is of service llama"

    def takes(write: Write, holder: str, *more: str) -> subprocess.CompletedProcess[str]:
        return write(slot(kube, "llama", holderIdentity=holder), *more, verb="replace")

    eventually(lambda: refused(takes(tenant, "llama-0", DRY_RUN), taken), "in force")
    assert refused(takes(tenant, "llama-0"), taken)
    assert refused(takes(supervisor, "qwen-0"), taken)
    forged = slots(kube, "llama")
    forged["metadata"]["name"] = "llama-restart-1"
    assert refused(tenant(forged, verb="create"), "only the operator may create")
    plain = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
    done = tenant(plain | {"metadata": {"name": "theirs"}, "spec": {"holderIdentity": "me"}})
    assert done.returncode == 0, done.stderr
    assert not (kube.get("lease", "llama-restart-0") or {}).get("spec")


def test_no_account_of_a_namespace_deletes_a_slot(kube: Kube, tmp_path: Path) -> None:
    """The count of the service's restarts, and so its restart budget, would be deleted with it:
    directly, or by the garbage collector if its owner did not exist."""
    kube.apply(slots(kube, "qwen"))
    subject = f"--serviceaccount={kube.namespace}:qwen-supervisor"
    kube("create", "rolebinding", "edits", "--clusterrole=edit", subject)
    own = writer(kube, tmp_path, "qwen-0")
    count = {"plimsoll.dev/restarts": "[]"}
    counted = slot(kube, "qwen", holderIdentity="qwen-0")
    counted["metadata"]["annotations"] = count
    eventually(lambda: own(counted, verb="replace").returncode == 0, "the binding is in force")

    kept = "no account of a namespace may delete a restart slot"
    eventually(lambda: refused(own(counted, DRY_RUN, verb="delete"), kept), "in force")
    assert refused(own(counted, verb="delete"), kept)
    for changed in (
        {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "none", "uid": "none"}]},
        {"finalizers": ["example.com/stays"]},
    ):
        item = slot(kube, "qwen")
        item["metadata"] |= changed
        assert refused(own(item, verb="replace"), "may change owners and finalizers"), changed
    assert (kube.get("lease", "qwen-restart-0") or {})["metadata"]["annotations"] == count
    # How often it is written has no bound, so what is written has one.
    bounded = "changes no metadata of a restart slot there but the counts"
    labels = (kube.get("lease", "qwen-restart-0") or {})["metadata"]["labels"]
    for field, value in (
        ("annotations", {"other": "x"}),
        ("annotations", {"plimsoll.dev/restarts": "x" * 131_073}),
        ("labels", labels | {"a": "b"}),
    ):
        item = slot(kube, "qwen")
        item["metadata"][field] = value
        assert refused(own(item, verb="replace"), bounded), value
    # Accounts may delete Leases that are not ours, and an administrator may delete any Lease.
    plain = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "plain"}}
    assert own(plain).returncode == 0
    assert own(plain, verb="delete").returncode == 0
    kube("delete", "lease", "qwen-restart-0")


def slots(kube: Kube, name: str) -> dict[str, Any]:
    """The service's only slot Lease, as the operator applies it."""
    made = render_objects(service_of(kube, name), Images("engine:1", "supervisor:1"))
    (found,) = [one for one in made if one["kind"] == "Lease"]
    del found["metadata"]["ownerReferences"]
    return found


def test_only_incidents_of_the_own_pod(kube: Kube, tmp_path: Path) -> None:
    own, unbound = writer(kube, tmp_path, "qwen-0"), writer(kube, tmp_path)

    # A policy is in force a moment after it was made.
    other = incident("llama-0")
    eventually(
        lambda: refused(own(other, DRY_RUN), "llama-0 is not the pod of this token"), "in force"
    )
    assert refused(own(other), "(qwen-0)")
    foreign = "spec.workloadRef InferenceService/llama is not the InferenceService of"
    assert refused(own(incident("qwen-0", "llama")), foreign)
    assert refused(unbound(incident("qwen-0")), "it is bound to none")
    assert kube.list("leakincidents") == []

    done = own(incident("qwen-0"))
    assert done.returncode == 0, done.stderr
    status = {**incident("qwen-0"), "status": {"phase": "Open", "revision": 1}}
    del status["spec"]
    done = own(status, "--subresource=status")
    assert done.returncode == 0, done.stderr
    assert (kube.get("leakincident", "qwen-0-0") or {})["status"]["phase"] == "Open"
    # What somebody else may write about another pod, this token may not touch either.
    kube.apply(incident("llama-0", "llama", "theirs"))
    theirs = {**incident("llama-0", "llama", "theirs"), "status": {"phase": "Resolved"}}
    del theirs["spec"]
    assert refused(own(theirs, "--subresource=status"), "is not the pod of this token")


def test_a_hostile_pod_writes_few_and_small_incidents(kube: Kube, tmp_path: Path) -> None:
    """Names, metadata, sizes and the number of writes are bounded, and so is the room that one pod
    takes in etcd: 20 objects of at most MAX_BYTES, each written at most 101 times."""
    own = writer(kube, tmp_path, "qwen-0")
    bad_name = "must be qwen-0-N with N from 0 to 19"
    eventually(lambda: refused(own(incident("qwen-0", name="x"), DRY_RUN), bad_name), "in force")
    for name in ("qwen-0", "qwen-0-20", "qwen-0-07", "qwen-0--1", "qwen-0-1a2b3c4d", "qwen-1-1"):
        assert refused(own(incident("qwen-0", name=name)), bad_name), name

    def with_metadata(**more: Any) -> dict[str, Any]:
        made = incident("qwen-0")
        made["metadata"] |= more
        return made

    owner = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u" * 64}
    for more in (
        {"annotations": {"a": "x" * 200_000}},
        {"finalizers": ["example.com/stays"]},
        {"labels": {f"l{n}": "x" for n in range(5)}},
        {"ownerReferences": [owner]},
        {"ownerReferences": [owner | {"uid": str(n)} for n in range(2)]},
    ):
        assert refused(own(with_metadata(**more)), "a supervisor creates a LeakIncident with"), more
    for n in range(20):
        done = own(incident("qwen-0", name=f"qwen-0-{n}"))
        assert done.returncode == 0, done.stderr

    # What is there already is changed in its status alone.
    for more in ({"annotations": {"a": "x"}}, {"labels": {"a": "b"}}):
        assert refused(own(with_metadata(**more)), "changes only the status")
    again = own(incident("qwen-0"), "--field-manager=another")
    assert refused(again, "changes only the status"), "it would grow managedFields"

    def told(revision: int, manager: str = "m", **more: Any) -> subprocess.CompletedProcess[str]:
        made = {**incident("qwen-0"), "status": {"phase": "Open", "revision": revision} | more}
        del made["spec"]
        return own(made, "--subresource=status", f"--field-manager={manager}", "--force-conflicts")

    counts_on = "a supervisor may write the status of a LeakIncident 100 times"
    for revision in (1, 2, 50, 100):
        assert told(revision).returncode == 0
    assert told(100).returncode == 0, "the same again is no write"
    assert refused(told(100, message="changed"), counts_on)
    assert refused(told(7, message="changed"), counts_on)
    assert refused(told(101), "status.revision")
    assert refused(told(100, manager="another"), counts_on)


def test_a_status_is_no_larger_than_a_screen(kube: Kube) -> None:
    """The schema applies to all writers and bounds the length of a status."""
    kube.apply(incident("qwen-0"))

    def told(**status: Any) -> subprocess.CompletedProcess[str]:
        text = json.dumps({"status": {"phase": "Open", "conditions": None, **status}})
        name = ("leakincident", "qwen-0-0", "--subresource=status", "--type=merge", "-p", text)
        return kube.run("patch", *name)

    step = {"time": NOW, "step": "s" * 63, "outcome": "o" * 63}
    for status, said in (
        ({"message": "x" * 401}, "status.message"),
        ({"outcome": "x" * 64}, "status.outcome"),
        ({"endedAt": "2026-01-01T00:00:00." + "0" * 100 + "Z"}, "status.endedAt"),
        ({"timeline": [step] * 25}, "status.timeline"),
        ({"timeline": [step | {"message": "x" * 401}]}, "status.timeline[0].message"),
        ({"attribution": {"evidence": ["x"] * 13}}, "status.attribution.evidence"),
        ({"attribution": {"confidencePercent": 101}}, "confidencePercent"),
        ({"diagnostics": ["x"] * 13}, "status.diagnostics"),
        ({"timeline": [step | {"message": "x" * 400}] * 11}, "at most 4096 characters"),
        ({"attribution": {"evidence": ["x" * 400] * 11}}, "at most 4096 characters"),
        ({"diagnostics": ["x" * 350] * 12}, "at most 4096 characters"),
    ):
        assert refused(told(**status), said), status
    condition = {"type": "T" * 63, "status": "True", "reason": "R" * 63, "lastTransitionTime": NOW}
    largest = {
        "conditions": [condition | {"type": f"T{n}" + "t" * 61} for n in range(4)],
        "timeline": [step] * 14 + [step | {"message": "\u4e2d" * 400}] * 10,
        "message": "x" * 96,
        "attribution": dict.fromkeys(("segment", "process", "pod"), "y" * 253),
    }
    done = told(**largest)
    assert done.returncode == 0, done.stderr
    stored = kube("get", "leakincident", "qwen-0-0", "-o", "json", "--show-managed-fields")
    whole = json.dumps(json.loads(stored), ensure_ascii=False, separators=(",", ":"))
    assert len(whole.encode()) < MAX_BYTES, len(whole.encode())


def of_policy(kube: Kube, name: str, *accounts: str, **workloads: str) -> list[dict[str, Any]]:
    """What the operator makes for a policy whose supervised pods have these accounts.
    ``workloads`` has the names of the pods of each StatefulSet."""
    manifest = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {"name": name, "namespace": kube.namespace},
        "spec": {"selector": {"matchLabels": {"app": name}}},
    }
    supervised = [
        SelectedPod(
            pod,
            "engine",
            SupervisionState.SUPERVISED,
            member=Membership(WorkloadRef("StatefulSet", workload), "apps"),
            may_hold_slot=True,
        )
        for workload, pods in workloads.items()
        for pod in pods.split()
    ]
    made = policies.render_objects(
        parse_object(SupervisionPolicy, manifest), accounts, group_pods_by_workload(supervised)
    )
    for one in made:
        del one["metadata"]["ownerReferences"]
    return made


def event(name: str, **changed: Any) -> dict[str, Any]:
    about = {"apiVersion": "plimsoll.dev/v1alpha1", "kind": "LeakIncident", "name": "qwen-0-3"}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name},
        "involvedObject": about,
        "reason": "Confirmed",
        "message": "m",
        "type": "Warning",
        "source": {"component": "plimsoll-supervisor", "host": "qwen-0"},
        "firstTimestamp": NOW,
        "lastTimestamp": NOW,
        "count": 1,
    } | changed


def test_a_hostile_pod_writes_few_and_small_events(kube: Kube, tmp_path: Path) -> None:
    """200 names of a pod, and none twice: what its token writes in etcd within an hour is bounded.
    An account that has a right to Events of its own keeps it."""
    own, unbound = writer(kube, tmp_path, "qwen-0"), writer(kube, tmp_path)

    def create(item: dict[str, Any], *more: str, by: Write = own) -> Any:
        item["involvedObject"]["namespace"] = kube.namespace
        return by(item, *more, verb="create")

    bad_name = "must be POD-N.PHASE"
    eventually(lambda: refused(create(event("any"), DRY_RUN), bad_name), "in force")
    for name in ("any", "qwen-0", "qwen-0.confirmed", "qwen-0-20.confirmed", "qwen-0-1.other",
                 "llama-0-1.confirmed", "qwen-0-1.confirmed.2", "qwen-0-01.confirmed"):  # fmt: skip
        assert refused(create(event(name)), bad_name), name
    assert refused(create(event("qwen-0-3.confirmed"), by=unbound), "it is bound to none")
    large = {"labels": {"a": "b"}}, {"annotations": {"a": "x" * 200_000}}
    for more in large:
        item = event("qwen-0-3.confirmed")
        item["metadata"] |= more
        assert refused(create(item), "a supervisor tells of a LeakIncident"), more
    about = event("qwen-0-3.confirmed")["involvedObject"]
    for changed in (
        {"message": "x" * 1025},
        {"reason": "x" * 64},
        {"involvedObject": about | {"fieldPath": "x"}},
        {"involvedObject": about | {"kind": "Pod", "apiVersion": "v1"}},
        {"related": about},
        {"source": {"component": "x" * 64}},
        {"reportingComponent": "x" * 64, "reportingInstance": "y", "action": "z"},
    ):
        item = event("qwen-0-3.confirmed", **changed)
        assert refused(create(item), "a supervisor tells of a LeakIncident"), changed
    done = create(event("qwen-0-3.confirmed"))
    assert done.returncode == 0, done.stderr
    done = own(event("qwen-0-3.confirmed", message="again"), verb="replace")
    assert refused(done, "cannot"), "it has no right to change one"
    kube("create", "role", "events", "--verb=create,patch", "--resource=events")
    subject = f"--serviceaccount={kube.namespace}:qwen-supervisor"
    kube("create", "rolebinding", "events", "--role=events", subject)
    eventually(lambda: create(event("theirs")).returncode == 0, "a right of its own", 30)


def slot_of(policy: str, workload: str) -> str:
    return make_slot_names(policy, SlotOwner(WorkloadRef("StatefulSet", workload)), 1)[0]


def test_a_hostile_engine_of_a_policy_forges_no_more_than_its_own_pod(
    kube: Kube, tmp_path: Path
) -> None:
    """All containers of such a pod share its account, so this is what an engine may do at most.
    The pods of two workloads share the account as well."""
    for name in ("engine", "other"):
        kube("create", "serviceaccount", name)
    for name, account in (("engine", "engine"), ("router", "engine"), ("other", "other")):
        kube.apply(pod(name) | {"spec": pod(name)["spec"] | {"serviceAccountName": account}})
    kube.apply(
        *of_policy(kube, "engines", "engine", engine="engine-0 engine-1", router="router-0"),
        *of_policy(kube, "foreign", "other", other="other-0"),
    )
    own = writer(kube, tmp_path, "engine-0", account="engine")
    unbound = writer(kube, tmp_path, account="engine")

    def told(pod: str, policy: str, name: str) -> dict[str, Any]:
        made = incident(pod, name=f"{pod}-{name}")
        ref = workload("vllm", "Deployment")
        made["spec"] |= {"policyRef": {"name": policy}, "workloadRef": ref}
        return made

    # A policy is in force a moment after it was made.
    foreign = told("other-0", "engines", "0")
    eventually(
        lambda: refused(own(foreign, DRY_RUN), "other-0 is not the pod of this token"), "in force"
    )
    assert refused(own(told("engine-0", "foreign", "0")), "foreign supervises no pod of")
    foreign_service = "spec.workloadRef InferenceService/qwen is not the InferenceService of"
    assert refused(own(incident("engine-0", "qwen")), foreign_service)
    assert refused(unbound(told("engine-0", "engines", "0")), "it is bound to none")
    assert kube.list("leakincidents") == []

    done = own(told("engine-0", "engines", "0"))
    assert done.returncode == 0, done.stderr
    status = {**told("engine-0", "engines", "0"), "status": {"phase": "Open", "revision": 1}}
    del status["spec"]
    done = own(status, "--subresource=status")
    assert done.returncode == 0, done.stderr
    # An incident of another pod stays as it is, and so do policies, their configuration, and pods.
    kube.apply(told("other-0", "foreign", "0"))
    theirs = {**told("other-0", "foreign", "0"), "status": {"phase": "Resolved"}}
    del theirs["spec"]
    assert refused(own(theirs, "--subresource=status"), "is not the pod of this token")
    can = f"--as=system:serviceaccount:{kube.namespace}:engine"
    for right in (
        ("list", "leakincidents"),
        ("delete", "leakincidents"),
        ("update", f"leases/{slot_of('foreign', 'other')}"),
        ("get", "configmaps/engines.policy"),
        ("patch", "configmaps/engines.policy"),
        ("get", "secrets"),
        ("list", "pods"),
        ("patch", "supervisionpolicies/engines"),
        ("create", "rolebindings"),
    ):
        assert kube.run("auth", "can-i", *right, can).stdout.strip() == "no", right

    # It takes and gives back a slot of its own workload for its own pod, and nothing else.
    def put(name: str, write: Write = own, **spec: Any) -> subprocess.CompletedProcess[str]:
        lease = kube.get("lease", name) or {}
        annotations = spec.pop("annotations", {})
        lease["spec"] = (lease.get("spec") or {}) | spec
        lease["metadata"]["annotations"] |= annotations
        return write(lease, verb="replace")

    mine, others = slot_of("engines", "engine"), slot_of("engines", "router")
    assert refused(put(mine, holderIdentity="other-0"), "is not the pod of this token")
    theirs_alone = "this slot is of StatefulSet/router, and the pod of this token (engine-0) is no"
    assert refused(put(others, holderIdentity="engine-0"), theirs_alone)
    assert refused(put(others, annotations={"plimsoll.dev/restarts": "[]"}), theirs_alone)
    assert refused(put("engines.policy-restart-0", holderIdentity="engine-0"), "without an owner")
    for changed in ({"plimsoll.dev/replicas": "engine-0"}, {"plimsoll.dev/workload": "Job/x"}):
        assert refused(put(mine, annotations=changed), "only the operator may say whose")
    assert refused(put(mine, unbound, annotations={"plimsoll.dev/restarts": "[]"}), "bound to none")
    for holder in ("engine-0", ""):
        done = put(mine, holderIdentity=holder, renewTime="2026-01-01T00:00:00.000000Z")
        assert done.returncode == 0, done.stderr
    done = put(mine, annotations={"plimsoll.dev/restarts": "[]"})
    assert done.returncode == 0, done.stderr


def test_rights_on_a_slot_of_a_policy_are_not_enough(kube: Kube, tmp_path: Path) -> None:
    """Who may edit everything in the namespace still takes no slot of a policy, not even for the
    own pod: it must be one that the policy supervises."""
    kube.apply(*of_policy(kube, "engines", qwen="qwen-0"))
    subject = f"--serviceaccount={kube.namespace}:qwen-supervisor"
    kube("create", "rolebinding", "edits", "--clusterrole=edit", subject)
    tenant = writer(kube, tmp_path, "qwen-0")

    def takes(*more: str) -> subprocess.CompletedProcess[str]:
        lease = kube.get("lease", slot_of("engines", "qwen")) or {}
        return tenant(lease | {"spec": {"holderIdentity": "qwen-0"}}, *more, verb="replace")

    taken = "this slot is of service engines.policy"
    eventually(lambda: refused(takes(DRY_RUN), taken), "in force")
    assert refused(takes(), taken)
