"""The supervisor's side of Kubernetes on a real API server, with the permissions it really gets."""

import base64
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.supervision import RestartBudget, ServiceRef
from plimsoll_operator.render import leases, rbac
from plimsoll_sidecar.act.endpoints import Endpoints
from plimsoll_sidecar.act.slots import ANNOTATION, DURATION_S, LeaseSlots
from plimsoll_sidecar.detect.assessment import Kind
from plimsoll_sidecar.govern.incident import Incident, Phase, Reason
from plimsoll_sidecar.record.incident import path_of
from plimsoll_sidecar.record.kube import KubeClient, KubeError
from plimsoll_sidecar.record.publisher import Publisher

ROOT = Path(__file__).parents[2]
SERVICE = "qwen"
POLICY = RestartBudget(count=2, window_s=3600.0)


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
        for lease in leases.slot_leases(service):
            self.admin.apply(f"{coordination}/{lease['metadata']['name']}", lease)
        rules = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.namespace}"
        self.admin.create(
            f"/api/v1/namespaces/{self.namespace}/serviceaccounts", rbac.service_account(service)
        )
        self.admin.create(f"{rules}/roles", rbac.role(service))
        self.admin.create(f"{rules}/rolebindings", rbac.role_binding(service))
        self.slot = leases.slot_leases(service)[0]["metadata"]["name"]
        return str(created["metadata"]["uid"])

    def _token(self) -> str:
        account = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{SERVICE}-supervisor"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return str(self.admin.create(f"{account}/token", request)["status"]["token"])

    def slots(self, holder: str, clock: Any = time.monotonic) -> LeaseSlots:
        return LeaseSlots(self.kube, self.namespace, (self.slot,), holder, clock)

    def lease(self) -> dict[str, Any]:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/{self.slot}"
        return self.admin.get(path)


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
    _eventually(lambda: rig.slots("probe").release())  # the role is in force
    yield rig
    rig.admin._call("DELETE", f"/api/v1/namespaces/{rig.namespace}", None, "", {})


def story(name: str = "qwen-0-deadbeef") -> Incident:
    return Incident(
        name=name, kind=Kind.HOST_GROWTH, epoch="ab:1", opened_at=time.time(), phase_since=1.0
    )


def test_one_of_many_supervisors_gets_the_slot(rig: Rig) -> None:
    answers: dict[str, str | None] = {}
    contenders = {f"pod-{number}": rig.slots(f"pod-{number}") for number in range(6)}
    barrier = threading.Barrier(len(contenders))

    def contend(name: str, slots: LeaseSlots) -> None:
        barrier.wait(10)
        answers[name] = slots.take(f"incident-{name}", POLICY)

    threads = [threading.Thread(target=contend, args=item) for item in contenders.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    winners = [name for name, reason in answers.items() if reason is None]
    assert len(winners) == 1, answers
    assert rig.lease()["spec"]["holderIdentity"] == winners[0]
    assert [name for name, slots in contenders.items() if slots.held()] == winners
    contenders[winners[0]].release()
    assert not rig.lease()["spec"].get("holderIdentity")


def test_a_dead_holder_expires_by_the_clock_of_the_one_who_waits(rig: Rig) -> None:
    now = 0.0
    assert rig.slots("dead").take("incident-1", POLICY) is None
    waiting = rig.slots("alive", lambda: now)
    assert "held by dead" in (waiting.take("incident-2", POLICY) or "")
    now = DURATION_S - 1.0
    assert "held by dead" in (waiting.take("incident-2", POLICY) or "")
    now = DURATION_S + 1.0
    assert waiting.take("incident-2", POLICY) is None
    lease = rig.lease()
    assert lease["spec"]["holderIdentity"] == "alive"
    assert lease["spec"]["leaseTransitions"] == 2


def test_a_renewed_slot_does_not_expire(rig: Rig) -> None:
    now = 0.0
    holder, waiting = rig.slots("busy", lambda: now), rig.slots("other", lambda: now)
    assert holder.take("incident-1", POLICY) is None
    for _ in range(5):
        assert waiting.take("incident-2", POLICY) is not None
        now += DURATION_S / 2
        assert holder.held()


def test_the_restarts_of_the_service_outlive_its_pods(rig: Rig) -> None:
    for number in range(POLICY.count):
        slots = rig.slots(f"pod-{number}")
        assert slots.take(f"incident-{number}", POLICY) is None
        assert slots.take(f"incident-{number}", POLICY) is None  # a repetition counts once
        slots.release()
    assert rig.lease()["metadata"]["annotations"][ANNOTATION].count("incident-") == POLICY.count
    assert "2 are allowed" in (rig.slots("pod-9").take("incident-9", POLICY) or "")


def test_an_incident_is_told_with_one_event_a_phase(rig: Rig) -> None:
    publisher = Publisher(rig.kube, rig.service, "qwen-0")
    incident = story()
    for phase in (Phase.OPEN, Phase.OPEN, Phase.TRIMMING, Phase.RESOLVED):
        incident.phase = phase
        if phase is Phase.RESOLVED:
            incident.reason, incident.returned_bytes = Reason.TRIM, 5_000
        publisher.publish(incident)
    found = rig.admin.get(path_of(rig.namespace, incident.name))
    assert found["spec"]["pod"] == "qwen-0"
    assert found["status"]["phase"] == "Resolved"
    assert found["status"]["returnedBytes"] == 5_000
    assert found["metadata"]["ownerReferences"][0]["uid"] == rig.uid
    events = rig.admin.get(f"/api/v1/namespaces/{rig.namespace}/events")["items"]
    assert sorted(event["reason"] for event in events) == ["Open", "Resolved", "Trimming"]


def test_an_api_server_that_is_away_loses_nothing(rig: Rig) -> None:
    """The token is missing at first: nothing can be written until it is there."""
    rig.token.rename(rig.folder / "away")
    publisher = Publisher(rig.kube, rig.service, "qwen-0")
    publisher.start()
    incident = story()
    begin = time.monotonic()
    publisher.offer(1, incident)
    assert time.monotonic() - begin < 0.1
    _eventually(lambda: _check(publisher.failures > 0))
    assert publisher.acknowledged() == []
    assert publisher.backlog == 1
    (rig.folder / "away").rename(rig.token)
    arrived: list[tuple[str, int]] = []
    _eventually(lambda: _check(bool(arrived.extend(publisher.acknowledged()) or arrived)))
    assert arrived == [(incident.name, 1)]
    assert rig.admin.get(path_of(rig.namespace, incident.name))["status"]["phase"] == "Open"
    publisher.stop(5.0)


def test_a_deleted_incident_is_made_anew(rig: Rig) -> None:
    publisher = Publisher(rig.kube, rig.service, "qwen-0")
    incident = story()
    publisher.publish(incident)
    rig.admin._call("DELETE", path_of(rig.namespace, incident.name), None, "", {})
    with pytest.raises(KubeError):
        publisher.publish(incident)
    publisher.publish(incident)
    assert rig.admin.get(path_of(rig.namespace, incident.name))["status"]["phase"] == "Open"


def test_the_last_ready_replica_stays(rig: Rig) -> None:
    path = f"/apis/discovery.k8s.io/v1/namespaces/{rig.namespace}/endpointslices"
    body: dict[str, Any] = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "qwen-1", "labels": {"kubernetes.io/service-name": SERVICE}},
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": [f"10.1.0.{number}"],
                "conditions": {"ready": ready},
                "targetRef": {"kind": "Pod", "name": f"qwen-{number}"},
            }
            for number, ready in ((1, True), (2, False))
        ],
    }
    created = rig.admin.create(path, body)
    first = Endpoints(rig.kube, rig.namespace, SERVICE, "qwen-1")
    assert first.ready() == {"qwen-1": True, "qwen-2": False}
    assert first.is_last_ready()
    assert not first.wait_until_left(0.0)
    created["endpoints"][1]["conditions"]["ready"] = True
    created["endpoints"][0]["conditions"]["ready"] = False
    created = rig.admin.put(f"{path}/qwen-1", created)
    assert not first.is_last_ready()
    assert first.wait_until_left(5.0)
    created["endpoints"] = created["endpoints"][:1]
    rig.admin.put(f"{path}/qwen-1", created)
    assert not first.is_last_ready()  # the only replica may leave


def test_a_missing_permission_is_named(rig: Rig) -> None:
    with pytest.raises(KubeError, match="cannot get resource") as caught:
        rig.kube.get(f"/api/v1/namespaces/{rig.namespace}/pods/x")
    assert caught.value.status == 403
    assert not caught.value.transient


def _check(condition: bool) -> None:
    assert condition
