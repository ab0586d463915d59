"""The supervisor's side of Kubernetes on a real API server, with the permissions it really gets."""

import base64
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from plimsoll_api.admin import Status
from plimsoll_api.engines import EngineType
from plimsoll_api.incident_object import list_object_names, make_object, make_path
from plimsoll_api.incident_record import Reason
from plimsoll_api.incidents import IncidentKind, IncidentPhase, WaitReason
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import (
    OPERATOR_NAME,
    REPLICA_RESTARTS_ANNOTATION,
    RESTART_BUDGET_RESET_FILE,
    SERVICE_RESTARTS_ANNOTATION,
)
from plimsoll_api.state import Signal
from plimsoll_api.supervision import Mode, RestartBudget, Supervision
from plimsoll_api.supervisor_config import (
    EngineEndpoint,
    ServiceRef,
    SupervisorConfig,
    encode_config,
)
from plimsoll_api.trace import Sample
from plimsoll_operator.fleet import circuit_breaker
from plimsoll_operator.render import objects
from plimsoll_sidecar.act import lease_counts
from plimsoll_sidecar.act.actuator import Actuator
from plimsoll_sidecar.act.adapters.engine_adapter import create_adapter
from plimsoll_sidecar.act.pod_services import PodServices, create_pod_services
from plimsoll_sidecar.act.slots import LEASE_DURATION_S, LeaseSlots
from plimsoll_sidecar.clients.kube import EndpointSlices, KubeClient, KubeError
from plimsoll_sidecar.config import ConfigFile
from plimsoll_sidecar.govern.command import Refusal
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.restart_budget import NO_RESTARTS
from plimsoll_sidecar.main import create_detector
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.record.publisher import Publisher
from plimsoll_sidecar.signals.sampler import Sampler
from plimsoll_sidecar.supervisor import Supervisor

ROOT = Path(__file__).parents[2]
SERVICE = "qwen"
POLICY = RestartBudget(count=2, window_s=3600.0)
WIDE = RestartBudget(count=100, window_s=3600.0)


class Rig:
    """A namespace with a service, its slots and its supervisors' account."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        config = yaml.safe_load(Path(cluster.kubeconfig).read_text())
        self.server = config["clusters"][0]["cluster"]["server"]
        self.ca = self._file(folder, config["clusters"][0]["cluster"], "certificate-authority")
        cert = self._file(folder, config["users"][0]["user"], "client-certificate")
        key = self._file(folder, config["users"][0]["user"], "client-key")
        self.admin = KubeClient(self.server, ca_file=self.ca, cert_file=cert, key_file=key)
        self.namespace = f"supervisor-{uuid.uuid4().hex[:8]}"
        self.folder = folder
        self.uid = self._create()
        self.token = folder / "token"
        self.token.write_text(self._token())
        self.kube = KubeClient(self.server, self.token, self.ca)
        self.service = ServiceRef(name=SERVICE, namespace=self.namespace, uid=self.uid)

    @staticmethod
    def _file(folder: Path, section: dict[str, str], name: str) -> Path:
        if name in section:
            return Path(section[name])
        path = folder / name
        path.write_bytes(base64.b64decode(section[f"{name}-data"]))
        return path

    def _create(self) -> str:
        crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for file in ROOT.glob("crds/*.yaml"):
            crd = yaml.safe_load(file.read_text())
            self.admin.apply(f"{crds}/{crd['metadata']['name']}", crd)
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        self.admin.create("/api/v1/namespaces", body)
        manifest = {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": SERVICE, "namespace": self.namespace},
            "spec": {"model": {"uri": "file:///models/tiny"}},
        }
        services = f"/apis/plimsoll.dev/v1alpha1/namespaces/{self.namespace}/inferenceservices"
        created = _eventually(lambda: self.admin.create(services, manifest))
        service = InferenceService.model_validate(manifest)
        coordination = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"
        for lease in objects.make_slot_leases(service):
            self.admin.apply(f"{coordination}/{lease['metadata']['name']}", lease)
        rules = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.namespace}"
        self.admin.create(
            f"/api/v1/namespaces/{self.namespace}/serviceaccounts",
            objects.make_service_account(service),
        )
        self.admin.create(f"{rules}/roles", objects.make_role(service))
        self.admin.create(f"{rules}/rolebindings", objects.make_role_binding(service))
        self.slot = objects.make_slot_leases(service)[0]["metadata"]["name"]
        return str(created["metadata"]["uid"])

    def _token(self) -> str:
        account = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{SERVICE}-supervisor"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return str(self.admin.create(f"{account}/token", request)["status"]["token"])

    def slots(self, holder: str, clock: Any = time.monotonic, uid: str = "") -> LeaseSlots:
        return LeaseSlots(self.kube, self.namespace, (self.slot,), holder, clock, uid)

    def config(self) -> SupervisorConfig:
        url = "http://127.0.0.1:9"
        return SupervisorConfig(
            service=self.service,
            engine=EngineEndpoint(type=EngineType.PLIMSOLL, admin_url=url, serving_url=url),
            supervision=Supervision(mode=Mode.RECOVER, restart_budget=POLICY),
            slots=(self.slot,),
        )

    def lease(self) -> dict[str, Any]:
        return self.admin.get(self.lease_path)

    @property
    def lease_path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/{self.slot}"


def _eventually(call: Any, limit_s: float = 20.0) -> Any:
    """A resource definition is served a moment after it was created."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return call()
        except (KubeError, AssertionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.fixture
def rig(cluster: Any, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(cluster, tmp_path)
    _eventually(lambda: rig.slots("probe").release_all_slots())  # the role is in force
    yield rig
    rig.admin._call("DELETE", f"/api/v1/namespaces/{rig.namespace}")


def story(name: str = "qwen-0-deadbeef") -> Incident:
    return Incident(
        name=name,
        kind=IncidentKind.HOST_GROWTH,
        epoch="ab:1",
        opened_at=time.time(),
        phase_since=1.0,
    )


def test_one_of_many_supervisors_gets_the_slot(rig: Rig) -> None:
    answers: dict[str, Refusal | None] = {}
    contenders = {f"pod-{number}": rig.slots(f"pod-{number}") for number in range(6)}
    barrier = threading.Barrier(len(contenders))

    def contend(name: str, slots: LeaseSlots) -> None:
        barrier.wait(10)
        answers[name] = slots.acquire(f"incident-{name}", POLICY)

    threads = [threading.Thread(target=contend, args=item) for item in contenders.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    winners = [name for name, reason in answers.items() if reason is None]
    assert len(winners) == 1, answers
    assert rig.lease()["spec"]["holderIdentity"] == winners[0]
    assert [name for name, slots in contenders.items() if slots._renew_if_due()] == winners
    contenders[winners[0]].release_all_slots()
    assert not rig.lease()["spec"].get("holderIdentity")


def test_a_dead_holder_expires_by_the_clock_of_the_one_who_waits(rig: Rig) -> None:
    now = 0.0
    assert rig.slots("dead").acquire("incident-1", POLICY) is None
    waiting = rig.slots("alive", lambda: now)
    held = Refusal(WaitReason.SLOT_HELD, f"dead holds the slot {rig.slot}")
    assert waiting.acquire("incident-2", POLICY) == held
    now = LEASE_DURATION_S - 1.0
    assert waiting.acquire("incident-2", POLICY) == held
    now = LEASE_DURATION_S + 1.0
    assert waiting.acquire("incident-2", POLICY) is None
    lease = rig.lease()
    assert lease["spec"]["holderIdentity"] == "alive"
    assert lease["spec"]["leaseTransitions"] == 2


def test_a_renewed_slot_does_not_expire(rig: Rig) -> None:
    now = 0.0
    holder, waiting = rig.slots("busy", lambda: now), rig.slots("other", lambda: now)
    assert holder.acquire("incident-1", POLICY) is None
    for _ in range(5):
        assert waiting.acquire("incident-2", POLICY) is not None
        now += LEASE_DURATION_S / 2
        assert holder.ensure_held("incident-1", POLICY) is None


def test_the_restarts_of_the_service_outlive_its_pods(rig: Rig) -> None:
    for number in range(POLICY.count):
        slots = rig.slots(f"pod-{number}")
        assert slots.acquire(f"incident-{number}", POLICY) is None
        assert slots.acquire(f"incident-{number}", POLICY) is None  # a repetition counts once
        slots.release_all_slots()
    counted = rig.lease()["metadata"]["annotations"][SERVICE_RESTARTS_ANNOTATION]
    assert counted.count("incident-") == POLICY.count
    refusal = rig.slots("pod-9").acquire("incident-9", POLICY)
    assert refusal is not None
    assert refusal.reason is WaitReason.SERVICE_RESTART_BUDGET
    assert "the limit is 2" in refusal.message


def spend(rig: Rig, pod: str, uid: str) -> list[float]:
    """A replica spends its budget, restart by restart."""
    times = [time.time() + number / 8 for number in range(POLICY.count)]
    for number, at in enumerate(times):
        slots = rig.slots(pod, uid=uid)
        assert slots.acquire(f"{pod}-{number:08x}", WIDE, at) is None
        slots.release_all_slots()
    return times


def test_a_lost_journal_gives_no_restart_back(rig: Rig) -> None:
    times = spend(rig, "qwen-0", "uid-0")
    fresh = rig.slots("qwen-0", uid="uid-0")
    assert list(fresh.read_stored_restarts().at) == times
    lease_counts_cleared(rig)
    refusal = fresh.acquire("qwen-0-0000000f", POLICY, time.time())
    assert refusal is not None
    assert refusal.reason is WaitReason.REPLICA_RESTART_BUDGET
    # Another pod, also one of the same name, begins at zero.
    assert rig.slots("qwen-0", uid="uid-1").read_stored_restarts() == NO_RESTARTS
    assert rig.slots("qwen-0", uid="uid-1").acquire("qwen-0-0000000e", POLICY, time.time()) is None


def lease_counts_cleared(rig: Rig) -> None:
    """Forgets the service's restarts, so that the replica's own are what counts."""
    lease = rig.lease()
    lease_counts.clear_service_restarts(lease)
    rig.kube.put(rig.lease_path, lease)


class Absent:
    """An engine that is not there: nothing is asked of it here."""

    status: Status | None = None

    def __init__(self) -> None:
        self.signals: dict[str, Signal] = {}

    def sample(self) -> Sample:
        return Sample(t=time.monotonic(), epoch=0, scrape_ok=False)


def supervisor(rig: Rig, folder: Path) -> Supervisor:
    """A real one, on the journal in ``folder`` and the slot of the API server."""
    file = folder / "supervisor.json"
    file.write_bytes(encode_config(rig.config()))
    adapter = create_adapter(rig.config().engine, folder / "token")

    def actuator(frontend: Any) -> Actuator:
        slots = rig.slots("qwen-0", uid="uid-0")
        made = Actuator(adapter, slots, None, lambda command: (), folder, POLICY, frontend)
        made.start()
        return made

    return Supervisor(
        ConfigFile(file), cast(Sampler, Absent()), create_detector, actuator, None, Metrics(),
        folder, "qwen-0",
    )  # fmt: skip


def end(one: Supervisor) -> None:
    one._actuator.stop()
    one._journal.close()


def settled(one: Supervisor) -> Supervisor:
    """After the slot's count was read."""

    def tick() -> None:
        one.tick(time.time())
        _check(one._has_merged_restarts)

    _eventually(tick)
    return one


@pytest.mark.parametrize("loss", ["deleted", "truncated"])
def test_a_supervisor_whose_journal_is_lost_counts_what_the_slot_counts(
    rig: Rig, tmp_path: Path, loss: str
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    spend(rig, "qwen-0", "uid-0")
    first = settled(supervisor(rig, folder))
    assert first._governor.count_restarts_left(time.time()) == 0
    first._governor.state.exhausted = True
    first._write_journal()
    first._actuator.store_restarts(first._governor.copy_restarts())
    _eventually(lambda: _check(rig.slots("qwen-0", uid="uid-0").read_stored_restarts().exhausted))
    end(first)
    journal = folder / "journal.sqlite"
    for file in (journal, Path(f"{journal}-wal"), Path(f"{journal}-shm")):
        if loss == "deleted":
            file.unlink(missing_ok=True)
        elif file.exists():
            os.truncate(file, 0)
    second = settled(supervisor(rig, folder))
    assert second._governor.state.exhausted, "the hard stop holds until a person resets it"
    assert second._governor.count_restarts_left(time.time()) == 0

    # What a person's resume does: the Leases at once, the journal within a sample.
    said = lease_counts.reset_counts(rig.kube, rig.config(), "qwen-0", "uid-0", whole_service=False)
    assert said == f"cleared {POLICY.count} restarts of this replica from the slot Leases"
    (folder / RESTART_BUDGET_RESET_FILE).touch()
    second.tick(time.time())
    assert second._governor.count_restarts_left(time.time()) == POLICY.count
    _eventually(
        lambda: _check(rig.slots("qwen-0", uid="uid-0").read_stored_restarts() == NO_RESTARTS)
    )
    assert rig.lease()["metadata"].get("annotations", {}) == {}
    end(second)
    third = settled(supervisor(rig, folder))
    assert third._governor.count_restarts_left(time.time()) == POLICY.count, (
        "in the journal as well"
    )
    end(third)


@pytest.mark.parametrize("holder", ["qwen-0", "qwen-1"])
def test_a_slot_of_the_pod_before_is_given_back(rig: Rig, tmp_path: Path, holder: str) -> None:
    """A StatefulSet gives the next pod the same name, and its journal is empty."""
    folder = tmp_path / "state"
    folder.mkdir()
    assert rig.slots(holder, uid="before").acquire(f"{holder}-0000000f", POLICY, 1.0) is None
    successor = settled(supervisor(rig, folder))
    kept = "" if holder == "qwen-0" else holder
    _eventually(lambda: _check(rig.lease()["spec"]["holderIdentity"] == kept))
    end(successor)


def test_a_resume_clears_the_service_on_purpose_only(rig: Rig) -> None:
    spend(rig, "qwen-0", "uid-0")
    spend(rig, "qwen-1", "uid-1")
    said = lease_counts.reset_counts(rig.kube, rig.config(), "qwen-0", "uid-0", whole_service=False)
    assert said.startswith(f"cleared {POLICY.count} restarts of this replica from the slot Leases")
    assert "2 restarts of other replicas still count against the limit of 2" in said
    assert "plimsoll resume --service" in said
    assert rig.slots("qwen-0", uid="uid-0").acquire("qwen-0-0000000f", POLICY, 1.0) is not None
    said = lease_counts.reset_counts(rig.kube, rig.config(), "qwen-0", "uid-0", whole_service=True)
    assert said == f"cleared {POLICY.count} restarts of the service from the slot Leases"
    assert rig.slots("qwen-0", uid="uid-0").acquire("qwen-0-0000000f", POLICY, 1.0) is None
    assert rig.slots("qwen-1", uid="uid-1").read_stored_restarts().at, (
        "the other replica's own count stays"
    )


def test_a_forged_count_costs_its_service_until_it_is_cleared(rig: Rig) -> None:
    lease = rig.lease()
    forged = {REPLICA_RESTARTS_ANNOTATION: "[1]", SERVICE_RESTARTS_ANNOTATION: "x"}
    lease["metadata"]["annotations"] = forged
    rig.kube.put(rig.lease_path, lease)
    with pytest.raises(lease_counts.UnreadableCountError, match="plimsoll resume POD --service"):
        rig.slots("qwen-0").acquire("qwen-0-0000000f", POLICY, 1.0)
    lease_counts.reset_counts(rig.kube, rig.config(), "qwen-0", "qwen-0", whole_service=True)
    assert rig.slots("qwen-0").acquire("qwen-0-0000000f", POLICY, 1.0) is None


def test_the_holder_of_the_slot_is_named_for_what_it_is(rig: Rig) -> None:
    assert rig.slots("qwen-1").acquire("incident-1", POLICY) is None
    refusal = rig.slots("qwen-0").acquire("incident-2", POLICY)
    assert refusal == Refusal(WaitReason.SLOT_HELD, f"qwen-1 holds the slot {rig.slot}")
    rig.slots("qwen-1").release_all_slots()
    assert rig.slots(OPERATOR_NAME).acquire("incident-3", POLICY) is None
    refusal = rig.slots("qwen-0").acquire("incident-2", WIDE)
    assert refusal is not None
    assert refusal.reason is WaitReason.CIRCUIT_BREAKER
    assert "circuit breaker" in refusal.message
    assert circuit_breaker.OPERATOR_HOLDER == OPERATOR_NAME


def test_the_pods_uid_is_in_its_token(rig: Rig) -> None:
    assert lease_counts.read_pod_uid(rig.token) == "", "this one is bound to no pod"
    pods = f"/api/v1/namespaces/{rig.namespace}/pods"
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "qwen-0"},
        "spec": {
            "serviceAccountName": f"{SERVICE}-supervisor",
            "containers": [{"name": "a", "image": "a"}],
        },
    }
    pod = rig.admin.create(pods, body)
    account = f"/api/v1/namespaces/{rig.namespace}/serviceaccounts/{SERVICE}-supervisor"
    bound = {"kind": "Pod", "apiVersion": "v1", "name": "qwen-0", "uid": pod["metadata"]["uid"]}
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"boundObjectRef": bound},
    }
    token = rig.admin.create(f"{account}/token", request)["status"]["token"]
    rig.token.write_text(token)
    assert lease_counts.read_pod_uid(rig.token) == pod["metadata"]["uid"]


def test_each_phase_of_an_incident_has_one_event(rig: Rig) -> None:
    publisher = Publisher(rig.kube, rig.service, "qwen-0")
    incident = story()
    for phase in (
        IncidentPhase.OPEN,
        IncidentPhase.OPEN,
        IncidentPhase.TRIMMING,
        IncidentPhase.RESOLVED,
    ):
        incident.phase = phase
        if phase is IncidentPhase.RESOLVED:
            incident.reason, incident.returned_bytes = Reason.TRIM, 5_000
        publisher.publish(incident)
    found = rig.admin.get(make_path(rig.namespace, list_object_names(incident, "qwen-0")[0]))
    assert (found["spec"]["pod"], found["spec"]["id"]) == ("qwen-0", incident.name)
    assert found["status"]["phase"] == "Resolved"
    assert found["status"]["returnedBytes"] == 5_000
    assert "ownerReferences" not in found["metadata"]
    events = rig.admin.get(f"/api/v1/namespaces/{rig.namespace}/events")["items"]
    assert sorted(event["reason"] for event in events) == ["Open", "Resolved", "Trimming"]


def test_an_api_server_that_is_away_loses_nothing(rig: Rig) -> None:
    """The token is missing at first: nothing can be written until it is there."""
    rig.token.rename(rig.folder / "away")
    publisher = Publisher(rig.kube, rig.service, "qwen-0")
    publisher.start()
    incident = story()
    begin = time.monotonic()
    publisher.queue_incident(1, incident)
    assert time.monotonic() - begin < 0.1
    _eventually(lambda: _check(not publisher._thread.is_ok))
    assert publisher.take_acknowledged() == []
    assert publisher.num_unpublished == 1
    (rig.folder / "away").rename(rig.token)
    arrived: list[tuple[str, int]] = []

    def acknowledged() -> None:
        arrived.extend(publisher.take_acknowledged())
        assert arrived

    _eventually(acknowledged)
    assert arrived == [(incident.name, 1)]
    found = rig.admin.get(make_path(rig.namespace, list_object_names(incident, "qwen-0")[0]))
    assert found["status"]["phase"] == "Open"
    publisher.stop(5.0)


def test_a_deleted_incident_is_made_anew(rig: Rig) -> None:
    publisher = Publisher(rig.kube, rig.service, "qwen-0")
    incident = story()
    publisher.publish(incident)
    path = make_path(rig.namespace, list_object_names(incident, "qwen-0")[0])
    rig.admin._call("DELETE", path)
    with pytest.raises(KubeError):
        publisher.publish(incident)
    publisher.publish(incident)
    assert rig.admin.get(path)["status"]["phase"] == "Open"


def test_a_name_is_free_again_and_none_is_taken_from_another_incident(rig: Rig) -> None:
    """The names of a pod are few. An incident of an earlier pod of this name keeps its own, and a
    supervisor that was restarted finds the object that it made."""
    incident = story()
    names = list_object_names(incident, "qwen-0")
    older = make_object(story(), names[0], rig.service, "qwen-0", "engine")
    older["spec"]["id"] = "of-an-earlier-pod"
    rig.admin.create(make_path(rig.namespace, ""), older)
    for revision in (1, 2):
        Publisher(rig.kube, rig.service, "qwen-0").publish(incident)
        found = rig.admin.get(make_path(rig.namespace, names[1]))
        assert (found["spec"]["id"], found["status"]["revision"]) == (incident.name, revision)
    assert "status" not in rig.admin.get(make_path(rig.namespace, names[0]))
    for name in names[2:]:
        older["metadata"]["name"] = name
        rig.admin.create(make_path(rig.namespace, ""), older)
    other = story()
    other.name = "qwen-0-another"
    with pytest.raises(KubeError, match="already has the maximum"):
        Publisher(rig.kube, rig.service, "qwen-0").publish(other)


def create_endpoint_slice(rig: Rig, readiness: dict[str, bool]) -> tuple[dict[str, Any], str]:
    """Create the Service's EndpointSlice of the pods; return it, and the path of its kind."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{rig.namespace}/endpointslices"
    body = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "qwen-1", "labels": {"kubernetes.io/service-name": SERVICE}},
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": [f"10.1.0.{number}"],
                "conditions": {"ready": ready},
                "targetRef": {"kind": "Pod", "name": name},
            }
            for number, (name, ready) in enumerate(readiness.items(), 1)
        ],
    }
    return rig.admin.create(path, body), path


def test_the_last_ready_replica_stays(rig: Rig) -> None:
    created, path = create_endpoint_slice(rig, {"qwen-1": True, "qwen-2": False})
    slices = EndpointSlices(rig.kube, rig.namespace)
    first = PodServices(slices, "qwen-1", SERVICE)
    # A policy's supervisor does not know the Service: it finds those that route to its pod.
    found = PodServices(slices, "qwen-1")
    assert found.read_readiness_by_service() == [{"qwen-1": True, "qwen-2": False}]
    assert found.is_last_ready()
    assert not found.wait_until_left(0.0)
    assert PodServices(slices, "qwen-9").read_readiness_by_service() == []
    assert first.read_readiness_by_service() == [{"qwen-1": True, "qwen-2": False}]
    assert first.is_last_ready()
    assert not first.wait_until_left(0.0)
    # A Service that publishes addresses that are not ready calls every pod ready.
    created["endpoints"][1]["conditions"] = {"ready": True, "serving": False}
    created = rig.admin.put(f"{path}/qwen-1", created)
    assert found.read_readiness_by_service() == [{"qwen-1": True, "qwen-2": False}]
    created["endpoints"][1]["conditions"] = {"ready": True, "serving": True}
    created["endpoints"][0]["conditions"]["ready"] = False
    created = rig.admin.put(f"{path}/qwen-1", created)
    for one in (first, found):
        assert not one.is_last_ready()
        assert not one.is_last_ready(is_planned=True)
        assert one.wait_until_left(5.0)
    created["endpoints"] = created["endpoints"][:1]
    rig.admin.put(f"{path}/qwen-1", created)
    assert not first.is_last_ready()  # the only replica may leave
    assert not found.is_last_ready()
    for one in (first, found):
        assert one.is_last_ready(is_planned=True), "but not to be recycled"


def test_a_replica_of_another_workload_does_not_stand_in_for_the_last_one(rig: Rig) -> None:
    """A router's Service may have the pods of several workloads, each with another model."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{rig.namespace}/endpointslices"
    ready = {"vllm-0": True, "vllm-0-1": True, "vllm-1": False, "llama-0": True}
    endpoints = [
        {
            "addresses": [f"10.1.0.{number}"],
            "conditions": {"ready": is_ready},
            "targetRef": {"kind": "Pod", "name": name},
        }
        for number, (name, is_ready) in enumerate(ready.items(), 1)
    ]
    body: dict[str, Any] = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "router", "labels": {"kubernetes.io/service-name": "router"}},
        "addressType": "IPv4",
        "endpoints": endpoints,
    }
    created = rig.admin.create(path, body)
    lease = rig.lease()
    annotation = {"plimsoll.dev/replicas": "vllm-0,vllm-0-1 vllm-1"}
    lease["metadata"]["annotations"] = annotation
    rig.admin.put(rig.lease_path, lease)
    slots = rig.slots("vllm-0")
    assert slots.list_replicas() == [("vllm-0", "vllm-0-1"), ("vllm-1",)]
    slices = EndpointSlices(rig.kube, rig.namespace)
    leaving = PodServices(slices, "vllm-0", list_replicas=slots.list_replicas)
    assert leaving.is_last_ready(), "its own group's other pod leaves with it"
    assert not PodServices(slices, "vllm-0").is_last_ready()
    assert not PodServices(slices, "llama-0", list_replicas=slots.list_replicas).is_last_ready()
    created["endpoints"][2]["conditions"]["ready"] = True
    rig.admin.put(f"{path}/router", created)
    assert not leaving.is_last_ready()


def test_a_group_that_is_being_recreated_keeps_the_other_one_in_service(rig: Rig) -> None:
    """Only the slot says that there should be two: the missing leader has no endpoint."""
    manifest = {
        "metadata": {"name": SERVICE, "namespace": rig.namespace},
        "spec": {
            "replicas": 2,
            "model": {"uri": "pvc://models/tiny"},
            "engine": {"type": "vllm", "image": "vllm"},
            "parallelism": {"pipeline": 2},
        },
    }
    (lease,) = objects.make_slot_leases(InferenceService.model_validate(manifest))
    rig.admin.apply(rig.lease_path, lease)
    create_endpoint_slice(rig, {"qwen-lws-1": True})
    slots = rig.slots("qwen-lws-1")
    assert slots.read_expected_replicas() == 2
    assert create_pod_services(rig.kube, rig.service, "qwen-lws-1", slots).is_last_ready()
    lease["metadata"]["annotations"] = {}
    rig.admin.apply(rig.lease_path, lease)
    assert slots.read_expected_replicas() == 0
    assert not create_pod_services(rig.kube, rig.service, "qwen-lws-1", slots).is_last_ready()


def test_a_pod_without_a_slot_waits_for_the_operator(rig: Rig) -> None:
    """The operator sees a new pod a few seconds after its supervisor started."""
    absent = LeaseSlots(rig.kube, rig.namespace, ("engines.policy-vllm-1-restart-0",), "vllm-0")
    refusal = absent.acquire("incident-1", POLICY, 1.0)
    assert refusal is not None
    assert refusal.reason is WaitReason.NO_SLOT
    assert "the operator has not created a restart slot for this pod yet" in refusal.message
    assert absent.list_replicas() == []


def test_a_missing_permission_is_named(rig: Rig) -> None:
    with pytest.raises(KubeError, match="cannot get resource") as caught:
        rig.kube.get(f"/api/v1/namespaces/{rig.namespace}/pods/x")
    assert caught.value.status == 403
    assert not caught.value.is_transient


def _check(condition: bool) -> None:
    assert condition
