"""inject with a SupervisionPolicy, on charts' manifests, and what it refuses to replace:
``injection/documents.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from docs.tools.blocks import ROOT, blocks
from plimsoll_api import supervisor_config
from plimsoll_api.engines import EngineType
from plimsoll_api.supervision_policy import SelectedEngine, SelectedEngineType
from plimsoll_api.supervisor_config import SupervisorConfig
from plimsoll_cli.errors import UsageError
from plimsoll_cli.inject import command
from plimsoll_cli.inject.command import Selection
from plimsoll_cli.main import app
from plimsoll_operator.injection.documents import inject_document
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import InjectionOptions
from plimsoll_operator.injection.policy import inject_pod
from plimsoll_operator.render.containers import Images
from tests.pod_specs import policy as read_policy

EXAMPLES = ROOT / "examples" / "inject"
THIS = "tests/unit/cli/test_inject_policy.py"
IMAGE = "registry.example/supervisor:1"
FLAG = ("--supervisor-image", IMAGE)
Object = dict[str, Any]


def policy(**spec: Any) -> Object:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {"name": "engines"},
        "spec": {"selector": {"matchLabels": {"app": "vllm"}}} | spec,
    }


def deployment(name: str = "w", labels: Object | None = None, **pod: Any) -> Object:
    container = {"name": "engine", "image": "vllm/vllm-openai:v1", "args": ["--model", "m"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "template": {
                "metadata": {"labels": {"app": "vllm"} if labels is None else labels},
                "spec": {"containers": [container]} | pod,
            }
        },
    }


def write(path: Path, *documents: Object) -> str:
    path.write_text(yaml.safe_dump_all(documents))
    return str(path)


def plimsoll(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["inject", *arguments], input=stdin)


def objects(result: Result) -> list[Object]:
    assert result.exit_code == 0, result.exception
    return list(yaml.safe_load_all(result.stdout))


def config_of(config_map: Object) -> SupervisorConfig:
    return supervisor_config.decode_config(config_map["data"]["supervisor.json"].encode())


def test_a_policy_says_what_flags_would(tmp_path: Path) -> None:
    memory = {"host": {"growthBudget": "1Gi", "window": "6h"}, "warmup": "2m"}
    wanted = policy(
        memory=memory,
        supervision={"mode": "Recover", "drain": {"deadline": "9s"}},
        engine={"port": 9000},
        probe={"enabled": True},
    )
    file = write(tmp_path / "policy.yaml", wanted)
    done = plimsoll("-f", "-", "--policy", file, *FLAG, stdin=yaml.safe_dump(deployment()))
    config_map, workload = objects(done)
    config = config_of(config_map)
    assert config.memory.host is not None
    assert (config.memory.host.growth_bytes, config.memory.host.window_s) == (1 << 30, 6 * 3600.0)
    assert (config.memory.warmup_s, config.memory.device) == (120.0, None)
    assert (config.supervision.mode.value, config.supervision.drain.deadline_s) == ("Recover", 9.0)
    assert config.engine.serving_url == "http://127.0.0.1:9000"
    pod = workload["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["initContainers"]] == ["plimsoll-probe", "supervisor"]
    assert "there are no restart slots" in done.stderr


def test_flags_for_the_supervisors_container(tmp_path: Path) -> None:
    full = {"limits": {"cpu": "12", "memory": "48Gi"}}
    document = deployment(imagePullSecrets=[{"name": "hub"}])
    document["spec"]["template"]["spec"]["containers"][0]["resources"] = full
    text = yaml.safe_dump(document)

    def pod_of(result: Result) -> Object:
        found: Object = objects(result)[1]["spec"]["template"]["spec"]
        return found

    plain = plimsoll("-f", "-", *FLAG, stdin=text)
    assert pod_of(plain)["initContainers"][-1]["resources"] == {
        "limits": {"cpu": "200m", "memory": "256Mi"},
        "requests": {"cpu": "200m", "memory": "256Mi"},
    }
    assert "Guaranteed" not in plain.stderr
    own = ("--supervisor-requests=cpu=20m,memory=64Mi", "--supervisor-limits=memory=128Mi")
    done = plimsoll("-f", "-", *FLAG, *own, "--image-pull-secret=team", stdin=text)
    pod = pod_of(done)
    assert pod["initContainers"][-1]["resources"] == {
        "limits": {"memory": "128Mi"},
        "requests": {"cpu": "20m", "memory": "64Mi"},
    }
    assert pod["imagePullSecrets"] == [{"name": "hub"}, {"name": "team"}]
    assert "loses the QoS class Guaranteed" in done.stderr
    assert "service account" not in done.stderr
    bare = plimsoll(
        "-f", "-", *FLAG, "--image-pull-secret=team", stdin=yaml.safe_dump(deployment())
    )
    assert "does not add those of the service account" in bare.stderr
    settings = {"imagePullSecrets": [{"name": "policy"}], "dcgmExporterPort": 9400}
    file = write(tmp_path / "policy.yaml", policy(supervisor=settings))
    pod = pod_of(plimsoll("-f", "-", "--policy", file, *FLAG, stdin=text))
    assert pod["imagePullSecrets"] == [{"name": "hub"}, {"name": "policy"}]
    assert {"name": "DCGM_EXPORTER_PORT", "value": "9400"} in pod["initContainers"][-1]["env"]
    for flag, said in (
        ("--supervisor-requests=cpu=lots", "--supervisor-requests: 'lots' is not a valid"),
        ("--supervisor-limits=memory", "--supervisor-limits: 'memory' has no amount: use NAME="),
        ("--image-pull-secret=A_B", "--image-pull-secret: "),
        ("--host-budget=2", "--host-budget: must be at least 1Mi, not '2': without a unit"),
        ("--supervisor-image=", "--supervisor-image: '' is not a container image"),
        ("--supervisor-image=s: 1", "--supervisor-image: 's: 1' is not a container image"),
    ):
        wrong = plimsoll("-f", "-", *FLAG, flag, stdin=text)
        assert isinstance(wrong.exception, UsageError)
        assert str(wrong.exception).startswith(said)


def test_the_webhook_adds_the_same_supervisor() -> None:
    """But for what differs by purpose: the token, the configuration and the pod's own engine."""
    document = deployment(securityContext={"runAsUser": 1000})
    made = inject_document(document, InjectionOptions(IMAGE)).document["spec"]["template"]["spec"]
    pod = {
        "metadata": {"labels": {"app": "vllm"}},
        "spec": document["spec"]["template"]["spec"],
    }
    admitted = inject_pod(pod, read_policy(), Images("engine", IMAGE)).pod["spec"]
    ours, theirs = made["initContainers"][0], admitted["initContainers"][0]
    assert theirs["env"][:-1] == ours["env"]
    assert theirs["env"][-1]["name"] == "PLIMSOLL_ENGINE"
    mounts = [one for one in theirs["volumeMounts"] if one["name"] != "plimsoll-token"]
    assert theirs | {"env": ours["env"], "volumeMounts": mounts} == ours
    assert admitted["containers"] == made["containers"]


def test_a_policy_leaves_what_it_does_not_select(tmp_path: Path) -> None:
    file = write(tmp_path / "policy.yaml", policy())
    both = write(tmp_path / "all.yaml", deployment(), deployment("other", {"app": "web"}))
    done = plimsoll("-f", both, "--policy", file, *FLAG)
    assert [one["metadata"]["name"] for one in objects(done)] == ["w-supervisor", "w", "other"]
    assert (
        f"Deployment other: spec.template.spec: left unchanged: spec.selector in {file} does"
        in (done.stderr)
    )
    assert "(app=web)" in done.stderr
    elsewhere = policy()
    elsewhere["metadata"]["namespace"] = "ml"
    file = write(tmp_path / "ml.yaml", elsewhere)
    there = deployment("there")
    there["metadata"]["namespace"] = "prod"
    done = plimsoll(
        "-f", write(tmp_path / "two.yaml", deployment(), there), "--policy", file, *FLAG
    )
    assert "Deployment there: left unchanged: the namespace of the document is prod" in done.stderr


def test_a_policy_and_its_flags_exclude_each_other(tmp_path: Path) -> None:
    file, manifest = write(tmp_path / "p.yaml", policy()), write(tmp_path / "d.yaml", deployment())
    flags = ("--mode", "Recover", "--host-budget", "1Gi")
    done = plimsoll("-f", manifest, "--policy", file, *flags, *FLAG)
    assert isinstance(done.exception, UsageError)
    assert "either --policy or --mode, --host-budget, not both" in str(done.exception)
    wrong = write(tmp_path / "wrong.yaml", policy(memory={"host": {"growth": "1Gi"}}))
    done = plimsoll("-f", manifest, "--policy", wrong, *FLAG)
    assert f"{wrong}: spec.memory" in str(done.exception)
    done = plimsoll("-f", manifest, "--policy", manifest, *FLAG)
    assert "use a manifest of kind SupervisionPolicy" in str(done.exception)
    assert "specify one manifest" in str(plimsoll(*FLAG).exception)


def test_a_policys_errors_name_its_fields(tmp_path: Path) -> None:
    file = write(tmp_path / "p.yaml", policy(memory={"host": {"growthBudget": "8Gi"}}))
    small = deployment()
    container = small["spec"]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"memory": "4Gi"}}
    manifest = write(tmp_path / "d.yaml", {"apiVersion": "v1", "kind": "Service"}, small)
    done = plimsoll("-f", manifest, "--policy", file, *FLAG)
    assert str(done.exception) == (
        f"{manifest}: document 2: apps/v1 Deployment w: spec.template.spec.containers[engine]."
        f"resources.limits.memory: 4Gi is less than spec.memory.host.growthBudget in {file} 8.0"
        " GiB: set a smaller budget, or a higher limit"
    )
    web = deployment()
    web["spec"]["template"]["spec"]["containers"] = [{"name": "web", "image": "nginx"}]
    file = write(tmp_path / "q.yaml", policy(engine={"container": "web"}))
    done = plimsoll("-f", write(tmp_path / "w.yaml", web), "--policy", file, *FLAG)
    assert f"use spec.engine.type: custom in {file}, or --all" in str(done.exception)
    file = write(tmp_path / "c.yaml", policy(engine={"type": "custom", "port": 80}))
    config_map, _ = objects(plimsoll("-f", str(tmp_path / "w.yaml"), "--policy", file, *FLAG))
    assert config_of(config_map).engine.type is EngineType.CUSTOM
    assert config_of(config_map).engine.serving_url == "http://127.0.0.1:80"


def test_a_file_that_was_injected_before_gets_no_second_configuration(tmp_path: Path) -> None:
    for name in ("production-stack", "llm-d", "kserve-llminferenceservice"):
        once = plimsoll(str(EXAMPLES / f"{name}.yaml"), *FLAG)
        first = objects(once)
        again = plimsoll("-", *FLAG, stdin=once.stdout)
        assert objects(again) == first
        raised = plimsoll("-", *FLAG, "--warmup", "9m", stdin=once.stdout)
        assert len(objects(raised)) == len(first)
        maps = [one for one in objects(raised) if one["kind"] == "ConfigMap"]
        assert {config_of(one).memory.warmup_s for one in maps} == {540.0}


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        (
            {"initContainers": [{"name": "supervisor", "image": "supervisord:4"}]},
            r"spec.template.spec.initContainers\[supervisor\]: this name is reserved",
        ),
        (
            {"volumes": [{"name": "plimsoll-state", "emptyDir": {}}]},
            r"spec.template.spec.volumes\[plimsoll-state\]: this name is reserved for a volume",
        ),
        ({"os": {"name": "windows"}}, "spec.template.spec.os.name: windows"),
        (
            {"resources": {"limits": {"memory": "1Gi"}}},
            "spec.template.spec.resources: the pod must not limit",
        ),
        (
            {"securityContext": {"runAsNonRoot": True}},
            r"containers\[engine\].securityContext: runAsNonRoot is true but runAsUser is not set.*"
            "set --run-as-user",
        ),
    ],
)
def test_what_is_not_ours_is_never_replaced(pod: Object, message: str) -> None:
    with pytest.raises(InjectionError, match=message):
        inject_document(deployment(**pod), InjectionOptions(IMAGE))


def test_a_foreign_supervisor_among_the_containers_is_refused() -> None:
    document = deployment()
    containers = document["spec"]["template"]["spec"]["containers"]
    containers.append({"name": "supervisor", "image": "x"})
    with pytest.raises(
        InjectionError, match=r"containers\[supervisor\].*this name is reserved for a container"
    ):
        inject_document(document, InjectionOptions(IMAGE))


def test_the_router_of_the_production_stack_changes_only_if_it_is_named() -> None:
    file = EXAMPLES / "production-stack.yaml"
    _, notes = command.inject_into_file(file, InjectionOptions(IMAGE), Selection())
    router = next(
        one for one in notes if one.startswith("apps/v1 Deployment vllm-deployment-router")
    )
    assert (
        "left unchanged: no container runs vLLM or SGLang (containers: router-container)" in router
    )
    named = plimsoll(
        str(file), "--name", "vllm-deployment-router", "--container", "router-container", *FLAG
    )
    engine, config_map, workload, service = objects(named)
    assert (engine["kind"], service["kind"]) == ("Deployment", "Service")
    assert config_of(config_map).engine.type is EngineType.CUSTOM
    (sidecar,) = workload["spec"]["template"]["spec"]["initContainers"]
    assert sidecar["securityContext"]["runAsUser"] == 1000
    assert "does not find the engine" not in named.stderr


def test_the_endpoint_picker_is_watched_on_its_http_port() -> None:
    picked = ("--name", "llama-epp", "--container", "epp", "--port", "9090")
    done = plimsoll(str(EXAMPLES / "llm-d.yaml"), *picked, *FLAG)
    maps = [one for one in objects(done) if one["kind"] == "ConfigMap"]
    (config,) = map(config_of, maps)
    assert (config.engine.type, config.engine.container) == (EngineType.CUSTOM, "epp")
    assert config.engine.serving_url == "http://127.0.0.1:9090"
    pod = next(one for one in objects(done) if one["metadata"]["name"] == "llama-epp")
    sidecar = pod["spec"]["template"]["spec"]["initContainers"][0]
    assert [port["name"] for port in sidecar["ports"]] == ["metrics-9464", "probe"]
    assert "--port: port 9464 is reserved for the supervisor" in str(
        plimsoll(str(EXAMPLES / "llm-d.yaml"), "--port", "9464", *FLAG).exception
    )


def test_the_frontend_of_dynamo_is_no_engine_of_its_image() -> None:
    (document,) = yaml.safe_load_all((EXAMPLES / "dynamo-frontend.yaml").read_text())
    assert inject_document(document, InjectionOptions(IMAGE)).config_map is None
    wanted = SelectedEngine(type=SelectedEngineType.CUSTOM)
    made = inject_document(document, InjectionOptions(IMAGE, engine=wanted)).config_map
    assert made is not None
    assert config_of(made).engine.serving_url == "http://127.0.0.1:8000"


def test_the_commands_for_charts_in_the_documents(tmp_path: Path) -> None:
    """No chart repository is reached: a program called helm prints what the charts render."""
    rendered = {"vllm": "production-stack", "llama": "llm-d"}
    cases = "\n".join(f"{name}) cat {EXAMPLES / file}.yaml;;" for name, file in rendered.items())
    for program, text in (("helm", f'case "$2" in\n{cases}\nesac'), ("kubectl", "cat")):
        path = tmp_path / program
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    found = [one.text for one in blocks(ROOT / "docs" / "adapters.md", "sh") if one.run == THIS]
    lines = [line for text in found for line in text.splitlines()]
    assert len(lines) == 2
    folders = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    env = {**os.environ, "PATH": os.pathsep.join(folders)}
    for line, expected in zip(
        lines, (["vllm-llama3"], ["llama-decode", "llama-prefill"]), strict=True
    ):
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", line],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        made = [one for one in yaml.safe_load_all(done.stdout) if one["kind"] == "ConfigMap"]
        names = [one["metadata"]["name"] for one in made]
        assert [name.partition("-deployment")[0].removesuffix("-supervisor") for name in names] == (
            expected
        )
