"""From a manifest to objects.

Tests ``render/deployment.py``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.maintenance_window import MaintenanceWindow
from plimsoll_api.supervision import Action
from plimsoll_api.supervisor_config import CONFIG_FILE, decode_config
from plimsoll_operator.kinds import OWNED_KINDS
from plimsoll_operator.plans.service import parse_service
from plimsoll_operator.render import (
    Images,
    ReplicaLayout,
    make_engine_args,
    make_process_env,
    make_supervisor_args,
    make_supervisor_config,
    render_objects,
)
from plimsoll_operator.render.deployment import compute_pod_hash

IMAGES = Images("engine:1", "supervisor:1")


def service(**spec: Any) -> InferenceService:
    return parse_service(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "qwen", "namespace": "ml", "uid": "u-1", "generation": 3},
            "spec": {"model": {"uri": "pvc://weights/qwen/4b"}} | spec,
        }
    )


def objects(**spec: Any) -> dict[str, dict[str, Any]]:
    return {item["kind"]: item for item in render_objects(service(**spec), IMAGES)}


def template(**spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = objects(**spec)["Deployment"]["spec"]["template"]
    return made


def test_every_object_is_owned_labelled_and_of_a_watched_kind() -> None:
    made = render_objects(service(), IMAGES)
    assert {item["kind"] for item in made} <= {kind.kind for kind in OWNED_KINDS}
    for item in made:
        meta = item["metadata"]
        assert meta["namespace"] == "ml"
        assert meta["labels"]["plimsoll.dev/service"] == "qwen"
        assert meta["ownerReferences"][0] == {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "name": "qwen",
            "uid": "u-1",
            "controller": True,
            "blockOwnerDeletion": True,
        }


def test_rendering_is_a_function() -> None:
    assert json.dumps(render_objects(service(), IMAGES)) == json.dumps(
        render_objects(service(), IMAGES)
    )


def test_the_supervisor_is_a_native_sidecar_with_the_only_token() -> None:
    spec = template()["spec"]
    supervisor, engine = spec["initContainers"][0], spec["containers"][0]
    assert supervisor["restartPolicy"] == "Always"
    assert spec["shareProcessNamespace"] is True
    assert spec["automountServiceAccountToken"] is False
    mounts = {"engine": engine["volumeMounts"], "supervisor": supervisor["volumeMounts"]}
    with_token = [name for name, all_ in mounts.items() if any(m["name"] == "token" for m in all_)]
    assert with_token == ["supervisor"]
    assert {m["name"]: m for m in mounts["engine"]}["model"]["readOnly"] is True


def test_probes_keep_the_kubelet_out_of_stalls_and_drains() -> None:
    spec = template(engine={"startupTimeout": "5m"})["spec"]
    engine, supervisor = spec["containers"][0], spec["initContainers"][0]
    assert engine["livenessProbe"]["httpGet"]["path"] == "/health"
    assert engine["readinessProbe"]["httpGet"]["path"] == "/ready"
    startup = engine["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 330
    assert supervisor["readinessProbe"]["httpGet"] == {
        "path": "/ready",
        "port": 9465,
        "scheme": "HTTP",
    }
    assert supervisor["livenessProbe"]["httpGet"]["path"] != "/ready"


@pytest.mark.parametrize(
    ("kind", "args", "scheme"),
    [
        ("vllm", ["--ssl-certfile=/tls/tls.crt", "--ssl-keyfile=/tls/tls.key"], "https"),
        ("vllm", ["--ssl_certfile", "/tls/tls.crt"], "https"),
        ("sglang", ["--ssl-certfile", "/tls/tls.crt"], "https"),
        ("vllm", ["--ssl-certfiles"], "http"),
    ],
)
def test_an_engine_with_a_certificate_is_called_by_https(
    kind: str, args: list[str], scheme: str
) -> None:
    engine = {"type": kind, "image": "e:1", "args": args}
    assert make_supervisor_config(service(engine=engine)).engine.serving_url.startswith(
        f"{scheme}://"
    )
    (container,) = template(engine=engine)["spec"]["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"]["scheme"] == scheme.upper()


def test_the_grace_period_holds_the_drain() -> None:
    spec = template(supervision={"drain": {"deadline": "90s"}})["spec"]
    assert spec["terminationGracePeriodSeconds"] == 120
    hook = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:4] == ["python", "-m", "plimsoll_engine", "drain"]
    assert "--deadline=90" in hook
    assert "lifecycle" not in spec["initContainers"][0]


def test_engine_arguments_in_a_pod_and_elsewhere() -> None:
    one = service(engine={"args": ["--dtype=float32"], "startupTimeout": "90s"})
    args = make_engine_args(one)
    assert args[0] == "serve"
    assert "--model=/mnt/model/qwen/4b" in args
    assert "--startup-timeout=90" in args
    assert args[-1] == "--dtype=float32", "the manifest's arguments come last, so they win"
    here = ReplicaLayout(
        model_dir="/m",
        run_dir="/run/x",
        state_dir="/state",
        config_file="/c.json",
        port=18000,
        host="127.0.0.1",
        admin_port=18001,
        metrics_port=0,
        probe_port=0,
    )
    assert make_engine_args(one, here)[1:7] == [
        "--model=/m",
        "--served-model-name=qwen",
        "--host=127.0.0.1",
        "--port=18000",
        "--admin-port=18001",
        "--run-dir=/run/x",
    ]
    assert "--config=/c.json" in make_supervisor_args(here)


def test_the_supervisor_reads_what_the_config_map_holds() -> None:
    made = objects(
        engine={"resources": {"limits": {"memory": "8Gi"}}},
        memory={"host": {"growthBudget": "64Mi", "window": "2h"}, "warmup": "1m30s"},
        supervision={
            "mode": "Recover",
            "maxUnavailable": 2,
            "ladder": ["Trim", "PodReplace"],
            "maintenanceWindow": {
                "start": "22:30",
                "duration": "90m",
                "days": ["Sunday", "Monday"],
            },
        },
    )
    config = decode_config(made["ConfigMap"]["data"][CONFIG_FILE].encode())
    assert config.memory.host is not None
    assert config.memory.host.growth_bytes == 64 << 20
    assert config.memory.host.limit_bytes == 8 << 30
    assert config.memory.host.window_s == 7200
    assert config.memory.warmup_s == 90
    assert config.memory.device is None
    assert config.supervision.ladder == (Action.TRIM, Action.POD_REPLACE)
    assert config.supervision.maintenance_window == MaintenanceWindow(81_000.0, 5_400.0, (0, 6))
    assert config.slots == ("qwen-restart-0", "qwen-restart-1")
    assert made["Role"]["rules"][-1]["resourceNames"] == list(config.slots)
    assert made["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 2


def claiming(source: dict[str, str], *containers: str) -> dict[str, Any]:
    users = [
        {"name": name, "resources": {"claims": [{"name": "gpu"}]}}
        for name in ("engine", *containers)
    ]
    return {"spec": {"resourceClaims": [{"name": "gpu", **source}], "containers": users}}


def selecting(labels: dict[str, str]) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"nodeSelector": labels}}}


def wanting(label: str, value: str) -> dict[str, Any]:
    wanted = {"key": label, "operator": "In", "values": [value]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    return {"podTemplate": {"spec": {"affinity": affinity}}}


@pytest.mark.parametrize(
    ("spec", "shared"),
    [
        ({}, False),
        ({"engine": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}, False),
        ({"engine": {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}}, False),
        ({"engine": {"resources": {"limits": {"rdma/rdma_shared_device_a": 1}}}}, False),
        ({"engine": {"resources": {"limits": {"nvidia.com/gpu.shared": 1}}}}, True),
        ({"engine": {"resources": {"limits": {"nvidia.com/gpumem": 20000}}}}, True),
        ({"engine": {"resources": {"limits": {"nvidia.com/gpumem-percentage": 50}}}}, True),
        ({"engine": {"resources": {"limits": {"aliyun.com/gpu-mem": 20}}}}, True),
        ({"engine": {"resources": {"limits": {"volcano.sh/vgpu-number": 1}}}}, True),
        ({"engine": {"resources": {"limits": {"tencent.com/vcuda-memory": 30}}}}, True),
        ({"podTemplate": claiming({"resourceClaimName": "card"})}, True),
        ({"podTemplate": claiming({"resourceClaimTemplateName": "one-gpu"})}, False),
        ({"podTemplate": claiming({"resourceClaimTemplateName": "one-gpu"}, "embedder")}, True),
        ({"podTemplate": {"metadata": {"annotations": {"gpu-fraction": "0.5"}}}}, True),
        (selecting({"nvidia.com/gpu.sharing-strategy": "time-slicing"}), True),
        (selecting({"nvidia.com/gpu.sharing-strategy": "none"}), False),
        (selecting({"cloud.google.com/gke-gpu-sharing-strategy": "mps"}), True),
        (wanting("nvidia.com/gpu.sharing-strategy", "mps"), True),
        (wanting("nvidia.com/gpu.product", "NVIDIA-H100"), False),
        ({"memory": {"sharedDevice": True}}, True),
    ],
)
def test_a_device_that_others_use_is_named(spec: dict[str, Any], shared: bool) -> None:
    assert make_supervisor_config(service(**spec)).memory.shared_device is shared


def test_the_exporter_of_the_node_is_read_where_its_port_is_named() -> None:
    def environment(**spec: Any) -> dict[str, Any]:
        (supervisor,) = template(**spec)["spec"]["initContainers"]
        return {one.pop("name"): one for one in supervisor["env"]}

    assert set(environment()) == {"POD_NAME", "POD_NAMESPACE"}
    found = environment(supervisor={"dcgmExporterPort": 9400})
    assert found["DCGM_EXPORTER_PORT"] == {"value": "9400"}
    assert found["NODE_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.hostIP"


def test_without_a_cluster_there_are_no_slots() -> None:
    one = service()
    local = one.model_copy(update={"metadata": one.metadata.model_copy(update={"uid": ""})})
    assert make_supervisor_config(local).slots == ()


def test_a_reference_needs_a_cluster() -> None:
    secret = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    one = service(engine={"env": [{"name": "A", "value": "1"}, secret]})
    with pytest.raises(ValueError, match=r"spec\.engine\.env\[1\]\.valueFrom: KEY"):
        make_process_env(one)
    keyed = service(engine={"apiKeySecretRef": {"name": "clients"}})
    with pytest.raises(
        ValueError, match=r"spec\.engine\.apiKeySecretRef can only be used in a cluster"
    ):
        make_process_env(keyed)
    assert template(engine={"env": [secret]})["spec"]["containers"][0]["env"][-1] == secret


def test_with_devices_a_roll_out_needs_no_spare_replica() -> None:
    gpu = objects(engine={"resources": {"limits": {"nvidia.com/gpu": 1}}})["Deployment"]
    assert gpu["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    cpu = objects(model={"uri": "file:///models/q"})["Deployment"]
    assert cpu["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


@pytest.mark.parametrize(
    ("change", "rolls"),
    [
        ({"replicas": 5}, False),
        ({"memory": {"host": {"growthBudget": "1Gi"}}}, False),
        ({"supervision": {"mode": "Recover", "stall": {"timeout": "9s"}}}, False),
        ({"engine": {"port": 8000}}, False),
        ({"engine": {"args": ["--dtype=auto"]}}, True),
        ({"supervision": {"drain": {"deadline": "31s"}}}, True),
        ({"restart": {"id": "1"}}, True),
        ({"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}}, True),
    ],
)
def test_only_what_concerns_pods_rolls_them(change: dict[str, Any], rolls: bool) -> None:
    assert (compute_pod_hash(service(**change)) != compute_pod_hash(service())) is rolls


def test_a_pinned_template_is_used_as_it_is() -> None:
    pinned = {"spec": {"containers": [{"name": "engine", "image": "old"}]}}
    made = {item["kind"]: item for item in render_objects(service(), IMAGES, pinned)}
    assert made["Deployment"]["spec"]["template"] == pinned
    assert made["ControllerRevision"]["data"] == pinned
