"""What a manifest may ask for: each object is there when it is asked for, and only then.

Tests ``render/deployment.py`` and ``render/pod.py``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_api.resources import Resources
from plimsoll_api.supervisor_config import CONFIG_FILE, decode_config
from plimsoll_operator.kinds import InvalidSpecError
from plimsoll_operator.plans.service import list_claims, make_plan, parse_service
from plimsoll_operator.render import Images, render_objects
from plimsoll_operator.render.compare import add_current_replicas
from plimsoll_operator.render.deployment import compute_pod_hash
from plimsoll_operator.render.objects import PAUSED_SCALE_IN_ANNOTATION, make_service_url
from plimsoll_operator.render.pod import make_pod_template

ROOT = Path(__file__).parents[3]
IMAGES = Images("engine:1", "supervisor:1")


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "qwen", "namespace": "ml", "uid": "u-1", "generation": 3},
        "spec": {"model": {"uri": "pvc://weights/qwen/4b"}} | spec,
    }


def objects(**spec: Any) -> dict[tuple[str, str], dict[str, Any]]:
    made = render_objects(parse_service(manifest(**spec)), IMAGES, shared_claims=["weights"])
    return {(item["kind"], item["metadata"]["name"]): item for item in made}


def pod(**spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = objects(**spec)["Deployment", "qwen"]["spec"]["template"]["spec"]
    return found


SCALING = {"minReplicas": 2, "maxReplicas": 6, "target": {"cpuPercent": 80}}
TRIGGER = {"type": "prometheus", "metadata": {"threshold": "5"}}
KEDA = {"minReplicas": 0, "maxReplicas": 6, "triggers": [TRIGGER], "cooldown": "90s"}
GATEWAY = {
    "parentRefs": [{"name": "inference", "namespace": "gateways", "sectionName": "https"}],
    "hostnames": ["qwen.example"],
    "endpointPicker": {"name": "qwen-epp"},
}


@pytest.mark.parametrize(
    ("spec", "kind", "name"),
    [
        ({"autoscaling": SCALING}, "HorizontalPodAutoscaler", "qwen"),
        ({"observability": {"podMonitor": {"enabled": True}}}, "PodMonitor", "qwen"),
        ({"observability": {"prometheusRule": {"enabled": True}}}, "PrometheusRule", "qwen"),
        ({"service": {"headless": True}}, "Service", "qwen-replicas"),
        ({"autoscaling": KEDA}, "ScaledObject", "qwen"),
        ({"gateway": GATEWAY}, "InferencePool", "qwen"),
        ({"gateway": GATEWAY}, "HTTPRoute", "qwen"),
    ],
)
def test_an_object_is_there_when_the_spec_enables_it(
    spec: dict[str, Any], kind: str, name: str
) -> None:
    assert (kind, name) in objects(**spec)
    assert (kind, name) not in objects()


def test_requests_of_a_gateway_reach_the_pool_of_the_replicas() -> None:
    made = objects(gateway=GATEWAY, engine={"port": 8123})
    pool, route = made["InferencePool", "qwen"]["spec"], made["HTTPRoute", "qwen"]["spec"]
    pods = made["Deployment", "qwen"]["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= pods.items()
    assert pool["targetPorts"] == [{"number": 8123}]
    assert pool["endpointPickerRef"] == {
        "name": "qwen-epp", "port": {"number": 9002}, "failureMode": "FailClose",
    }  # fmt: skip
    assert route["parentRefs"] == GATEWAY["parentRefs"]
    (backend,) = route["rules"][0]["backendRefs"]
    assert backend["kind"] == "InferencePool"
    assert compute_pod_hash(parse_service(manifest(gateway=GATEWAY))) == compute_pod_hash(
        parse_service(manifest())
    )


def test_keda_scales_the_deployment_and_no_other_autoscaler_does() -> None:
    made = objects(autoscaling=KEDA)
    assert ("HorizontalPodAutoscaler", "qwen") not in made
    assert "replicas" not in made["Deployment", "qwen"]["spec"]
    found = made["ScaledObject", "qwen"]["spec"]
    assert (found["minReplicaCount"], found["maxReplicaCount"]) == (0, 6)
    assert (found["cooldownPeriod"], found["triggers"]) == (90, [TRIGGER])
    assert found["initialCooldownPeriod"] == 90, "a new service would go to zero at once"
    assert found["scaleTargetRef"]["kind"] == "Deployment"


def test_nothing_is_scaled_in_while_a_replica_has_an_open_incident() -> None:
    for scaling, kind, held in (
        (SCALING, "HorizontalPodAutoscaler", ("spec", "behavior", "scaleDown", "selectPolicy")),
        (KEDA, "ScaledObject", ("metadata", "annotations", PAUSED_SCALE_IN_ANNOTATION)),
    ):
        service = parse_service(manifest(autoscaling=scaling))
        for phase, expected in (("Verifying", True), ("Resolved", False)):
            incident = {
                "metadata": {"name": "i"},
                "spec": {"kind": "HostGrowth", "pod": "p", "openedAt": ""},
                "status": {"phase": phase},
            }
            plan = make_plan(service, {}, [], [incident], IMAGES)
            (found,) = (one for one in plan.desired if one["kind"] == kind)
            for key in held:
                found = found.get(key) or {}
            assert bool(found) is expected, (kind, phase)


@pytest.mark.parametrize(
    "scaling",
    [
        {"minReplicas": 0, "maxReplicas": 2, "target": {"cpuPercent": 80}},
        {"maxReplicas": 2},
        SCALING | {"triggers": [TRIGGER]},
    ],
)
def test_scaling_to_zero_needs_a_trigger_and_one_controller(scaling: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpecError, match="autoscaling"):
        parse_service(manifest(autoscaling=scaling))


def test_the_engine_gets_the_devices_of_its_claims() -> None:
    claims = [
        {"name": "gpu", "resourceClaimTemplateName": "one-gpu", "request": "gpu"},
        {"name": "fabric", "resourceClaimName": "shared-fabric"},
    ]
    spec = pod(engine={"resources": {"limits": {"cpu": "4"}, "resourceClaims": claims}})
    assert spec["resourceClaims"] == [
        {"name": "gpu", "resourceClaimTemplateName": "one-gpu"},
        {"name": "fabric", "resourceClaimName": "shared-fabric"},
    ]
    (engine,) = spec["containers"]
    assert engine["resources"]["claims"] == [{"name": "gpu", "request": "gpu"}, {"name": "fabric"}]
    assert engine["resources"]["limits"] == {"cpu": "4"}
    assert "resourceClaims" not in engine["resources"]
    assert all("claims" not in one["resources"] for one in spec["initContainers"])
    assert not {"resourceClaims"} & pod().keys()
    assert "claims" not in pod()["containers"][0]["resources"]


def test_a_claim_has_one_source_and_a_name_of_its_own() -> None:
    both = {"name": "a", "resourceClaimName": "x", "resourceClaimTemplateName": "y"}
    one = {"name": "a", "resourceClaimName": "x"}
    for claims in ([{"name": "a"}], [both], [one, one]):
        with pytest.raises(InvalidSpecError, match=r"resource claim|the same name"):
            parse_service(manifest(engine={"resources": {"resourceClaims": claims}}))


def test_a_disruption_budget_is_there_until_it_is_turned_off() -> None:
    made = objects(disruption={"maxUnavailable": "25%"})["PodDisruptionBudget", "qwen"]
    assert made["spec"]["maxUnavailable"] == "25%"
    assert made["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert ("PodDisruptionBudget", "qwen") not in objects(disruption={"enabled": False})


@pytest.mark.parametrize(
    ("interval", "written"),
    [("15s", "15s"), ("0.5m", "30s"), ("1.5s", "1500ms"), ("30s1m", "90s"), ("0.1ms", "1ms")],
)
def test_an_interval_is_one_that_the_prometheus_operator_takes(interval: str, written: str) -> None:
    """Its pattern has neither fractions nor units in another order."""
    monitor = {"podMonitor": {"enabled": True, "interval": interval}}
    made = objects(observability=monitor)["PodMonitor", "qwen"]
    assert {one["interval"] for one in made["spec"]["podMetricsEndpoints"]} == {written}


def test_an_engine_that_serves_tls_is_scraped_and_named_with_https() -> None:
    def rendered(*args: str) -> tuple[list[str | None], str]:
        engine = {"type": "vllm", "image": "vllm:1", "args": list(args)}
        spec = {"engine": engine, "observability": {"podMonitor": {"enabled": True}}}
        made = objects(**spec)["PodMonitor", "qwen"]["spec"]["podMetricsEndpoints"]
        url = make_service_url(parse_service(manifest(**spec)))
        return [one.get("scheme") for one in made], url

    assert rendered() == ([None, None], "http://qwen.ml.svc")
    assert rendered("--ssl-certfile=/tls/tls.crt") == (["https", None], "https://qwen.ml.svc:80")


def test_replicas_are_the_autoscalers_once_there_is_one() -> None:
    made = objects(autoscaling=SCALING, replicas=9)
    deployment = made["Deployment", "qwen"]
    assert "replicas" not in deployment["spec"]
    assert add_current_replicas(deployment, None, 6)["spec"]["replicas"] == 6
    live = {"metadata": {"resourceVersion": "7"}, "spec": {"replicas": 4}}
    applied = add_current_replicas(deployment, live, 6)
    assert applied["spec"]["replicas"] == 4, "what the autoscaler set stays"
    assert applied["metadata"]["resourceVersion"] == "7", "and a newer value makes it fail"
    plain = objects()["Deployment", "qwen"]
    assert add_current_replicas(plain, live, 6) is plain


def test_a_metric_of_the_pods_may_scale() -> None:
    metric = {"name": "plimsoll_engine_num_requests_waiting", "averageValue": 4}
    made = objects(autoscaling={"maxReplicas": 3, "target": {"metric": metric}})
    spec = made["HorizontalPodAutoscaler", "qwen"]["spec"]
    assert spec["metrics"][0]["pods"]["target"] == {"type": "AverageValue", "averageValue": "4"}
    assert spec["minReplicas"] == 1


def test_a_policy_is_there_until_it_is_turned_off() -> None:
    made = objects()["NetworkPolicy", "qwen"]["spec"]
    assert made["podSelector"] == {"matchLabels": {"plimsoll.dev/service": "qwen"}}
    assert made["policyTypes"] == ["Ingress"]
    assert ports_for(made, None) == {8000, 9464}
    assert ("NetworkPolicy", "qwen") not in objects(networkPolicy={"enabled": False})


def ports_for(policy: dict[str, Any], peers: Any) -> set[int]:
    """Ports that are open to ``peers``, None for everybody."""
    rules = [rule for rule in policy["ingress"] if rule.get("from") == peers]
    return {port["port"] for rule in rules for port in rule["ports"]}


TEAM, SCRAPER, CHECKER = (
    [{"namespaceSelector": {"matchLabels": {"team": name}}}] for name in ("a", "b", "c")
)


def test_each_port_is_open_to_those_who_are_named_for_it() -> None:
    """Neither the admin port nor the probe port is open to anybody, and scrapers that nobody named
    do not open the serving port."""
    made = objects(networkPolicy={"clients": TEAM})["NetworkPolicy", "qwen"]["spec"]
    assert ports_for(made, TEAM) == {8000}
    assert ports_for(made, None) == {9464}
    asked = {"clients": TEAM, "monitoring": SCRAPER, "probes": CHECKER}
    made = objects(networkPolicy=asked)["NetworkPolicy", "qwen"]["spec"]
    assert ports_for(made, TEAM) == {8000}
    assert ports_for(made, SCRAPER) == {8000, 9464}
    assert ports_for(made, CHECKER) == {9465}
    assert ports_for(made, None) == set()


@pytest.mark.parametrize(
    ("rollout", "devices", "surge", "missing"),
    [
        ({}, False, 1, 0),
        ({}, True, 0, 1),
        ({"maxSurge": 0}, False, 0, 1),
        ({"maxSurge": "50%"}, True, "50%", 1),
        ({"maxUnavailable": 0}, True, 1, 0),
        ({"maxUnavailable": 2}, False, 1, 2),
    ],
)
def test_a_roll_out_can_always_move(
    rollout: dict[str, Any], devices: bool, surge: Any, missing: Any
) -> None:
    limits = {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}} if devices else {}
    made = objects(rollout=rollout, engine=limits)["Deployment", "qwen"]
    assert made["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": surge,
        "maxUnavailable": missing,
    }


DRA = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]}
TAKEN = {"containers": [{"name": "engine", "resources": {"claims": [{"name": "gpu"}]}}]}
PORT = {"containers": [{"name": "log", "image": "l", "ports": [{"hostPort": 80}]}]}
HUB = {"uri": "hf://org/model"}
OTHER = {"volumes": [{"name": "x", "persistentVolumeClaim": {"claimName": "one-node"}}]}
OWN = {"volumes": [{"name": "x", "ephemeral": {"volumeClaimTemplate": {}}}]}


@pytest.mark.parametrize(
    ("spec", "holds"),
    [
        ({}, False),
        ({"model": HUB}, False),
        ({"model": HUB | {"cache": {"claimName": "weights"}}}, False),
        ({"model": HUB | {"cache": {"claimName": "one-node"}}}, True),
        ({"model": {"uri": "pvc://one-node/qwen"}}, True),
        ({"podTemplate": {"spec": OTHER}}, True),
        ({"podTemplate": {"spec": OWN}}, False),
        ({"podTemplate": {"spec": DRA | TAKEN}}, True),
        ({"podTemplate": {"spec": DRA}}, True),
        ({"podTemplate": {"spec": TAKEN}}, True),
        ({"podTemplate": {"spec": PORT}}, True),
        ({"podTemplate": {"spec": {"hostNetwork": True}}}, True),
        ({"engine": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}, True),
    ],
)
def test_a_pod_goes_first_where_the_next_one_would_wait_for_what_it_holds(
    spec: dict[str, Any], holds: bool
) -> None:
    made = objects(**spec)["Deployment", "qwen"]["spec"]["strategy"]["rollingUpdate"]
    assert made == {"maxSurge": 0 if holds else 1, "maxUnavailable": 1 if holds else 0}


def test_the_claims_of_a_service_are_those_of_its_model_and_of_its_template() -> None:
    model = HUB | {"cache": {"claimName": "weights"}}
    assert list_claims(parse_service(manifest(model=model, podTemplate={"spec": OTHER}))) == [
        "one-node",
        "weights",
    ]
    odd: Any
    for odd in (3, [3], [{"persistentVolumeClaim": {"claimName": "../secrets/x"}}],
                [{"persistentVolumeClaim": 3}], [{"persistentVolumeClaim": {}}]):  # fmt: skip
        assert (
            list_claims(parse_service(manifest(model=HUB, podTemplate={"spec": {"volumes": odd}})))
            == []
        )
    assert list_claims(parse_service(manifest(model=HUB))) == []


def download(**spec: Any) -> dict[str, Any]:
    """The container of the download, with its variables by name."""
    (first, _) = pod(**spec)["initContainers"]
    found: dict[str, Any] = first | {"env": {one["name"]: one for one in first["env"]}}
    return found


def env(**variables: str) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def test_the_download_gets_the_way_out_of_the_cluster_from_the_engine() -> None:
    passed = {
        "HTTPS_PROXY": "p", "https_proxy": "q", "NO_PROXY": "n", "HF_ENDPOINT": "m",
        "SSL_CERT_FILE": "/c", "HF_XET_CLIENT_READ_TIMEOUT": "9s", "AWS_REGION": "r",
        "AWS_ENDPOINT_URL_S3": "e", "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    kept = {"HF_HUB_OFFLINE": "1", "VLLM_API_KEY": "k", "HF_HOME": "/elsewhere"}
    found = download(model=HUB, engine={"env": env(**passed, **kept)})["env"]
    assert {one: found[one]["value"] for one in passed} == passed
    assert found.keys() == passed.keys() | {"HOME", "HF_HOME"}
    assert found["HF_HOME"]["value"] == "/tmp/huggingface"


def test_the_models_own_variables_precede_and_a_secret_holds_its_store_together() -> None:
    model = HUB | {"env": env(HF_ENDPOINT="mine", EXTRA="x"), "tokenSecretRef": {"name": "hub"}}
    engine = {"env": env(HF_ENDPOINT="theirs", HF_TOKEN="t")}
    found = download(model=model, engine=engine)["env"]
    assert (found["HF_ENDPOINT"]["value"], found["EXTRA"]["value"]) == ("mine", "x")
    assert found["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "hub"
    store = {"uri": "s3://weights/q", "credentialsSecretRef": {"name": "store"}}
    engine = {"env": env(AWS_REGION="r", AWS_ACCESS_KEY_ID="k", HTTPS_PROXY="p")}
    assert download(model=store, engine=engine)["env"].keys() == {"HOME", "HF_HOME", "HTTPS_PROXY"}
    with pytest.raises(InvalidSpecError, match=r"model\.env requires a model\.uri"):
        parse_service(manifest(model={"uri": "pvc://weights/q", "env": env(A="b")}))


def test_the_resources_of_the_download_are_the_models_or_the_operators() -> None:
    limits = {"cpu": "4", "memory": "8Gi"}
    bounded = {"resources": {"limits": limits, "requests": {"cpu": "2"}}}
    own = {"limits": {"cpu": "1", "memory": "3Gi"}, "requests": {}}
    assert download(model=HUB | {"resources": own}, engine=bounded)["resources"] == own
    fitted = download(model=HUB, engine=bounded)["resources"]
    assert (fitted["limits"]["memory"], set(fitted["limits"])) == ("2Gi", {"cpu", "memory"})
    default = Resources(limits={"memory": "5Gi"})
    made = make_pod_template(parse_service(manifest(model=HUB)), replace(IMAGES, download=default))
    assert made["spec"]["initContainers"][0]["resources"]["limits"] == {"memory": "5Gi"}


def test_placement_and_device_slices_are_the_manifests() -> None:
    chosen = {"matchLabels": {"plimsoll.dev/service": "qwen"}}
    spread = [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": one, "labelSelector": chosen}
        for one in ("DoNotSchedule", "ScheduleAnyway")
    ]
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    slice_ = {"nvidia.com/mig-1g.10gb": 1}
    spec = pod(
        engine={"resources": {"limits": slice_, "requests": {"cpu": 2}}},
        podTemplate={"spec": {"topologySpreadConstraints": spread, "tolerations": tolerations}},
    )
    assert spec["topologySpreadConstraints"] == spread, "a hard and a soft one on one topology"
    assert spec["tolerations"] == tolerations
    resources = spec["containers"][0]["resources"]
    assert resources == {"limits": {"nvidia.com/mig-1g.10gb": "1"}, "requests": {"cpu": "2"}}
    assert "mig" not in str(spec["initContainers"]), "the supervisor takes no slice"


def test_a_roll_outs_deadline_is_ones_own() -> None:
    made = objects(rollout={"progressDeadline": "90s"})["Deployment", "qwen"]
    assert made["spec"]["progressDeadlineSeconds"] == 90


def test_a_model_of_the_hub_is_downloaded_first() -> None:
    model = {
        "uri": "hf://Qwen/Qwen3-4B",
        "revision": "refs/pr/1",
        "tokenSecretRef": {"name": "hub"},
        "cache": {"claimName": "models"},
    }
    spec = pod(model=model, engine={"type": "vllm", "image": "vllm:1"})
    first, second = spec["initContainers"]
    assert (first["name"], second["name"]) == ("model-download", "supervisor")
    assert first["image"] == "supervisor:1", "nobody pulls PyTorch for a download"
    folder = "/mnt/model/Qwen/Qwen3-4B/refs--pr--1"
    assert f"--to={folder}" in first["command"]
    token = [one for one in first["env"] if one["name"] == "HF_TOKEN"]
    assert token[0]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    volume = next(one for one in spec["volumes"] if one["name"] == "model")
    assert volume["persistentVolumeClaim"] == {"claimName": "models"}
    assert spec["securityContext"]["fsGroup"] == 10001
    engine = spec["containers"][0]
    assert engine["command"][:3] == ["vllm", "serve", folder]
    assert next(m for m in engine["volumeMounts"] if m["name"] == "model")["readOnly"] is True
    assert "HF_TOKEN" not in str(engine)


def test_a_model_in_a_bucket_is_downloaded_with_the_secrets_variables() -> None:
    model = {
        "uri": "s3://weights/qwen/4b/",
        "credentialsSecretRef": {"name": "store"},
        "cache": {"claimName": "models"},
    }
    spec = pod(model=model)
    first = spec["initContainers"][0]
    assert "--s3=s3://weights/qwen/4b/" in first["command"]
    folder = "/mnt/model/_s3/weights/qwen/4b"
    assert f"--to={folder}" in first["command"]
    assert first["envFrom"] == [{"secretRef": {"name": "store"}}]
    engine = spec["containers"][0]
    assert f"--model={folder}" in engine["command"]
    assert "store" not in str(engine), "the engine needs no credentials"
    assert "envFrom" not in pod(model={"uri": "s3://public"})["initContainers"][0]


@pytest.mark.parametrize(
    "model",
    [
        {"uri": "pvc://claim/x", "cache": {"claimName": "models"}},
        {"uri": "hf://a/b", "credentialsSecretRef": {"name": "store"}},
        {"uri": "s3://weights", "revision": "main"},
        {"uri": "s3://weights", "tokenSecretRef": {"name": "hub"}},
    ],
)
def test_what_does_not_go_with_a_source_is_refused(model: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidSpecError, match=r"spec\.model: .*requires a model\.uri that begins with"
    ):
        pod(model=model)


def test_a_claim_is_mounted_read_only() -> None:
    spec = pod(model={"uri": "pvc://weights/qwen/4b"})
    volume = next(one for one in spec["volumes"] if one["name"] == "model")
    assert volume["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
    assert [one["name"] for one in spec["initContainers"]] == ["supervisor"]
    assert "--model=/mnt/model/qwen/4b" in spec["containers"][0]["command"]


def test_without_a_cache_a_download_is_the_pods_own() -> None:
    spec = pod(model={"uri": "hf://Qwen/Qwen3-4B"})
    assert next(v for v in spec["volumes"] if v["name"] == "model")["emptyDir"] == {}
    assert "fsGroup" not in spec["securityContext"]


def config(**spec: Any) -> Any:
    made = objects(**spec)["ConfigMap", "qwen-supervisor"]
    return decode_config(made["data"][CONFIG_FILE].encode())


def test_a_picker_learns_from_a_label_that_metrics_do_not_have_vllms_names() -> None:
    label = "inference.networking.k8s.io/engine-type"
    for engine, expected in (("plimsoll", None), ("vllm", None), ("sglang", "sglang")):
        made = objects(engine={"type": engine, "image": "e:1"}, gateway=GATEWAY)
        found = made["Deployment", "qwen"]["spec"]["template"]["metadata"]["labels"]
        assert found.get(label) == expected
        selected = made["InferencePool", "qwen"]["spec"]["selector"]["matchLabels"]
        assert selected.items() <= found.items()


def test_an_external_engine_is_started_probed_and_stopped_by_what_it_has() -> None:
    sglang = pod(engine={"type": "sglang", "image": "s:1", "args": ["--tp=2"]})["containers"][0]
    assert sglang["command"][:3] == ["python3", "-m", "sglang.launch_server"]
    assert sglang["command"][-1] == "--tp=2"
    assert sglang["readinessProbe"]["httpGet"]["path"] == "/health"
    assert sglang["lifecycle"]["preStop"] == {"sleep": {"seconds": 5}}
    engine = {
        "type": "custom",
        "image": "c:1",
        "args": ["--model=$(PLIMSOLL_MODEL_DIR)"],
        "probes": {"readiness": "/v1/models"},
    }
    custom = pod(engine=engine)["containers"][0]
    assert "command" not in custom, "its image's entrypoint starts it"
    assert custom["args"] == ["--model=$(PLIMSOLL_MODEL_DIR)"]
    assert {"name": "PLIMSOLL_MODEL_DIR", "value": "/mnt/model/qwen/4b"} in custom["env"]
    assert custom["readinessProbe"]["httpGet"]["path"] == "/v1/models"
    assert custom["livenessProbe"]["httpGet"]["path"] == "/health"
    assert config(engine=engine).engine.admin_url == "http://127.0.0.1:8000"
    own = config(engine=engine | {"adminContract": "Plimsoll"}).engine
    assert (own.type, own.admin_url) == ("plimsoll", "http://127.0.0.1:8001")


def test_api_keys_are_a_file_that_the_engine_alone_sees() -> None:
    keys = {"apiKeySecretRef": {"name": "clients", "key": "keys.txt"}}
    spec = pod(engine=keys | {"args": ["--dtype=float32"]})
    engine = spec["containers"][0]
    mount = next(one for one in engine["volumeMounts"] if one["name"] == "api-keys")
    volume = next(one for one in spec["volumes"] if one["name"] == "api-keys")
    item = volume["secret"]["items"][0]
    assert (volume["secret"]["secretName"], item["key"]) == ("clients", "keys.txt")
    assert f"--api-key-file={mount['mountPath']}/{item['path']}" in engine["command"]
    assert "subPath" not in mount, "a rotated key has to arrive"
    assert not any("api-keys" in str(one) for one in spec["initContainers"])
    assert "api-key" not in str(pod()), "without a reference /v1 is open"
    with pytest.raises(InvalidSpecError, match=r"spec\.engine.*VLLM_API_KEY"):
        pod(engine=keys | {"type": "vllm", "image": "vllm:1"})


def test_alerts_follow_the_services_own_window() -> None:
    made = objects(
        memory={
            "host": {"growthBudget": "100Mi", "window": "10h"},
            "device": {"growthBudget": "1Gi", "window": "24h"},
        },
        observability={"prometheusRule": {"enabled": True, "labels": {"release": "main"}}},
    )["PrometheusRule", "qwen"]
    assert made["metadata"]["labels"]["release"] == "main"
    rules = made["spec"]["groups"][0]["rules"]
    host = [rule for rule in rules if 'kind="host"' in rule["expr"]]
    # 20 % in a 24th of 10 h, 30 % in a quarter: 25 min at 4.8 and 150 min at 1.2.
    assert [rule["expr"].count("[25m]") for rule in host] == [1, 0]
    assert [rule["expr"].count("[150m]") for rule in host] == [0, 1]
    assert all('service="qwen"' in rule["expr"] for rule in rules)


def test_a_services_alerts_are_those_of_the_cluster() -> None:
    """One source: the same names, labels and words, so that Alertmanager takes both for one."""
    groups = yaml.safe_load((ROOT / "dashboards" / "alerts.yaml").read_text())["groups"]
    cluster = {
        (rule["alert"], rule["labels"].get("window")): rule
        for group in groups
        for rule in group["rules"]
    }
    budget = {"device": {"growthBudget": "1Gi", "window": "24h"}}
    asked = {"prometheusRule": {"enabled": True}}
    made = objects(memory=budget, observability=asked)["PrometheusRule", "qwen"]
    rules = made["spec"]["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [
        "PlimsollLeakBudgetBurnFast",
        "PlimsollLeakBudgetBurnSlow",
    ]
    for rule in rules:
        same = cluster[rule["alert"], rule["labels"]["window"]]
        assert {**rule, "expr": ""} == {**same, "expr": ""}
        matchers = '{namespace="ml",service="qwen",kind="device"}'
        assert rule["expr"].replace(matchers, "") == same["expr"].replace(" >= 86400 < 604800", "")


def test_a_variable_of_the_manifest_takes_the_place_of_ours() -> None:
    """The API server refuses a list with two of one name."""
    env = [{"name": "HOME", "value": "/home/me"}, {"name": "MINE", "value": "1"}]
    made = pod(engine={"env": env})["containers"][0]["env"]
    names = [one["name"] for one in made]
    assert sorted(names) == sorted(set(names))
    assert {one["name"]: one["value"] for one in made}["HOME"] == "/home/me"
    assert names[-1] == "MINE"


PROBED: dict[str, Any] = {"engine": {"type": "vllm", "image": "vllm:1"}, "probe": {"enabled": True}}


def test_the_probe_is_there_when_enabled_and_only_then() -> None:
    spec = pod(**PROBED)
    copying, supervisor = spec["initContainers"]
    assert (copying["name"], copying["image"]) == ("plimsoll-probe", "supervisor:1")
    assert copying["securityContext"]["readOnlyRootFilesystem"] is True
    (engine,) = spec["containers"]
    env = {one["name"]: one.get("value") for one in engine["env"]}
    assert env["PYTHONPATH"] == "/opt/plimsoll-probe"
    assert {"name": "PLIMSOLL_PROBE_DIR", "value": env["PLIMSOLL_PROBE_DIR"]} in supervisor["env"]
    volumes = [volume["name"] for volume in spec["volumes"]]
    assert {"plimsoll-probe", "plimsoll-probe-run"} <= set(volumes)
    assert len(volumes) == len(set(volumes))
    for without in ({}, {"probe": {"enabled": False}}, {"probe": {"image": "probe:1"}}):
        assert "plimsoll-probe" not in str(pod(engine=PROBED["engine"], **without))


def test_the_probe_comes_after_downloads_and_from_the_image_that_is_named_for_it() -> None:
    asked = PROBED | {"model": {"uri": "hf://Qwen/Qwen3-4B"}}
    spec = pod(**asked | {"probe": {"enabled": True, "image": "probe:2"}})
    names = [one["name"] for one in spec["initContainers"]]
    assert names == ["model-download", "plimsoll-probe", "supervisor"]
    assert spec["initContainers"][1]["image"] == "probe:2"
    service = parse_service(manifest(**asked))
    made = make_pod_template(service, Images("engine:1", "supervisor:1", "probe:1"))["spec"]
    assert made["initContainers"][1]["image"] == "probe:1", "the operator's own default"


def test_a_pythonpath_of_the_manifest_stays_in_front_of_the_probes() -> None:
    engine = PROBED["engine"] | {"env": [{"name": "PYTHONPATH", "value": "/app"}]}
    (container,) = pod(**PROBED | {"engine": engine})["containers"]
    (path,) = [one["value"] for one in container["env"] if one["name"] == "PYTHONPATH"]
    assert path == "/app:/opt/plimsoll-probe"


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({}, "such an engine reports its memory itself"),
        (
            {"type": "custom", "image": "i", "adminContract": "Plimsoll"},
            "reports its memory itself",
        ),
        (
            {
                "type": "sglang",
                "image": "i",
                "env": [{"name": "PYTHONPATH", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}],
            },
            "PYTHONPATH must have a value, not valueFrom",
        ),
    ],
)
def test_an_engine_that_cannot_have_the_probe(engine: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSpecError, match=said):
        parse_service(manifest(engine=engine, probe={"enabled": True}))
    parse_service(manifest(engine=engine, probe={"enabled": False}))


def test_the_probe_rolls_pods_and_its_absence_rolls_none() -> None:
    without = manifest(engine=PROBED["engine"])
    assert compute_pod_hash(parse_service(without)) == "f60718ee13", (
        "that of a service of an operator without the field"
    )
    hashes = {
        compute_pod_hash(parse_service(manifest(**PROBED | {"probe": probe})))
        for probe in ({}, {"enabled": True}, {"enabled": True, "image": "probe:2"})
    }
    assert len(hashes) == 3
