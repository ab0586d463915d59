"""inject: a supervisor in the published manifests' shapes, and nothing else changed."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_api import supervisor_config
from plimsoll_api.engines import EngineType
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.serving import SupervisorSettings
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.supervision_policy import SelectedEngine
from plimsoll_api.supervisor_config import CONTAINER_ENV, SupervisorConfig
from plimsoll_cli.errors import UsageError
from plimsoll_cli.inject import command
from plimsoll_cli.inject.command import Selection, parse_selector
from plimsoll_operator.injection import engine
from plimsoll_operator.injection.configuration import InjectedDocument
from plimsoll_operator.injection.documents import inject_document
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import InjectionOptions

EXAMPLES = Path(__file__).parents[3] / "examples" / "inject"
OPTIONS = InjectionOptions(image="registry.example/supervisor:1")
EVERYTHING = Selection()
Object = dict[str, Any]


def named(container: str, port: int | None = None) -> InjectionOptions:
    return replace(OPTIONS, engine=SelectedEngine(container=container, port=port))


def documents(name: str) -> list[Object]:
    return list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))


def done(document: Object, options: InjectionOptions = OPTIONS) -> InjectedDocument:
    made = inject_document(document, options)
    assert made.config_map is not None, made.notes
    return made


def config_map_of(made: InjectedDocument) -> Object:
    assert made.config_map is not None, made.notes
    return made.config_map


def config_of(made: InjectedDocument) -> SupervisorConfig:
    return supervisor_config.decode_config(config_map_of(made)["data"]["supervisor.json"].encode())


def pod_of(document: Object) -> Object:
    spec = document["spec"]
    if "leaderWorkerTemplate" in spec:
        spec = {"template": spec["leaderWorkerTemplate"]["leaderTemplate"]}
    found: Object = spec["template"]["spec"] if "template" in spec else spec.get("predictor", spec)
    return found


@pytest.mark.parametrize(
    ("name", "index", "kind", "port", "model", "limit"),
    [
        ("vllm-deployment", 1, EngineType.VLLM, 8000, "mistralai/Mistral-7B-Instruct-v0.3",
         20 * 10**9),
        ("sglang-deployment", 0, EngineType.SGLANG, 30000, "meta-llama/Llama-3.1-8B-Instruct",
         40 << 30),
        ("kserve-inferenceservice", 0, EngineType.VLLM, 8080, "llama3", 24 << 30),
        ("llm-d", 0, EngineType.VLLM, 8200, "meta-llama/Llama-3.1-8B-Instruct",
         48 << 30),
        ("llm-d", 1, EngineType.VLLM, 8000, "meta-llama/Llama-3.1-8B-Instruct", 48 << 30),
        ("production-stack", 0, EngineType.VLLM, 8000, "meta-llama/Llama-3.1-8B-Instruct",
         64 << 30),
        ("vllm-leaderworkerset", 0, EngineType.VLLM, 8080, "meta-llama/Llama-3.1-405B-Instruct",
         512 << 30),
    ],
)  # fmt: skip
def test_published_shapes(
    name: str, index: int, kind: EngineType, port: int, model: str, limit: int
) -> None:
    document = documents(name)[index]
    made = done(document)
    config = config_of(made)
    assert config.engine.type is kind
    assert config.engine.serving_url == f"http://127.0.0.1:{port}"
    assert config.engine.model == model
    assert config.memory.host is not None
    assert config.memory.host.limit_bytes == limit
    assert config.supervision.mode.value == "Observe"
    pod = pod_of(made.document)
    sidecar = pod["initContainers"][-1]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["image"] == OPTIONS.image
    assert pod["shareProcessNamespace"] is True
    mounted = {mount["name"] for mount in sidecar["volumeMounts"]}
    assert mounted <= {volume["name"] for volume in pod["volumes"]}
    assert config_map_of(made)["metadata"]["name"] == f"{document['metadata']['name']}-supervisor"


@pytest.mark.parametrize(
    ("name", "index", "at"),
    [
        ("vllm-deployment", 1, ("spec", "template", "metadata")),
        ("vllm-leaderworkerset", 0, ("spec", "leaderWorkerTemplate", "leaderTemplate", "metadata")),
        ("kserve-inferenceservice", 0, ("metadata",)),
        ("kserve-inferenceservice", 0, ("spec", "predictor")),
        ("kserve-llminferenceservice", 0, ("spec",)),
    ],
)
def test_a_fraction_of_a_device_is_shared_wherever_its_annotation_stands(
    name: str, index: int, at: tuple[str, ...]
) -> None:
    """Only services read what the KAI scheduler and Run:ai call a pod's part of a device."""

    def shared(document: Object) -> bool:
        made = done(document)
        kept = (config_map_of(made), made.document, *made.others)
        return config_of(made).memory.shared_device or 'shared_device\\":true' in json.dumps(kept)

    document = documents(name)[index]
    assert not shared(document)
    owner = document
    for key in at:
        owner = owner.setdefault(key, {})
    owner.setdefault("annotations", {})["gpu-fraction"] = "0.5"
    assert shared(document)


def test_a_slice_of_a_device_is_shared_and_the_nodes_exporter_is_asked() -> None:
    document = documents("vllm-deployment")[1]
    assert not config_of(done(document)).memory.shared_device
    limits = pod_of(document)["containers"][0]["resources"]["limits"]
    limits["nvidia.com/gpu.shared"] = limits.pop("nvidia.com/gpu", "1")
    made = done(
        document,
        InjectionOptions(OPTIONS.image, supervisor=SupervisorSettings(dcgm_exporter_port=9400)),
    )
    assert config_of(made).memory.shared_device
    claimed = documents("vllm-deployment")[1]
    pod_of(claimed)["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "card"}]
    pod_of(claimed)["containers"][0]["resources"]["claims"] = [{"name": "gpu"}]
    assert config_of(done(claimed)).memory.shared_device, "a claim that other pods may have, too"
    (sidecar,) = pod_of(made.document)["initContainers"]
    assert {"name": "DCGM_EXPORTER_PORT", "value": "9400"} in sidecar["env"]


def marker(container: Object) -> str | None:
    env = container.get("env") or []
    return next((one["value"] for one in env if one["name"] == CONTAINER_ENV), None)


def unset(container: Object) -> Object:
    return {key: value for key, value in container.items() if value != []}


@pytest.mark.parametrize("name", ["vllm-deployment", "sglang-deployment"])
def test_what_was_there_stays(name: str) -> None:
    document = next(one for one in documents(name) if one["kind"] == "Deployment")
    before = copy.deepcopy(document)
    made = done(document).document
    assert document == before, "the argument is not changed"
    old, new = pod_of(before), pod_of(made)
    engine = next(one for one in new["containers"] if marker(one))
    assert marker(engine) == engine["name"], "its processes are known by this"
    engine["env"].pop()
    assert [unset(one) for one in new["containers"]] == [unset(one) for one in old["containers"]]
    assert new["volumes"][: len(old["volumes"])] == old["volumes"]
    assert made["spec"]["selector"] == before["spec"]["selector"]
    labels = made["spec"]["template"]["metadata"]["labels"]
    assert labels == before["spec"]["template"]["metadata"]["labels"] | {
        "plimsoll.dev/service": before["metadata"]["name"]
    }


def test_injecting_twice_is_injecting_once() -> None:
    once = done(documents("vllm-deployment")[1])
    assert done(once.document) == once
    other = done(once.document, InjectionOptions(image="registry.example/supervisor:2"))
    (sidecar,) = pod_of(other.document)["initContainers"]
    assert sidecar["image"] == "registry.example/supervisor:2"


def test_init_containers_stay_before_the_supervisor() -> None:
    document = documents("vllm-deployment")[1]
    pod_of(document)["initContainers"] = [{"name": "download", "image": "x"}]
    names = [one["name"] for one in pod_of(done(document).document)["initContainers"]]
    assert names == ["download", "supervisor"]


def test_the_supervisor_gets_the_engines_user() -> None:
    document = documents("vllm-deployment")[1]
    made = done(document)
    security = pod_of(made.document)["initContainers"][0]["securityContext"]
    assert (security["runAsUser"], security["runAsNonRoot"]) == (0, False)
    assert any("--run-as-user" in note for note in made.notes)
    pod_of(document)["securityContext"] = {"runAsUser": 2000}
    security = pod_of(done(document).document)["initContainers"][0]["securityContext"]
    assert (security["runAsUser"], security["runAsNonRoot"]) == (2000, True)


def test_which_container_is_the_engine_must_be_clear() -> None:
    pod = {"containers": [{"name": "a", "image": "x"}, {"name": "b", "image": "y"}]}
    with pytest.raises(InjectionError, match="select one of a, b with --container"):
        engine.find_engine(pod, "Pod p", replace(OPTIONS, unrecognized=True))
    assert engine.find_engine(pod, "Pod p", OPTIONS) is None
    found = engine.find_engine(pod, "Pod p", named("b", 1))
    assert found is not None
    assert found.type is EngineType.CUSTOM
    with pytest.raises(InjectionError, match="no container 'c'"):
        engine.find_engine(pod, "Pod p", named("c"))
    pod["containers"][1]["image"] = "registry.local:5000/team/vllm:3"
    found = engine.find_engine(pod, "Pod p", OPTIONS)
    assert found is not None
    assert found.container == "b"


@pytest.mark.parametrize(
    ("args", "port", "model"),
    [
        (["serve", "a/b", "--port=9000"], 9000, "a/b"),
        (["serve a/b --port 9001 --served-model-name c"], 9001, "c"),
        (["--model", "m"], 8000, "m"),
        (["serve a/b 'unclosed"], 8000, "a/b"),
    ],
)
def test_words_of_a_command_line(args: list[str], port: int, model: str) -> None:
    container = {"name": "e", "image": "vllm/vllm-openai", "args": args}
    found = engine.find_engine({"containers": [container]}, "Pod p", OPTIONS)
    assert found is not None
    assert (found.port, found.model) == (port, model)


def test_files(tmp_path: Path) -> None:
    text, notes = command.inject_into_file(EXAMPLES / "vllm-deployment.yaml", OPTIONS, EVERYTHING)
    kinds = [one["kind"] for one in yaml.safe_load_all(text)]
    assert kinds == ["Secret", "ConfigMap", "Deployment"]
    assert notes[0].startswith(
        "apps/v1 Deployment mistral-7b: spec.template.spec: vllm in container mistral-7b,"
        " recognized"
    )
    listed = tmp_path / "list.yaml"
    items = documents("sglang-deployment")
    listed.write_text(yaml.safe_dump({"kind": "List", "apiVersion": "v1", "items": items}))
    text, _ = command.inject_into_file(listed, OPTIONS, EVERYTHING)
    config_map, changed = yaml.safe_load_all(text)
    assert config_map["kind"] == "ConfigMap"
    assert [one["kind"] for one in changed["items"]] == ["Deployment", "Service"]
    assert changed["items"][0]["spec"]["template"]["spec"]["shareProcessNamespace"] is True


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("apiVersion: v1\nkind: Service\n", "contains Service, but plimsoll inject supports only"),
        ("", "contains nothing"),
        ("a: [", "not valid YAML"),
        ("- 1\n", "document 1: must be a Kubernetes object, not a list"),
        ("apiVersion: v1\n", "document 1: kind is missing"),
        ("kind: &a {b: *a}\n", "x.yaml:1:14: the alias 'a' refers to the value that contains it"),
        (
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}\n",
            "Deployment x: spec.template.spec: left unchanged: no container runs vLLM or SGLang",
        ),
        (
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}\nspec: {template: []}\n",
            "Deployment x: spec.template must be an object",
        ),
    ],
)
def test_what_cannot_be_injected_is_said(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(content)
    with pytest.raises(UsageError, match=expected):
        command.inject_into_file(file, OPTIONS, EVERYTHING)
    with pytest.raises(UsageError, match="cannot read the file"):
        command.inject_into_file(tmp_path / "absent", OPTIONS, EVERYTHING)


def test_the_supervisor_sees_the_engines_shared_memory_where_the_pod_brings_a_volume() -> None:
    document = documents("vllm-deployment")[1]
    (shm,) = [
        one
        for one in pod_of(document)["containers"][0]["volumeMounts"]
        if one["mountPath"] == "/dev/shm"
    ]
    once = done(document).document
    (sidecar,) = pod_of(once)["initContainers"]
    assert shm in sidecar["volumeMounts"]
    pod_of(document)["containers"][0]["volumeMounts"].remove(shm)
    (sidecar,) = pod_of(done(document).document)["initContainers"]
    assert all(one["mountPath"] != "/dev/shm" for one in sidecar["volumeMounts"])


PROBED = InjectionOptions(image=OPTIONS.image, probe=True)


def environment(document: Object) -> dict[str, Any]:
    (engine,) = pod_of(document)["containers"]
    return {one["name"]: one.get("value") for one in engine.get("env") or []}


@pytest.mark.parametrize("name", ["vllm-deployment", "sglang-deployment"])
def test_the_probe_is_copied_and_found_on_the_pythonpath(name: str) -> None:
    document = next(one for one in documents(name) if one["kind"] == "Deployment")
    pod = pod_of(done(document, PROBED).document)
    copying, supervisor = pod["initContainers"]
    assert copying["command"] == ["python", "-m", "plimsoll_probe.install", "/opt/plimsoll-probe"]
    assert "restartPolicy" not in copying
    (engine,) = pod["containers"]
    mounts = {mount["name"]: mount for mount in engine["volumeMounts"]}
    assert mounts["plimsoll-probe"]["readOnly"]
    assert mounts["plimsoll-probe"]["mountPath"] == "/opt/plimsoll-probe"
    sockets = mounts["plimsoll-probe-run"]["mountPath"]
    env = {one["name"]: one.get("value") for one in engine["env"]}
    assert env["PYTHONPATH"] == "/opt/plimsoll-probe"
    assert env["PLIMSOLL_PROBE_DIR"] == sockets
    assert {"name": "PLIMSOLL_PROBE_DIR", "value": sockets} in supervisor["env"]
    read = next(m for m in supervisor["volumeMounts"] if m["name"] == "plimsoll-probe-run")
    assert read["readOnly"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {m["name"] for c in (copying, supervisor, engine) for m in c["volumeMounts"]} <= volumes


def test_a_pythonpath_that_is_there_is_kept_in_its_place() -> None:
    document = documents("vllm-deployment")[1]
    (engine,) = pod_of(document)["containers"]
    engine["env"] = [
        {"name": "A", "value": "1"},
        {"name": "PYTHONPATH", "value": "/otel:/app"},
        {"name": "B", "value": "$(PYTHONPATH)"},
    ]
    once = done(document, PROBED)
    assert list(environment(once.document)) == [
        "A", "PYTHONPATH", "B", "PLIMSOLL_CONTAINER", "PLIMSOLL_PROBE_DIR",
    ]  # fmt: skip
    assert environment(once.document)["PYTHONPATH"] == "/otel:/app:/opt/plimsoll-probe"
    assert done(once.document, PROBED) == once, "injecting twice is injecting once"
    assert done(once.document) == done(document), "and without --probe it is gone"


def test_a_probe_without_a_pythonpath_leaves_nothing_behind() -> None:
    document = documents("vllm-deployment")[1]
    assert done(done(document, PROBED).document) == done(document)


def test_a_pythonpath_from_elsewhere_is_an_error_that_names_it() -> None:
    document = documents("vllm-deployment")[1]
    (engine,) = pod_of(document)["containers"]
    source = {"configMapKeyRef": {"name": "paths", "key": "python"}}
    engine["env"] = [{"name": "PYTHONPATH", "valueFrom": source}]
    with pytest.raises(
        InjectionError, match=r"containers\[\S+\]: PYTHONPATH is set with valueFrom"
    ):
        done(document, PROBED)


def test_kserves_model_gets_the_probe() -> None:
    pod = pod_of(done(documents("kserve-inferenceservice")[0], PROBED).document)
    assert {"name": "PYTHONPATH", "value": "/opt/plimsoll-probe"} in pod["model"]["env"]


def workload(api_version: str, kind: str, spec: Object, **metadata: Any) -> Object:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"name": "w"} | metadata,
        "spec": spec,
    }


def vllm(**container: Any) -> Object:
    return {"name": "engine", "image": "vllm/vllm-openai:v0.24.0"} | container


def deployment(container: Object, **pod: Any) -> Object:
    return workload(
        "apps/v1", "Deployment", {"template": {"spec": {"containers": [container]} | pod}}
    )


POD = {"containers": [vllm()]}
SHAPES = [
    (workload("v1", "Pod", POD), ("spec",)),
    (workload("apps/v1", "StatefulSet", {"template": {"spec": POD}}), ("spec", "template", "spec")),
    (workload("batch/v1", "Job", {"template": {"spec": POD}}), ("spec", "template", "spec")),
    (
        workload("batch/v1", "CronJob", {"jobTemplate": {"spec": {"template": {"spec": POD}}}}),
        ("spec", "jobTemplate", "spec", "template", "spec"),
    ),
    (
        workload(
            "ray.io/v1",
            "RayService",
            {"rayClusterConfig": {"headGroupSpec": {"template": {"spec": POD}}}},
        ),
        ("spec", "rayClusterConfig", "headGroupSpec", "template", "spec"),
    ),
]


@pytest.mark.parametrize(("document", "path"), SHAPES)
def test_each_kind_of_workload_gets_its_supervisor(document: Object, path: tuple[str, ...]) -> None:
    # What KubeRay starts is Ray, and nothing in the document shows where the engine listens.
    port = 8000 if document["kind"] == "RayService" else None
    found = done(document, replace(OPTIONS, engine=SelectedEngine(port=port))).document
    for key in path:
        found = found[key]
    assert [one["name"] for one in found["initContainers"]] == ["supervisor"]


def test_what_runs_neither_vllm_nor_sglang_is_left_alone() -> None:
    web = deployment({"name": "web", "image": "nginx", "ports": [{"containerPort": 8080}]})
    made = inject_document(web, OPTIONS)
    assert made.document == web
    assert made.config_map is None
    (note,) = made.notes
    assert note.startswith(
        "apps/v1 Deployment w: spec.template.spec: left unchanged: no container runs"
    )
    assert "(containers: web): to supervise one of them" in note
    for options in (
        InjectionOptions(OPTIONS.image, unrecognized=True),
        InjectionOptions(OPTIONS.image, SelectedEngine(container="web")),
    ):
        assert config_of(done(web, options)).engine.type is EngineType.CUSTOM


def test_one_workload_that_cannot_be_supervised_names_itself(tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    good, bad = deployment(vllm()), deployment(vllm(args=["--port", "70000"]))
    file.write_text(yaml.safe_dump_all([good, bad | {"metadata": {"name": "bad"}}]))
    wrong = (
        "all.yaml: document 2: apps/v1 Deployment bad: "
        r"spec.template.spec.containers\[engine\]: --port: 70000 is not"
    )
    with pytest.raises(UsageError, match=wrong):
        command.inject_into_file(file, OPTIONS, Selection(names=frozenset({"bad"})))
    text, notes = command.inject_into_file(file, OPTIONS, EVERYTHING)
    assert [one["metadata"]["name"] for one in yaml.safe_load_all(text)] == [
        "w-supervisor", "w", "bad",
    ]  # fmt: skip
    assert notes[-1].startswith(
        "document 2: apps/v1 Deployment bad: spec.template.spec.containers[engine]"
    )
    assert notes[-1].endswith("(left unchanged)")
    text, _ = command.inject_into_file(file, OPTIONS, Selection(names=frozenset({"w"})))
    assert [one["metadata"]["name"] for one in yaml.safe_load_all(text)] == [
        "w-supervisor", "w", "bad",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="no object in the file matches --name and --selector"):
        command.inject_into_file(file, OPTIONS, Selection(names=frozenset({"absent"})))


@pytest.mark.parametrize(
    ("selector", "labels", "expected"),
    [
        ("app=vllm", {"app": "vllm"}, True),
        ("app==vllm,tier!=web", {"app": "vllm"}, True),
        ("app=vllm,tier!=web", {"app": "vllm", "tier": "web"}, False),
        ("app in (vllm, sglang),!canary", {"app": "sglang"}, True),
        ("app in (vllm,sglang)", {}, False),
        ("app notin (web)", {}, True),
        ("example.com/engine", {"example.com/engine": ""}, True),
        ("!canary", {"canary": "yes"}, False),
    ],
)
def test_selectors_are_those_of_kubectl(
    selector: str, labels: dict[str, str], expected: bool
) -> None:
    chosen = Selection(requirements=parse_selector(selector))
    assert chosen.matches({"metadata": {"labels": labels}}) is expected


@pytest.mark.parametrize("selector", ["", "app=vllm,", "app=>3", "in (a)", "app in a"])
def test_a_selector_of_another_form_is_an_error(selector: str) -> None:
    with pytest.raises(UsageError, match=r"--selector: .* is not a label requirement"):
        parse_selector(selector)


@pytest.mark.parametrize("port", [80, 8001])
def test_external_engines_may_serve_where_ours_may_not(port: int) -> None:
    made = done(deployment(vllm(args=[f"--port={port}"])))
    assert config_of(made).engine.serving_url == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("container", "pod", "message"),
    [
        (vllm(), {"hostPID": True}, r"Deployment w: spec.template.spec.hostPID: true: .* every"),
        (vllm(args=["--port=9464"]), {}, "ports 9464 and 9465 are reserved"),
        (
            vllm(ports=[{"containerPort": 8000}, {"containerPort": 9465}]),
            {},
            r"spec.template.spec.containers\[engine\].ports\[1\].containerPort: ports 9464",
        ),
        (vllm(ports=[{"containerPort": "http"}]), {}, r"ports\[0\].containerPort: 'http' is not"),
        (vllm(resources={"limits": {"memory": "much"}}), {}, r"limits.memory: 'much' is not a v"),
        (
            vllm(),
            {"securityContext": {"runAsUser": "me"}},
            "runAsUser: 'me' is not a valid user ID",
        ),
    ],
)
def test_a_pod_that_cannot_be_supervised_is_an_error_that_names_the_field(
    container: Object, pod: Object, message: str
) -> None:
    with pytest.raises(InjectionError, match=message):
        inject_document(deployment(container, **pod), OPTIONS)


def test_a_fixed_budget_above_the_limit_is_an_error_and_one_that_sets_itself_is_not() -> None:
    small = deployment(vllm(resources={"limits": {"memory": "1Gi"}}))
    fixed = replace(OPTIONS, memory=MemoryPolicy(host=MemoryBudget(growth_bytes=2 << 30)))
    with pytest.raises(InjectionError, match=r"1Gi is less than --host-budget 2\.0 GiB"):
        inject_document(small, fixed)
    inject_document(small, OPTIONS)


@pytest.mark.parametrize(
    ("context", "hidden"),
    [
        ({}, True),
        ({"runAsUser": 0}, True),
        ({"runAsUser": 0, "capabilities": {"drop": ["ALL"]}}, False),
        ({"runAsUser": 1000}, False),
        ({"runAsUser": 1000, "capabilities": {"add": ["SYS_NICE"]}}, True),
    ],
)
def test_an_unknown_engine_that_the_supervisor_cannot_see_is_announced(
    context: Object, hidden: bool
) -> None:
    document = deployment({"name": "e", "image": "mine", "securityContext": context})
    custom = InjectionOptions(OPTIONS.image, unrecognized=True, engine=SelectedEngine(port=8000))
    notes = done(document, custom).notes
    assert any("does not find the engine" in note for note in notes) is hidden
    known = done(deployment(vllm(securityContext=context))).notes
    assert not any("does not find the engine" in note for note in known)


def test_another_user_for_the_supervisor_is_announced() -> None:
    document = deployment(vllm(securityContext={"runAsUser": 1000}))
    notes = done(document, InjectionOptions(OPTIONS.image, run_as_user=2000)).notes
    assert any("runs as user 1000 but the supervisor as 2000" in note for note in notes)


def test_no_port_name_stands_twice_in_a_pod() -> None:
    ports = [
        {"name": "http", "containerPort": 8000},
        {"name": "metrics", "containerPort": 8002},
    ]
    pod = pod_of(done(deployment(vllm(ports=ports))).document)
    named = {port["name"]: port["containerPort"] for port in pod["initContainers"][0]["ports"]}
    assert named == {"metrics-9464": 9464, "probe": 9465}


def test_an_engine_that_serves_tls_is_asked_by_https() -> None:
    made = done(deployment(vllm(args=["--ssl-certfile", "/tls/tls.crt"])))
    assert config_of(made).engine.serving_url == "https://127.0.0.1:8000"
    probe = {"httpGet": {"path": "/health", "port": 8443, "scheme": "HTTPS"}}
    custom = {"name": "e", "image": "mine", "readinessProbe": probe}
    made = done(deployment(custom), InjectionOptions(OPTIONS.image, unrecognized=True))
    assert config_of(made).engine.serving_url == "https://127.0.0.1:8443"


@pytest.mark.parametrize("policy", [None, "RecreateGroupOnPodRestart"])
def test_a_group_that_restarts_with_any_container_needs_consent(policy: str | None) -> None:
    group: Object = {"workerTemplate": {"spec": POD}, "leaderTemplate": {"spec": POD}}
    if policy is not None:
        group["restartPolicy"] = policy
    document = workload(
        "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", {"leaderWorkerTemplate": group}
    )
    with pytest.raises(InjectionError, match="use --allow-group-restarts"):
        inject_document(document, OPTIONS)
    made = done(document, InjectionOptions(OPTIONS.image, group_restarts=True))
    templates = made.document["spec"]["leaderWorkerTemplate"]
    assert "initContainers" in templates["leaderTemplate"]["spec"]
    assert templates["workerTemplate"] == group["workerTemplate"], "it serves no port"
    assert any("workerTemplate.spec: left unchanged" in note for note in made.notes)
    group["restartPolicy"] = "None"
    assert inject_document(document, OPTIONS).config_map is not None


def test_the_workers_of_a_multi_node_predictor_are_left_alone_and_named() -> None:
    workers = {"size": 2, "containers": [{"name": "worker-container", "image": "vllm/x"}]}
    document = documents("kserve-inferenceservice")[0]
    document["spec"]["predictor"]["workerSpec"] = workers
    made = done(document)
    assert made.document["spec"]["predictor"]["workerSpec"] == workers
    assert any("spec.predictor.workerSpec: left unchanged" in note for note in made.notes)


def test_a_router_is_supervised_as_a_custom_engine_once_it_is_named() -> None:
    document = documents("production-stack")[1]
    assert inject_document(document, OPTIONS).config_map is None
    made = done(
        document, InjectionOptions(OPTIONS.image, SelectedEngine(container="router-container"))
    )
    config = config_of(made)
    assert config.engine.type is EngineType.CUSTOM
    assert config.engine.serving_url == "http://127.0.0.1:8000"
    security = pod_of(made.document)["initContainers"][0]["securityContext"]
    assert security["runAsUser"] == 1000, "the router's, whose sockets it reads"


def test_what_a_file_writes_once_for_two_pods_is_changed_in_one(tmp_path: Path) -> None:
    file = tmp_path / "alias.yaml"
    shape = deployment(vllm())
    shape["spec"]["other"] = shape["spec"]["template"]
    file.write_text(yaml.safe_dump(shape))
    assert "*id" in file.read_text()
    text, _ = command.inject_into_file(file, OPTIONS, EVERYTHING)
    changed = list(yaml.safe_load_all(text))[1]
    assert changed["spec"]["other"] == {"spec": {"containers": [vllm()]}}


def test_a_name_that_begins_with_a_digit_or_is_generated_is_no_obstacle() -> None:
    assert config_of(done(deployment(vllm()) | {"metadata": {"name": "7b"}})).service.name == "7b"
    document = workload("v1", "Pod", POD)
    document["metadata"] = {"generateName": "vllm-"}
    assert config_map_of(done(document))["metadata"]["name"] == "vllm-supervisor"


@pytest.mark.parametrize(
    ("version", "kind", "mode"),
    [
        ("serving.kserve.io/v1beta1", "InferenceService", "Serverless"),
        ("serving.kserve.io/v1beta1", "InferenceService", "Knative"),
        ("serving.knative.dev/v1", "Service", ""),
    ],
)
def test_knative_is_refused_with_the_reason(version: str, kind: str, mode: str) -> None:
    annotations = {"serving.kserve.io/deploymentMode": mode}
    document = workload(version, kind, {}, annotations=annotations)
    with pytest.raises(InjectionError, match="Knative rejects shareProcessNamespace"):
        inject_document(document, OPTIONS)


@pytest.mark.parametrize("policy", ["Never", "OnFailure"])
def test_an_engine_that_does_not_start_again_is_only_observed(policy: str) -> None:
    document = deployment(vllm(), restartPolicy=policy)
    assert done(document).config_map is not None
    acting = InjectionOptions(OPTIONS.image, supervision=Supervision(mode=Mode.RECOVER))
    with pytest.raises(InjectionError, match=f"restartPolicy: {policy}: .* use --mode Observe"):
        inject_document(document, acting)


def test_a_platform_that_assigns_users_is_left_to_it() -> None:
    made = done(deployment(vllm()), InjectionOptions(OPTIONS.image, assigned_user=True))
    context = pod_of(made.document)["initContainers"][0]["securityContext"]
    assert "runAsUser" not in context
    assert "runAsNonRoot" not in context
    assert any("the platform" in note for note in made.notes)


def test_a_patch_for_kustomize_is_named() -> None:
    made = inject_document(deployment({"name": "engine", "args": ["--model", "m"]}), OPTIONS)
    assert made.config_map is None
    assert "inject the output of kustomize build" in made.notes[0]


@pytest.mark.parametrize(
    ("model", "port"),
    [
        ({"modelFormat": {"name": "vLLM"}, "runtime": "granite", "name": ""}, 8080),
        ({"modelFormat": {"name": "sglang"}, "args": ["--port=9000", "--enable-metrics"]}, 9000),
    ],
)
def test_kserves_container_has_kserves_name_and_port(model: Object, port: int) -> None:
    document = workload(
        "serving.kserve.io/v1beta1", "InferenceService", {"predictor": {"model": model}}
    )
    made = done(document)
    assert config_of(made).engine.container == "kserve-container"
    assert config_of(made).engine.serving_url == f"http://127.0.0.1:{port}"
    assert marker(made.document["spec"]["predictor"]["model"]) == "kserve-container"
