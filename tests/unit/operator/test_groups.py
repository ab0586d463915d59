"""``render/groups.py``: what a service with replicas on several nodes gets."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import POD_HASH_ANNOTATION, REVISION_LABEL
from plimsoll_api.roles import PodRole
from plimsoll_api.supervision import Mode
from plimsoll_api.supervisor_config import GROUP_ENV, GroupMember, make_member_config
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.revisions import find_suspect_revision, make_replica_pods
from plimsoll_operator.kinds import Ref, make_ref
from plimsoll_operator.plans.service import make_plan, parse_service
from plimsoll_operator.render import Images, make_supervisor_config, render_objects
from plimsoll_operator.render.compare import add_current_replicas
from plimsoll_operator.render.deployment import compute_pod_hash
from plimsoll_operator.render.pod import make_revision_template
from plimsoll_operator.status.service import make_status

IMAGES = Images("engine:1", "supervisor:1")
LEADERS = {"plimsoll.dev/service": "big", "leaderworkerset.sigs.k8s.io/worker-index": "0"}
NOW = "2026-01-01T00:00:00Z"


def service(kind: str = "vllm", **spec: Any) -> InferenceService:
    engine = {"type": kind, "image": "e:1", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
    return parse_service(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "big", "namespace": "ml", "uid": "u", "generation": 1},
            "spec": {
                "model": {"uri": "file:///m"},
                "engine": engine,
                "parallelism": {"tensor": 8, "pipeline": 2},
            }
            | spec,
        }
    )


def objects(wanted: InferenceService, **more: Any) -> dict[str, Any]:
    return {one["kind"]: one for one in render_objects(wanted, IMAGES, **more)}


def group(wanted: InferenceService) -> dict[str, Any]:
    found: dict[str, Any] = objects(wanted)["LeaderWorkerSet"]["spec"]
    return found


def container(template: dict[str, Any], name: str = "engine") -> dict[str, Any]:
    spec = template["spec"]
    every = [*spec["initContainers"], *spec["containers"]]
    found: dict[str, Any] = next(one for one in every if one["name"] == name)
    return found


def words(wanted: InferenceService, place: str) -> list[str]:
    found: list[str] = container(group(wanted)["leaderWorkerTemplate"][place])["command"]
    return found


def test_each_replica_is_a_group_of_as_many_pods_as_nodes() -> None:
    made = objects(service(replicas=3))
    assert "Deployment" not in made
    found = made["LeaderWorkerSet"]
    assert found["metadata"]["name"] == "big-lws"
    assert found["metadata"]["ownerReferences"][0]["uid"] == "u"
    assert found["spec"]["replicas"] == 3
    assert found["spec"]["leaderWorkerTemplate"]["size"] == 2
    policy = found["spec"]["leaderWorkerTemplate"]["restartPolicy"]
    assert policy == "RecreateGroupOnPodRestart"
    for place in ("leaderTemplate", "workerTemplate"):
        template = found["spec"]["leaderWorkerTemplate"][place]
        assert (
            template["metadata"]["labels"][REVISION_LABEL]
            == found["metadata"]["annotations"][POD_HASH_ANNOTATION]
        )
        assert [one["name"] for one in template["spec"]["initContainers"]] == ["supervisor"]


def test_vllm_joins_its_nodes_without_ray() -> None:
    leader, worker = (words(service(), place) for place in ("leaderTemplate", "workerTemplate"))
    for one in (leader, worker):
        assert one[:3] == ["vllm", "serve", "/m"]
        assert {
            "--tensor-parallel-size=8",
            "--pipeline-parallel-size=2",
            "--distributed-executor-backend=mp",
            "--nnodes=$(LWS_GROUP_SIZE)",
            "--node-rank=$(LWS_WORKER_INDEX)",
            "--master-addr=$(LWS_LEADER_ADDRESS)",
        } <= set(one)
    assert set(worker) - set(leader) == {"--headless"}


def test_sglang_joins_its_nodes() -> None:
    sglang = service("sglang")
    leader, worker = (words(sglang, place) for place in ("leaderTemplate", "workerTemplate"))
    assert leader == worker
    assert {
        "--tp-size=8",
        "--pp-size=2",
        "--nnodes=$(LWS_GROUP_SIZE)",
        "--node-rank=$(LWS_WORKER_INDEX)",
        "--dist-init-addr=$(LWS_LEADER_ADDRESS):20000",
    } <= set(leader)


def test_on_one_node_the_sizes_are_arguments_of_a_deployment() -> None:
    made = objects(service(parallelism={"tensor": 8}))
    assert "LeaderWorkerSet" not in made
    command = container(made["Deployment"]["spec"]["template"])["command"]
    assert "--tensor-parallel-size=8" in command
    assert not [one for one in command if one.startswith(("--nnodes", "--master"))]


def test_only_the_leader_is_asked_and_serves() -> None:
    made = objects(service(service={"headless": True}, gateway=GATEWAY))
    template = made["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    leader, worker = (container(template[one]) for one in ("leaderTemplate", "workerTemplate"))
    assert {"ports", "startupProbe", "readinessProbe", "livenessProbe"} <= leader.keys()
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & worker.keys()
    every = render_objects(service(service={"headless": True}), IMAGES)
    selectors = [one["spec"]["selector"] for one in every if one["kind"] == "Service"]
    assert selectors == [LEADERS, LEADERS]
    assert made["InferencePool"]["spec"]["selector"]["matchLabels"] == LEADERS
    inside = made["NetworkPolicy"]["spec"]["ingress"][-1]
    assert inside == {"from": [{"podSelector": {"matchLabels": {"plimsoll.dev/service": "big"}}}]}


GATEWAY = {"parentRefs": [{"name": "inference"}], "endpointPicker": {"name": "epp"}}


def test_each_supervisor_knows_its_place() -> None:
    template = group(service())["leaderWorkerTemplate"]
    for place, is_worker in (("leaderTemplate", False), ("workerTemplate", True)):
        env = {one["name"]: one for one in container(template[place], "supervisor")["env"]}
        names = list(env)
        assert names.index("PLIMSOLL_GROUP_KEY") < names.index(GROUP_ENV), "to be expanded"
        expanded = env[GROUP_ENV]["value"].replace("$(PLIMSOLL_GROUP_KEY)", "f00")
        assert json.loads(expanded) == {"index": "f00", "worker": is_worker, "subdomain": "big-lws"}


def test_a_worker_observes_and_its_leader_acts() -> None:
    config = make_supervisor_config(service(supervision={"mode": "Recover"}))
    leader = make_member_config(config, GroupMember("k", False, "big-lws"))
    worker = make_member_config(config, GroupMember("k", True, "big-lws"))
    assert (leader.supervision.mode, leader.slots) == (Mode.RECOVER, ("big-restart-0",))
    assert (worker.supervision.mode, worker.slots) == (Mode.OBSERVE, ())
    assert (leader.engine.serves, worker.engine.serves) == (True, False)
    assert (leader.service.role, worker.service.role) == (PodRole.LEADER, PodRole.WORKER)


@pytest.mark.parametrize(
    ("rollout", "replicas", "limits"),
    [
        ({}, 1, (0, 1)),
        ({"maxSurge": "150%"}, 2, ("100%", 1)),
        ({"maxSurge": 0, "maxUnavailable": "50%"}, 1, (0, 1)),
        ({"maxSurge": 0, "maxUnavailable": "50%"}, 8, (0, 4)),
        ({"maxSurge": 1, "maxUnavailable": 0}, 2, (1, 0)),
    ],
)
def test_a_rollout_replaces_whole_groups(
    rollout: dict[str, Any], replicas: int, limits: tuple[int | str, int | str]
) -> None:
    made = group(service(rollout=rollout, replicas=replicas))
    found = made["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert (found["maxSurge"], found["maxUnavailable"]) == limits
    assert found["partition"] == 0


def test_a_paused_rollout_updates_no_further_group() -> None:
    found = objects(service(replicas=1000), paused=True)["LeaderWorkerSet"]["spec"]
    assert found["rolloutStrategy"]["rollingUpdateConfiguration"]["partition"] >= 1000


@pytest.mark.parametrize(("missing", "pods"), [(None, 1), (3, 5), ("50%", "50%"), (0, 0)])
def test_an_eviction_waits_for_the_group_of_the_one_before(
    missing: int | str | None, pods: int | str
) -> None:
    wanted = {} if missing is None else {"maxUnavailable": missing}
    budget = objects(service(disruption=wanted))["PodDisruptionBudget"]
    assert budget["spec"]["maxUnavailable"] == pods


def test_an_autoscaler_sets_the_number_of_groups() -> None:
    scaling = {"maxReplicas": 4, "target": {"cpuPercent": 60}}
    wanted = service(autoscaling=scaling, replicas=2)
    made = objects(wanted)
    target = made["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("LeaderWorkerSet", "big-lws")
    found = made["LeaderWorkerSet"]
    assert "replicas" not in found["spec"]
    assert add_current_replicas(found, None, 2)["spec"]["replicas"] == 2


def test_parallelism_changes_the_revision_and_its_absence_does_not() -> None:
    sizes = ({"tensor": 8}, {"tensor": 8, "pipeline": 2}, {"tensor": 16})
    assert len({compute_pod_hash(service(parallelism=one)) for one in (*sizes, None)}) == 4


def revision(wanted: InferenceService) -> dict[str, Any]:
    made = next(
        one for one in render_objects(wanted, IMAGES) if one["kind"] == "ControllerRevision"
    )
    made["metadata"]["uid"] = "r"
    return made


def test_a_revision_of_a_deployment_is_none_to_roll_back_to() -> None:
    single, bad = service(parallelism={"tensor": 8}), service(rollout={"revision": "LastGood"})
    before = {
        "revisions": {"good": [compute_pod_hash(single)], "current": compute_pod_hash(single)}
    }
    owned = {make_ref(one): one for one in (revision(single), revision(bad))}
    plan = make_plan(bad, owned, [], [], IMAGES, before)
    assert plan.decision.revision == compute_pod_hash(bad)
    workload = next(one for one in plan.desired if one["kind"] == "LeaderWorkerSet")
    assert workload["spec"]["leaderWorkerTemplate"] == make_revision_template(bad, IMAGES)


def test_the_workload_of_the_other_number_of_nodes_is_removed() -> None:
    (old,) = (
        one
        for one in render_objects(service(parallelism={"tensor": 8}), IMAGES)
        if one["kind"] == "Deployment"
    )
    plan = make_plan(service(), {make_ref(old): old}, [], [], IMAGES)
    assert plan.surplus == [old]
    assert Ref("LeaderWorkerSet", "big-lws") in {make_ref(one) for one in plan.desired}


def pod(index: int, worker: int = 0) -> PodView:
    labels = {
        "leaderworkerset.sigs.k8s.io/group-key": f"key-{index}",
        "leaderworkerset.sigs.k8s.io/worker-index": str(worker),
        REVISION_LABEL: "r1",
    }
    name = f"big-lws-{index}" + (f"-{worker}" if worker else "")
    meta = {"name": name, "uid": name, "creationTimestamp": NOW, "labels": labels}
    return PodView.parse({"metadata": meta, "spec": {}, "status": {}})


def test_replicas_are_counted_by_group() -> None:
    pods = [pod(index, worker) for index in (0, 1, 2) for worker in (0, 1)]
    leaks = [
        {
            "metadata": {"name": f"leak-{index}", "creationTimestamp": NOW},
            "spec": {"pod": f"big-lws-{index}", "kind": "HostGrowth", "openedAt": NOW},
            "status": {"phase": "Confirmed"},
        }
        for index in (0, 1)
    ]
    found = find_suspect_revision("r1", make_replica_pods(pods), leaks)
    assert found is not None
    assert (found.leaking, found.replicas) == (2, 3)


def test_the_status_counts_ready_groups() -> None:
    wanted = service(replicas=3)
    live = objects(wanted)["LeaderWorkerSet"]
    live["metadata"]["generation"] = 1
    live["status"] = {
        "observedGeneration": 1,
        "replicas": 3,
        "readyReplicas": 2,
        "updatedReplicas": 3,
    }
    item = {"metadata": {"name": "big", "generation": 1}}
    made = make_status(item, wanted, live, [], [], {}, None, NOW)
    assert (made["replicas"], made["readyReplicas"], made["desiredReplicas"]) == (3, 2, 3)
    assert made["selector"] == ",".join(f"{key}={value}" for key, value in LEADERS.items())
    ready = next(one for one in made["conditions"] if one["type"] == "Ready")
    assert (ready["status"], ready["message"]) == ("True", "2 of 3 replicas are ready")


def test_a_worker_older_than_its_leader_is_named_once_its_group_is_not_ready() -> None:
    wanted = service(replicas=3)
    live = objects(wanted)["LeaderWorkerSet"]
    live["metadata"]["generation"] = 1
    counts = {"replicas": 3, "updatedReplicas": 3, "observedGeneration": 1}
    item = {"metadata": {"name": "big", "generation": 1}}
    pods = [pod(index, worker) for index in (0, 1, 2) for worker in (0, 1)]
    pods[2] = replace(pods[2], created="2026-01-01T00:00:30Z")  # the leader of the second group

    def progress(ready: int, now: str) -> tuple[str, str]:
        live["status"] = counts | {"readyReplicas": ready}
        made = make_status(item, wanted, live, pods, [], {}, None, now)
        by_type = {one["type"]: one for one in made["conditions"]}
        return by_type["Ready"]["reason"], by_type["Progressing"]["message"]

    reason, message = progress(0, "2026-01-01T00:02:30Z")
    assert reason == "PodLeftOver"
    assert "big-lws-1-1" in message
    assert "big-lws-0-1" not in message
    assert "big-lws-1-1" in progress(2, "2026-01-01T00:02:30Z")[1], "Ready is still True"
    assert "big-lws-1-1" not in progress(2, "2026-01-01T00:02:29Z")[1], "the leader is new"
    assert progress(3, "2026-01-01T00:02:30Z")[1] == "3 of 3 replicas are ready"
