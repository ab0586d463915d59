"""The whole reconcile of a service against an API server in memory, its controllers played.

Tests ``plimsoll_operator/controllers/inference_service.py``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from plimsoll_api.times import format_rfc3339
from plimsoll_operator.config import Config
from plimsoll_operator.controllers.inference_service import InferenceServiceController
from plimsoll_operator.controllers.writes import NameConflictError
from plimsoll_operator.kinds import OPTIONAL_KINDS, SERVICE, Key, Object
from plimsoll_operator.render import Images
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import ApiError
from plimsoll_operator.scraper import Scraper
from tests.api_cases import MAP, made
from tests.fake_api import Answer, FakeApi

if TYPE_CHECKING:
    from tests.lab.definitions import Definitions

ROOT = Path(__file__).parents[4]
KEY = Key("ns", "tiny")
SELECTOR = {"plimsoll.dev/service": "tiny"}
TURNS = 12
"""A service is at rest after a few reconciles, each of which sees what the last one wrote."""


class Cluster:
    """One service, the operator's controller, and a Deployment's controller and kubelet to play."""

    def __init__(self, definitions: Definitions) -> None:
        self.manifest: Object = yaml.safe_load((ROOT / "examples/tiny.yaml").read_text())
        self.manifest["metadata"]["namespace"] = KEY.namespace
        self.spec: Object = self.manifest["spec"]
        self.api, self.store = FakeApi(definitions), Store()
        self.api.lacking = {kind.kind for kind in OPTIONAL_KINDS}
        self.api.changed = lambda item, gone: (self.store.remove if gone else self.store.put)(item)
        self.seconds = 0
        self.served: set[str] = set()
        self.later: list[float] = []
        self.controller = self.operator()

    def operator(self) -> InferenceServiceController:
        """One that has just started, and knows what the store knows."""
        return InferenceServiceController(
            self.api,
            self.store,
            Scraper(self.store, lambda _: None),
            Config(images=Images("engine:1", "supervisor:1")),
            self.served,
            lambda _, after: self.later.append(after),
            self.now,
        )

    def now(self) -> str:
        self.seconds += 1
        return format_rfc3339(1_767_225_600 + self.seconds)

    def apply(self) -> None:
        """What a person does with the manifest."""
        asyncio.run(self.api.apply(SERVICE, self.manifest, manager="kubectl"))

    def reconcile(self) -> Exception | None:
        """Reconcile until nothing more is written; return the last turn's error, which repeats."""
        error: Exception | None = None
        for _ in range(TURNS):
            before = self.api._version
            try:
                asyncio.run(self.controller.handle(KEY))
                error = None
            except (ApiError, NameConflictError) as problem:
                error = problem
            if self.api._version == before:
                return error
        raise AssertionError(f"not at rest after {TURNS} reconciles; last: {error}")

    def roll_out(self) -> None:
        """As the Deployment's controller and a kubelet: all replicas are there and ready."""
        item = self.api.found("Deployment", "tiny")
        assert item is not None
        count, generation = item["spec"]["replicas"], item["metadata"]["generation"]
        counts = ("replicas", "readyReplicas", "updatedReplicas", "availableReplicas")
        complete = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
        item["status"] = dict.fromkeys(counts, count) | {
            "observedGeneration": generation, "conditions": [complete],
        }  # fmt: skip
        self.api.put(item)
        template = item["spec"]["template"]
        meta = {
            "name": f"tiny-{generation}", "namespace": KEY.namespace,
            "labels": template["metadata"]["labels"],
            "annotations": template["metadata"].get("annotations", {}),
        }  # fmt: skip
        for old in self.pods():
            self.api._remove(("pods", KEY.namespace, old["metadata"]["name"]))
        spec = template["spec"]
        running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        statuses = {
            part: [
                {"name": one["name"], "ready": True, "started": True, "restartCount": 0,
                 "image": "x", "imageID": "x", "state": running}
                for one in spec[containers]
            ]
            for part, containers in (
                ("containerStatuses", "containers"), ("initContainerStatuses", "initContainers"),
            )
        }  # fmt: skip
        status = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            **statuses,
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": status}
        self.api.put(pod)
        self.reconcile()

    def pods(self) -> list[Object]:
        return [
            p for p in self.api.all("Pod") if p["metadata"]["labels"].items() >= SELECTOR.items()
        ]

    def conditions(self) -> dict[str, Any]:
        item = self.api.found("InferenceService", "tiny")
        assert item is not None
        return {one["type"]: one for one in item["status"]["conditions"]}

    def events(self, reason: str) -> list[Object]:
        return [one for one in self.api.all("Event") if one["reason"] == reason]

    def arguments(self) -> str:
        item = self.api.found("Deployment", "tiny")
        assert item is not None
        return str(item["spec"]["template"]["spec"]["containers"][0]["command"])


@pytest.fixture
def cluster(definitions: Definitions) -> Cluster:
    return Cluster(definitions)


def test_a_service_is_made_serves_and_is_at_rest(cluster: Cluster) -> None:
    cluster.apply()
    assert cluster.reconcile() is None
    kinds = {item["kind"] for item in cluster.api.all()}
    assert {"Deployment", "Service", "ConfigMap", "Role", "RoleBinding", "Lease"} <= kinds
    assert cluster.conditions()["Ready"]["status"] == "False"
    cluster.roll_out()
    (pod,) = cluster.pods()
    for one in (*pod["spec"]["containers"], *pod["spec"]["initContainers"]):
        assert one["terminationMessagePolicy"] == "FallbackToLogsOnError", "its log's end is kept"
    assert cluster.conditions()["Ready"]["status"] == "True"
    assert cluster.conditions()["Reconciling"]["status"] == "False"
    writes = cluster.api.writes.copy()
    cluster.controller = cluster.operator()
    assert cluster.reconcile() is None
    assert cluster.api.writes == writes, "the next operator finds all as it should be"


def test_a_roll_out_is_told_in_events_and_stays_ready(cluster: Cluster) -> None:
    cluster.apply()
    cluster.reconcile()
    cluster.roll_out()
    since = cluster.conditions()["Ready"]["lastTransitionTime"]
    assert cluster.events("RolloutStarted") == [], "creating a service is no rollout"
    assert len(cluster.events("RolloutFinished")) == 1
    cluster.spec["restart"] = {"id": "on Sunday"}
    cluster.apply()
    cluster.reconcile()
    assert cluster.conditions()["Reconciling"]["status"] == "True"
    assert cluster.conditions()["Ready"]["status"] == "True"
    cluster.roll_out()
    ready = cluster.conditions()["Ready"]
    assert (ready["status"], ready["lastTransitionTime"]) == ("True", since), "it never changed"
    assert len(cluster.events("RolloutStarted")) == 1
    (asked,) = cluster.events("RestartRequested")
    assert "'on Sunday'" in asked["message"]
    assert asked["source"]["component"] == "plimsoll-operator"


def test_a_spec_that_changes_during_a_reconcile_is_not_observed_yet(cluster: Cluster) -> None:
    cluster.apply()
    cluster.reconcile()
    cluster.roll_out()

    def change(method: str, kind: str, name: str) -> None:
        if (method, kind) == ("PATCH", "Deployment"):
            cluster.api.refuse = lambda *_: None
            item = cluster.api.found("InferenceService", "tiny")
            assert item is not None
            item["spec"]["restart"] = {"id": "meanwhile"}
            cluster.api.put(item)

    cluster.api.refuse = change
    cluster.spec["replicas"] = 2
    cluster.apply()
    asyncio.run(cluster.controller.handle(KEY))
    item = cluster.api.found("InferenceService", "tiny")
    assert item is not None
    seen = item["metadata"]["generation"] - 1
    assert item["status"]["observedGeneration"] == seen
    assert cluster.conditions()["Ready"]["observedGeneration"] == seen
    cluster.reconcile()
    item = cluster.api.found("InferenceService", "tiny")
    assert item is not None
    assert item["status"]["observedGeneration"] == item["metadata"]["generation"]


def test_a_spec_that_changes_during_a_roll_back_does_not_bring_the_bad_one_back(
    cluster: Cluster,
) -> None:
    cluster.apply()
    cluster.reconcile()
    cluster.roll_out()
    good, args = cluster.arguments(), cluster.spec["engine"]["args"]
    cluster.spec["engine"]["args"] = [*args, "--max-num-seqs=6"]
    cluster.apply()
    cluster.reconcile()
    assert "--max-num-seqs=6" in cluster.arguments()
    cluster.roll_out()

    cluster.spec["rollout"] = {"revision": "LastGood"}
    cluster.apply()
    cluster.reconcile()
    assert cluster.arguments() == good
    # The pods of the roll-back are not ready yet.
    cluster.spec["engine"]["args"] = [*args, "--max-num-seqs=7"]
    cluster.apply()
    cluster.reconcile()
    assert cluster.arguments() == good
    cluster.roll_out()
    assert cluster.arguments() == good
    assert cluster.conditions()["Progressing"]["reason"] == "RolledBackOnRequest"
    (begun,) = cluster.events("RollbackStarted")
    assert begun["type"] == "Normal"
    assert cluster.events("RollbackFinished")

    cluster.spec["rollout"] = {"revision": "Spec"}
    cluster.apply()
    cluster.reconcile()
    assert "--max-num-seqs=7" in cluster.arguments()


def test_a_refusal_is_told_in_the_servers_words_until_it_has_passed(cluster: Cluster) -> None:
    said = "pods are forbidden: exceeded quota"

    def refuse(method: str, kind: str, name: str) -> None:
        if (method, kind) == ("PATCH", "Deployment"):
            raise Answer(403, "Forbidden", said)

    cluster.api.refuse = refuse
    cluster.apply()
    assert isinstance(cluster.reconcile(), ApiError), "it is tried again"
    for type_, wanted in (("Ready", "False"), ("Stalled", "True")):
        found = cluster.conditions()[type_]
        assert found["status"] == wanted
    assert cluster.conditions()["Ready"]["reason"] == "ApplyFailed"
    assert said in cluster.conditions()["Ready"]["message"]
    (refused,) = cluster.events("ApplyFailed")
    assert (refused["type"], said in refused["message"]) == ("Warning", True)
    cluster.api.refuse = lambda *_: None
    assert cluster.reconcile() is None
    cluster.roll_out()
    assert cluster.conditions()["Ready"]["status"] == "True"
    assert cluster.conditions()["Stalled"]["status"] == "False"


@pytest.mark.parametrize("refused", ["by the operator", "by the server"])
def test_a_pod_is_replaced_while_a_later_spec_cannot_be_applied(
    cluster: Cluster, refused: str
) -> None:
    cluster.apply()
    cluster.reconcile()
    cluster.roll_out()

    def refuse(method: str, kind: str, name: str) -> None:
        if (method, kind) == ("PATCH", "Deployment"):
            raise Answer(403, "Forbidden", "exceeded quota")

    if refused == "by the server":
        cluster.spec["replicas"] = 2
        cluster.api.refuse = refuse
    else:
        cluster.spec["podTemplate"] = {"spec": {"hostNetwork": True}}
    cluster.apply()
    cluster.reconcile()
    assert cluster.conditions()["Stalled"]["status"] == "True"
    (pod,) = cluster.pods()
    step = {"time": "2026-01-01T00:00:00Z", "step": "PodReplace", "outcome": "Requested"}
    cluster.api.put(
        made("LeakIncident", KEY.namespace, pod["metadata"]["name"] + "-0")
        | {
            "spec": {
                "id": "a", "workloadRef": {"kind": "InferenceService", "name": "tiny"},
                "pod": pod["metadata"]["name"], "container": "engine", "epoch": "b:1",
                "openedAt": "2026-01-01T00:00:00Z", "kind": "HostGrowth",
            },
            "status": {"phase": "Restarting", "timeline": [step]},
        }
    )  # fmt: skip
    cluster.reconcile()
    assert cluster.pods() == []


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"spec": "none"}, "spec.podTemplate: a field has a type that is not valid"),
        ({"spec": {"hostNetwork": True}}, "spec.podTemplate.spec.hostNetwork"),
    ],
)
def test_a_pod_template_that_cannot_be_stalls_the_service_until_it_is_gone(
    cluster: Cluster, template: Object, message: str
) -> None:
    cluster.spec["podTemplate"] = template
    cluster.apply()
    assert cluster.reconcile() is None
    ready = cluster.conditions()["Ready"]
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    assert message in ready["message"]
    assert cluster.conditions()["Stalled"]["status"] == "True"
    assert cluster.api.found("Deployment", "tiny") is None
    del cluster.spec["podTemplate"]
    cluster.apply()
    assert cluster.reconcile() is None
    assert cluster.api.found("Deployment", "tiny")
    assert cluster.conditions()["Stalled"]["status"] == "False"


def test_somebody_elses_object_is_not_taken_over(cluster: Cluster) -> None:
    theirs = made("ConfigMap", KEY.namespace, "tiny-supervisor", data={"theirs": "yes"})
    del theirs["metadata"]["labels"]
    asyncio.run(cluster.api.apply(MAP, theirs, manager="somebody"))
    cluster.apply()
    assert isinstance(cluster.reconcile(), NameConflictError)
    ready = cluster.conditions()["Ready"]
    assert (ready["reason"], "tiny-supervisor" in ready["message"]) == ("NameConflict", True)
    found = cluster.api.found("ConfigMap", "tiny-supervisor")
    assert found is not None
    assert found["data"] == {"theirs": "yes"}


def test_what_somebody_deletes_or_changes_comes_back(cluster: Cluster) -> None:
    cluster.apply()
    cluster.reconcile()
    cluster.api._remove(("services", KEY.namespace, "tiny"))
    edited = made("ConfigMap", KEY.namespace, "tiny-supervisor", data={"supervisor.json": "{}"})
    asyncio.run(cluster.api.apply(MAP, edited, manager="somebody"))
    assert cluster.reconcile() is None
    assert cluster.api.found("Service", "tiny")
    assert cluster.api.found("ConfigMap", "tiny-supervisor")["data"] != {"supervisor.json": "{}"}  # type: ignore[index]


def test_a_server_without_patience_left_is_an_error_and_nothing_is_half_said(
    cluster: Cluster,
) -> None:
    cluster.apply()
    cluster.api.busy = 3
    with pytest.raises(ApiError, match="429"):
        asyncio.run(cluster.controller.handle(KEY))
    item = cluster.api.found("InferenceService", "tiny")
    assert item is not None
    assert "status" not in item
    assert cluster.reconcile() is None


def test_a_deleted_service_takes_everything_along(cluster: Cluster) -> None:
    cluster.apply()
    cluster.reconcile()
    cluster.roll_out()
    item = cluster.api.found("InferenceService", "tiny")
    assert item is not None
    asyncio.run(cluster.api.delete(SERVICE, item))
    assert cluster.reconcile() is None
    left = {one["kind"] for one in cluster.api.all()} - {"Event", "Pod"}
    assert left == set()


@pytest.mark.parametrize(
    ("modes", "surge"),
    [
        (["ReadWriteOnce"], 0),
        (["ReadWriteOncePod"], 0),
        (["ReadWriteMany"], 1),
        (["ReadOnlyMany"], 1),
        (["ReadWriteOnce", "ReadOnlyMany"], 0),
        (None, 0),
    ],
)
def test_a_roll_out_follows_who_may_mount_the_claim(
    cluster: Cluster, modes: list[str] | None, surge: int
) -> None:
    cluster.spec["model"] = {"uri": "hf://org/model", "cache": {"claimName": "models"}}
    if modes is not None:
        meta = {"name": "models", "namespace": KEY.namespace}
        cluster.api.put({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta,
            "spec": {"accessModes": modes},
        })  # fmt: skip
    cluster.apply()
    assert cluster.reconcile() is None
    made = cluster.api.found("Deployment", "tiny") or {}
    assert made["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == surge
    requests = cluster.api.requests
    assert cluster.reconcile() is None
    assert cluster.api.requests - requests <= (modes is None), "its modes are known by now"


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (
            {"podTemplate": {"spec": {"containers": [{
                "name": "engine",
                "lifecycle": {"preStop": {"exec": {"command": ["kill", "1"]}}},
            }]}}},
            "containers[engine].lifecycle.preStop.exec.command names process 1",
        ),
        (
            {"engine": {"type": "custom", "image": "lscr.io/linuxserver/whisper:1"}},
            "containers[engine].image must be process 1",
        ),
    ],
)  # fmt: skip
def test_a_service_in_which_process_1_matters_is_refused_unless_it_runs(
    cluster: Cluster, spec: Object, named: str
) -> None:
    cluster.apply()
    assert cluster.reconcile() is None
    before = cluster.api.found("Deployment", "tiny")
    cluster.spec.update(spec)
    cluster.apply()
    cluster.reconcile()
    item = cluster.api.found("InferenceService", "tiny") or {}
    (stalled,) = [one for one in item["status"]["conditions"] if one["type"] == "Stalled"]
    assert stalled["status"] == "True"
    assert stalled["message"].startswith(f"the pod's {named}")
    assert cluster.api.found("Deployment", "tiny") == before
