"""A policy's pods: what is added, what is refused, and pods at random.

Tests ``injection/policy.py`` and ``injection/ray.py``.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from plimsoll_api.engines import EngineType
from plimsoll_api.names import (
    METRICS_PORT,
    POLICY_LABEL,
    PROBE_PORT,
    REFUSED_ANNOTATION,
    ROLE_LABEL,
)
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervision_policy_status import MAX_STATUS_REASON_CHARS
from plimsoll_api.supervisor_config import POD_ENGINE_ENV
from plimsoll_api.workloads import LWS_NAME_LABEL, make_ray_service_name
from plimsoll_operator.fleet import selected_pods
from plimsoll_operator.injection.policy import (
    ALLOW_GROUP_RESTARTS_ANNOTATION,
    ALLOW_HOST_PORTS_ANNOTATION,
    ENGINE_ANNOTATION,
    AdmittedPod,
    inject_pod,
)
from plimsoll_operator.render.containers import Images
from plimsoll_operator.render.paths import HOST_PORTS
from plimsoll_operator.scraper import find_address
from tests.pod_specs import SELECTED, pods, policies, policy, without_supervisor

IMAGES = Images("engine:1", "supervisor:1")
Object = dict[str, Any]


def vllm(**fields: Any) -> Object:
    return {"name": "engine", "image": "vllm/vllm-openai:v0.24.0"} | fields


def pod(*containers: Object, labels: Object | None = None, **spec: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "vllm-", "labels": SELECTED | (labels or {})},
        "spec": {"containers": list(containers or (vllm(),))} | spec,
    }


def supervisor(admitted: AdmittedPod) -> Object:
    assert admitted.refusal is None, admitted.refusal
    found: Object = admitted.pod["spec"]["initContainers"][-1]
    return found


def engine_of(admitted: AdmittedPod) -> Object:
    (text,) = [one["value"] for one in supervisor(admitted)["env"] if one["name"] == POD_ENGINE_ENV]
    found: Object = json.loads(text.replace("$$", "$"))
    return found


def test_an_engine_gets_its_supervisor_and_the_supervisor_its_engine() -> None:
    owner = {"kind": "ReplicaSet", "name": "vllm-7f9c", "controller": True}
    given = pod(
        vllm(args=["--port=9000", "--model", "m"], resources={"limits": {"memory": "20Gi"}}),
        labels={"pod-template-hash": "7f9c"},
    )
    given["metadata"]["ownerReferences"] = [owner]
    before = copy.deepcopy(given)
    made = inject_pod(given, policy(), IMAGES)
    assert given == before, "the argument is not changed"
    assert engine_of(made) == {
        "engine": {
            "admin_url": "http://127.0.0.1:9000",
            "container": "engine",
            "model": "m",
            "serves": True,
            "serving_url": "http://127.0.0.1:9000",
            "type": "vllm",
            "version": "",
        },
        "memory_limit_bytes": 20 << 30,
        "workload": {"api_group": "apps", "kind": "Deployment", "name": "vllm"},
    }
    assert made.pod["metadata"]["labels"][POLICY_LABEL] == "fuzz"
    volumes = {one["name"]: one for one in made.pod["spec"]["volumes"]}
    assert volumes["plimsoll-config"]["configMap"] == {"name": "fuzz.policy", "optional": True}
    mounts = {one["name"]: one["mountPath"] for one in supervisor(made)["volumeMounts"]}
    assert mounts["plimsoll-token"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert set(mounts) <= set(volumes)


def test_an_engine_that_is_a_native_sidecar_starts_after_its_supervisor() -> None:
    inits = [{"name": "fetch", "image": "x"}, vllm(restartPolicy="Always")]
    given = pod({"name": "task", "image": "x"}, initContainers=inits, restartPolicy="Never")
    made = inject_pod(given, policy(), IMAGES)
    assert made.refusal is None
    names = [one["name"] for one in made.pod["spec"]["initContainers"]]
    assert names == ["fetch", "supervisor", "engine"]
    (text,) = [
        one["value"]
        for one in made.pod["spec"]["initContainers"][1]["env"]
        if one["name"] == POD_ENGINE_ENV
    ]
    found = json.loads(text)
    assert found["engine"]["container"] == "engine"
    assert found.get("restarts", True), "the kubelet restarts a native sidecar in any pod"
    assert inject_pod(made.pod, policy(), IMAGES).pod == made.pod
    given["spec"]["containers"] = None
    assert inject_pod(given, policy(), IMAGES).refusal is None, (
        "what the API server says of it is its own"
    )


def test_two_engines_on_one_nodes_network_have_supervisors_at_different_ports() -> None:
    """The engines' own ports differ there, and the supervisors' follow from them."""
    taken: set[int] = set()
    for port in (80, 4000, 5000, 8000, 8001, 8080, 9000, 10_000, 12_000, 23_333, 30_000, 30_001):
        made = inject_pod(pod(vllm(args=[f"--port={port}"]), hostNetwork=True), policy(), IMAGES)
        one = supervisor(made)
        ports = [each["containerPort"] for each in one["ports"]]
        assert taken.isdisjoint(ports)
        taken.update(ports)
        assert f"--metrics-port={ports[0]}" in one["command"]
        assert f"--probe-port={ports[1]}" in one["command"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert one[probe]["httpGet"]["port"] == ports[1]
        assert ports[0] in HOST_PORTS
        pages = made.pod | {"status": {"phase": "Running", "podIP": "10.0.0.7"}}
        assert find_address(pages) == f"10.0.0.7:{ports[0]}"


def test_a_group_on_the_nodes_network_is_supervised_with_consent() -> None:
    """Its pods ask each other at one port, so the scheduler finds no node for a second one."""
    given = pod(hostNetwork=True)
    given["metadata"]["labels"] = given["metadata"]["labels"] | {LWS_NAME_LABEL: "llm"}
    given["metadata"]["annotations"] = {
        ALLOW_HOST_PORTS_ANNOTATION: "true",
        ALLOW_GROUP_RESTARTS_ANNOTATION: "true",
    }
    ports = [
        one["containerPort"] for one in supervisor(inject_pod(given, policy(), IMAGES))["ports"]
    ]
    assert ports == [METRICS_PORT, PROBE_PORT]
    del given["metadata"]["annotations"][ALLOW_HOST_PORTS_ANNOTATION]
    refused = inject_pod(given, policy(), IMAGES).refusal
    assert "set the annotation plimsoll.dev/allow-host-ports to true" in (refused or "")


@pytest.mark.parametrize(
    ("annotations", "resources", "spec", "shared"),
    [
        ({}, {"limits": {"nvidia.com/gpu": 1}}, {}, False),
        ({"gpu-fraction": "0.5"}, {}, {}, True),
        ({"gpu-memory": "2000"}, {}, {}, True),
        ({}, {"limits": {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}}, {}, True),
        ({}, {"requests": {"nvidia.com/gpu.shared": 1}}, {}, True),
        ({}, {}, {"nodeSelector": {"cloud.google.com/gke-gpu-sharing-strategy": "mps"}}, True),
        ({}, {"claims": [{"name": "g"}]}, {"resourceClaimName": "card"}, True),
        ({}, {"claims": [{"name": "g"}]}, {"resourceClaimTemplateName": "one"}, False),
    ],
)
def test_a_policys_supervisor_knows_that_others_use_the_device(
    annotations: Object, resources: Object, spec: Object, shared: bool
) -> None:
    claim = {key: spec[key] for key in spec if key.startswith("resourceClaim")}
    more = {"resourceClaims": [{"name": "g", **claim}]} if claim else spec
    made = pod(vllm(resources=resources), **more)
    made["metadata"]["annotations"] = annotations
    assert engine_of(inject_pod(made, policy(), IMAGES)).get("shared_device", False) is shared


def test_a_dollar_in_a_models_name_is_no_reference_to_a_variable() -> None:
    made = inject_pod(pod(vllm(args=["--model", "org/$(a b)"])), policy(), IMAGES)
    assert engine_of(made)["engine"]["model"] == "org/$(a b)"
    (text,) = [one["value"] for one in supervisor(made)["env"] if one["name"] == POD_ENGINE_ENV]
    assert "$$(a b)" in text


def test_the_pod_says_what_was_taken_for_its_engine_and_the_status_shows_it() -> None:
    made = inject_pod(pod(vllm(args=["--port", "8001"])), policy(), IMAGES).pod
    said = "vllm in container engine, recognized by its image vllm-openai, port 8001 from --port"
    assert made["metadata"]["annotations"][ENGINE_ANNOTATION] == said
    made["metadata"]["name"] = "x-1"
    assert selected_pods.summarize_pod(made, policy(), ["fuzz"], IMAGES).engine == said
    made["metadata"]["annotations"][ENGINE_ANNOTATION] = "x" * 4096
    found = selected_pods.summarize_pod(made, policy(), ["fuzz"], IMAGES)
    assert len(found.engine) <= MAX_STATUS_REASON_CHARS


def test_the_policy_says_the_engine_where_the_pod_does_not() -> None:
    router = {"name": "router", "image": "router:1"}
    wanted = policy(engine={"type": "custom", "port": 18_000})
    found = engine_of(inject_pod(pod(router), wanted, IMAGES))["engine"]
    assert found["type"] == EngineType.CUSTOM.value
    assert found["serving_url"] == "http://127.0.0.1:18000"
    named = policy(engine={"type": "vllm", "container": "b"})
    made = inject_pod(pod({"name": "a", "image": "x"}, {"name": "b", "image": "y"}), named, IMAGES)
    assert engine_of(made)["engine"]["container"] == "b"
    assert engine_of(made)["engine"]["type"] == "vllm"


@pytest.mark.parametrize(
    ("refused", "spec", "reason"),
    [
        (pod(hostPID=True), {}, "spec.hostPID: true"),
        (
            pod(vllm(lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "kill -TERM 1"]}}})),
            {},
            "spec.containers[engine].lifecycle.preStop.exec.command names process 1",
        ),
        (
            pod(
                vllm(),
                {"name": "log", "livenessProbe": {"exec": {"command": ["cat", "/proc/1/stat"]}}},
            ),
            {},
            "spec.containers[log].livenessProbe.exec.command names process 1",
        ),
        (pod({"name": "web", "image": "nginx"}), {}, "no container runs vLLM or SGLang"),
        (pod({"name": "web", "image": "nginx"}), {"engine": {"container": "web"}}, "type: custom"),
        (pod(vllm(args=["--port=9464"])), {}, "ports 9464 and 9465 are reserved"),
        (
            pod(vllm(), {"name": "x", "image": "x", "ports": [{"containerPort": 9465}]}),
            {},
            "spec.containers[x].ports[0].containerPort: ports 9464 and 9465 are",
        ),
        (
            pod(initContainers=[{
                "name": "x", "image": "x", "restartPolicy": "Always",
                "ports": [{"containerPort": 9464}],
            }]),
            {},
            "are reserved for the supervisor",
        ),
        (pod(vllm(), vllm(name="other")), {}, "several containers may be the engine: select"),
        (pod(vllm(), {"name": "supervisor", "image": "x"}), {}, "spec.containers[supervisor]"),
        (pod(volumes=[{"name": "plimsoll-run", "emptyDir": {}}]), {}, "volumes[plimsoll-run]"),
        (pod(vllm(securityContext={"runAsNonRoot": True})), {}, "runAsUser is not set"),
        (
            pod(vllm(volumeMounts=[{"name": "x", "mountPath": "/opt/plimsoll-probe"}])),
            {"probe": {"enabled": True}},
            "volumeMounts[/opt/plimsoll-probe]: this path is reserved for the probe",
        ),
        (pod(os={"name": "windows"}), {}, "spec.os.name: windows"),
        (pod(resources={"limits": {"memory": "1Gi"}}), {}, "spec.resources: the pod must not"),
        (
            pod(vllm(resources={"limits": {"memory": "1Gi"}})),
            {"memory": {"host": {"growthBudget": "2Gi"}}},
            "less than the policy's spec.memory.host.growthBudget",
        ),
        (pod(labels={"leaderworkerset.sigs.k8s.io/name": "g"}), {}, "recreates the whole group"),
        (
            pod(labels={"leaderworkerset.sigs.k8s.io/worker-index": "1"}),
            {},
            "recreates the whole group",
        ),
        (pod(labels={"ray.io/node-type": "worker"}), {}, "serve no port"),
    ],
)  # fmt: skip
def test_what_cannot_be_supervised_safely_is_left_alone_and_says_why(
    refused: Object, spec: Object, reason: str
) -> None:
    made = inject_pod(refused, policy(**spec), IMAGES)
    assert made.refusal is not None
    assert reason in made.refusal
    assert made.pod["metadata"]["annotations"] == {REFUSED_ANNOTATION: made.refusal}
    assert made.pod["spec"] == refused["spec"]


def test_a_static_pod_is_left_as_the_kubelet_shows_it() -> None:
    given = pod()
    given["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "ab"}
    made = inject_pod(given, policy(), IMAGES)
    assert made.refusal is not None
    assert made.refusal.startswith("the kubelet runs this static pod from a file on its node")
    assert made.pod["spec"] == given["spec"]


def test_a_group_that_consents_is_supervised() -> None:
    leader = pod(labels={"leaderworkerset.sigs.k8s.io/name": "g"})
    leader["metadata"]["annotations"] = {ALLOW_GROUP_RESTARTS_ANNOTATION: "true"}
    assert inject_pod(leader, policy(), IMAGES).refusal is None


@pytest.mark.parametrize(
    ("labels", "annotations", "worker"),
    [
        ({"leaderworkerset.sigs.k8s.io/worker-index": "0"}, {}, False),
        ({"leaderworkerset.sigs.k8s.io/worker-index": "2"}, {}, True),
        # Before the admission of LeaderWorkerSets has labelled it.
        ({}, {"leaderworkerset.sigs.k8s.io/leader-name": "g-1"}, True),
    ],
)
def test_a_pod_of_a_group_knows_its_place(
    labels: Object, annotations: Object, worker: bool
) -> None:
    prefix = "leaderworkerset.sigs.k8s.io"
    group = {f"{prefix}/name": "g", f"{prefix}/group-index": "1", f"{prefix}/group-key": "4a"}
    given = pod(labels=group | labels)
    given["metadata"]["annotations"] = {ALLOW_GROUP_RESTARTS_ANNOTATION: "true"} | annotations
    given["spec"]["subdomain"] = "g"
    found = engine_of(inject_pod(given, policy(), IMAGES))
    place = {"index": "4a", "subdomain": "g"}
    assert found["group"] == place | ({"worker": True} if worker else {})
    assert found["engine"]["serves"] is not worker
    assert found["role"] == ("Worker" if worker else "Leader")


RAY_START = "ulimit -n 65536; ray start --address=llm-head-svc:6379 --metrics-export-port=8080"


def test_a_pods_role_is_its_supervisors_and_its_label() -> None:
    config = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_producer"})
    by_argument = pod(vllm(args=["--kv-transfer-config", config]))
    in_script = pod(
        vllm(command=["sh", "-c", "exec vllm serve m --kv-transfer-config \"$CONFIG\""],
             env=[{"name": "CONFIG", "value": config}])
    )  # fmt: skip
    for one in (by_argument, in_script):
        made = inject_pod(one, policy(), IMAGES)
        assert engine_of(made)["role"] == "Prefill"
        assert made.pod["metadata"]["labels"][ROLE_LABEL] == "Prefill"
        assert inject_pod(made.pod, policy(), IMAGES).pod == made.pod
    decode = pod(by_argument["spec"]["containers"][0], labels={"llm-d.ai/role": "decode"})
    assert engine_of(inject_pod(decode, policy(), IMAGES))["role"] == "Decode"
    plain = inject_pod(pod(), policy(), IMAGES)
    assert "role" not in engine_of(plain)
    assert ROLE_LABEL not in plain.pod["metadata"]["labels"]


def of_ray(node: str, *containers: Object) -> Object:
    """As KubeRay makes it."""
    labels = {"ray.io/cluster": "llm", "ray.io/node-type": node, "ray.io/is-ray-node": "yes"}
    made = pod(*containers, labels=labels)
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "llm", "controller": True}
    made["metadata"]["ownerReferences"] = [owner]
    return made


def ray_worker(**fields: Any) -> Object:
    command = {"command": ["/bin/bash", "-c", "--"], "args": [RAY_START]}
    return {"name": "ray-worker", "image": "rayproject/ray:2.50.0"} | command | fields


LOGS = {"name": "logs", "image": "fluent-bit"}


@pytest.mark.parametrize(
    ("containers", "engine", "expected"),
    [
        ([ray_worker()], {}, ("ray-worker", "custom")),
        ([LOGS, ray_worker()], {}, ("ray-worker", "custom")),
        ([ray_worker(image="vllm/vllm-openai")], {}, ("ray-worker", "vllm")),
        ([ray_worker()], {"type": "vllm"}, ("ray-worker", "vllm")),
        ([ray_worker(args=["run.sh"])], {}, ("ray-worker", "custom")),
        ([LOGS, ray_worker()], {"container": "logs"}, ("logs", "custom")),
        ([LOGS, ray_worker()], {"container": "ray-head"}, ("ray-worker", "custom")),
    ],
)
def test_a_ray_worker_is_watched_and_its_head_speaks_for_it(
    containers: list[Object], engine: Object, expected: tuple[str, str]
) -> None:
    found = engine_of(inject_pod(of_ray("worker", *containers), policy(engine=engine), IMAGES))
    service = make_ray_service_name("fuzz", "llm")
    assert found["group"] == {"index": "llm", "subdomain": service, "worker": True}
    assert found["workload"] == {"api_group": "ray.io", "kind": "RayCluster", "name": "llm"}
    assert (found["engine"]["container"], found["engine"]["type"]) == expected
    assert found["engine"]["serves"] is False


def test_a_ray_head_leads_and_runs_a_known_engine() -> None:
    script = "ray start --head --port=6379 && vllm serve m --port 8001"
    head = of_ray("head", {"name": "ray-head", "image": "x", "args": ["-c", script]})
    found = engine_of(inject_pod(head, policy(), IMAGES))
    assert found["group"] == {"index": "llm", "subdomain": make_ray_service_name("fuzz", "llm")}
    assert found["engine"]["serves"] is True
    assert found["engine"]["serving_url"] == "http://127.0.0.1:8001"
    unknown = inject_pod(of_ray("head", ray_worker(name="ray-head")), policy(), IMAGES)
    assert unknown.refusal is not None
    assert "no container runs vLLM or SGLang" in unknown.refusal


@pytest.mark.parametrize(
    ("containers", "reason"),
    [
        ([LOGS, ray_worker(args=["run.sh"])], "none of the containers in this Ray worker run"),
        ([ray_worker(), ray_worker(name="two")], "2 of the containers in this Ray worker run"),
    ],
)
def test_a_ray_worker_whose_engine_is_not_clear_is_refused(
    containers: list[Object], reason: str
) -> None:
    made = inject_pod(of_ray("worker", *containers), policy(), IMAGES)
    assert made.refusal is not None
    assert reason in made.refusal
    assert "select the engine's container with the policy's spec.engine.container" in made.refusal


def test_a_ray_worker_that_no_ray_cluster_owns_is_refused() -> None:
    alone = of_ray("worker", ray_worker())
    del alone["metadata"]["ownerReferences"]
    refusal = inject_pod(alone, policy(), IMAGES).refusal
    assert refusal is not None
    assert "serve no port" in refusal


def test_a_pod_that_may_not_be_root_gets_no_root() -> None:
    made = inject_pod(
        pod(securityContext={"runAsNonRoot": True, "runAsUser": 2000}), policy(), IMAGES
    )
    context = supervisor(made)["securityContext"]
    assert (context["runAsUser"], context["runAsNonRoot"]) == (2000, True)


def examine(before: Object, wanted: SupervisionPolicy) -> None:
    kept = copy.deepcopy(before)
    made = inject_pod(before, wanted, IMAGES)
    assert before == kept
    assert inject_pod(made.pod, wanted, IMAGES) == made, "injecting twice is injecting once"
    if made.refusal is not None:
        assert made.pod["spec"] == before["spec"]
        added = made.pod["metadata"].get("annotations", {}).keys()
        assert set(added) - set(before["metadata"].get("annotations", {})) <= {REFUSED_ANNOTATION}
        return
    assert without_supervisor(made.pod) == without_supervisor(before), "nothing else is added"
    (found,) = [one for one in made.pod["spec"]["initContainers"] if one["name"] == "supervisor"]
    volumes = {one["name"] for one in made.pod["spec"]["volumes"]}
    assert {one["name"] for one in found["volumeMounts"]} <= volumes


@given(pods(), policies())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_pods_at_random(before: Object, wanted: SupervisionPolicy) -> None:
    examine(before, wanted)


@pytest.mark.long
@given(pods(), policies())
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
def test_2000_pods_at_random(before: Object, wanted: SupervisionPolicy) -> None:
    examine(before, wanted)
