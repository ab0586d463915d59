"""The manifests of other projects, in the form that they render: each row of docs/adopt.md."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from plimsoll_api.supervision import Mode, Supervision
from plimsoll_cli.inject import validate
from plimsoll_cli.main import app
from plimsoll_operator.injection.documents import inject_document
from plimsoll_operator.injection.options import InjectionOptions

ROOT = Path(__file__).parents[2]
CHARTS, EXAMPLES = ROOT / "tests/manifests/charts", ROOT / "examples/inject"
OPTIONS = InjectionOptions("supervisor", group_restarts=True)


@pytest.mark.parametrize(
    ("project", "file", "status", "said"),
    [
        ("KServe `InferenceService`, `Standard`", EXAMPLES / "kserve-inferenceservice.yaml", 0,
         ["vllm in container kserve-container", "port 8080 from the default"]),
        ("KServe `InferenceService`, `Serverless`", CHARTS / "kserve-serverless.yaml", 1,
         ["Knative rejects shareProcessNamespace"]),
        ("KServe with its runtime in the same file", CHARTS / "kserve-runtime.yaml", 0,
         ["ClusterServingRuntime vllm: left unchanged: the supervisor belongs in the service",
          "chat: spec.predictor: vllm in container kserve-container, recognized by its command"
          " vllm.entrypoints.openai.api_server, port 8085 from --port",
          "elsewhere: spec.predictor: vllm in container kserve-container, recognized by its"
          " model format,"
          " port 8080 from the default"]),
        ("KServe `LLMInferenceService`", EXAMPLES / "kserve-llminferenceservice.yaml", 0,
         ["vllm in container main, port 8001"]),
        ("LeaderWorkerSet with vLLM", EXAMPLES / "vllm-leaderworkerset.yaml", 0,
         ["vllm in container vllm-leader, recognized by its command", "workerTemplate.spec: left"
          " unchanged"]),
        ("LeaderWorkerSet with SGLang", CHARTS / "lws-sglang.yaml", 0,
         ["sglang in container sglang-leader, recognized by its command", "pods of rank 1 and"
          " above",
          "without --enable-metrics", "workerTemplate.spec: left unchanged"]),
        ("llm-d", EXAMPLES / "llm-d.yaml", 0,
         ["llama-decode: spec.template.spec: vllm in container vllm, recognized by its command",
          "llama-prefill: spec.template.spec: vllm",
          "llama-epp: spec.template.spec: left unchanged"]),
        ("vLLM's production stack", EXAMPLES / "production-stack.yaml", 0,
         ["vllm in container vllm, recognized by its command", "router: spec.template.spec: left"
          " unchanged"]),
        ("AIBrix", CHARTS / "aibrix.yaml", 1,
         ["Deployment qwen: spec.template.spec: vllm in container vllm-openai, recognized by its"
          " command vllm"
          " serve, port 8000 from --port",
          "[llm-engine].lifecycle.preStop.exec.command names process 1"]),
        ("AIBrix `StormService`", CHARTS / "aibrix-roles.yaml", 0,
         ["orchestration.aibrix.ai/v1alpha1 StormService pair: left unchanged: plimsoll inject"
          " does"]),
        ("AIBrix `RayClusterFleet`", CHARTS / "aibrix-fleet.yaml", 0,
         ["spec.template.spec.headGroupSpec.template.spec: vllm in container ray-head,"
          " recognized by its command vllm serve, port 8000 from the declared ports",
          "spec.template.spec.workerGroupSpecs[0].template.spec: left unchanged"]),
        ("KubeRay with Ray Serve", CHARTS / "kuberay.yaml", 0,
         ["headGroupSpec.template.spec: left unchanged: KubeRay starts Ray in the container, and no"
          " command starts an engine",
          "workerGroupSpecs[0].template.spec: left unchanged"]),
        ("KubeRay with a server in the head's command", CHARTS / "kuberay-autoscaler.yaml", 1,
         ["scaled: spec.headGroupSpec.template.spec: vllm in container ray-head, recognized by"
          " its command"
          " vllm serve, port 8000 from --port",
          "plain: spec.headGroupSpec.template.spec.containers[ray-head]: the engine's port is"
          " unknown (the command starts only Ray"]),
        ("OPEA", CHARTS / "opea.yaml", 0,
         ["vllm in container vllm, recognized by its image vllm, port 2080 from --port"]),
    ],
)  # fmt: skip
def test_what_is_recognised(project: str, file: Path, status: int, said: list[str]) -> None:
    found = validate.check_files([file], OPTIONS)
    lines = "\n".join([*found.notes, *found.refused, *found.invalid])
    for one in said:
        assert one in lines
    assert found.exit_status == status
    assert f"| {project} |" in (ROOT / "docs/adopt.md").read_text()


def test_a_runtime_beside_its_service_says_what_the_container_has() -> None:
    runtime, service, _ = yaml.safe_load_all((CHARTS / "kserve-runtime.yaml").read_text())
    options = InjectionOptions("supervisor", runtimes={"vllm": runtime["spec"]})
    made = inject_document(service, options)
    assert made.config_map is not None
    config = json.loads(made.config_map["data"]["supervisor.json"])
    assert config["memory"]["host"]["limit_bytes"] == 20 << 30
    assert config["engine"]["model"] == "chat"
    (supervisor,) = made.document["spec"]["predictor"]["initContainers"]
    assert supervisor["securityContext"]["runAsUser"] == 1001
    assert "cpu" in supervisor["resources"]["limits"], "as every other container of the pod"
    assert {"name": "devshm", "mountPath": "/dev/shm"} in supervisor["volumeMounts"]


def test_kuberays_autoscaler_restarts_no_engine(tmp_path: Path) -> None:
    acts = replace(OPTIONS, supervision=Supervision(mode=Mode.RECOVER))
    found = validate.check_files([CHARTS / "kuberay-autoscaler.yaml"], acts)
    assert (
        "autoscalerOptions.version: v2: KubeRay sets restartPolicy: Never: if the supervisor"
        " restarted the engine, its pod would end" in found.refused[0]
    )
    job = tmp_path / "job.yaml"
    job.write_text(
        "apiVersion: ray.io/v1\nkind: RayJob\nmetadata: {name: j}\nspec:\n"
        "  submissionMode: SidecarMode\n  rayClusterSpec:\n    headGroupSpec:\n      template:\n"
        "        spec:\n          containers: [{name: h, command: [vllm, serve, m], image: x}]\n"
    )
    assert "spec.submissionMode SidecarMode" in validate.check_files([job], acts).refused[0]
    assert not validate.check_files([job], OPTIONS).refused


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{- if .Values.enabled }}\napiVersion: v1\nkind: Pod\n{{- end }}\n",
         "m.yaml:1:3: the document is not valid YAML: did not find expected node content"),
        ("apiVersion: v1\nkind: Pod\nmetadata:\n  name: {{ include \"x\" . }}\n", "render it"),
        ("image:\n  repository: vllm/vllm-openai\n", "apiVersion is missing: use a manifest"),
        ("apiVersion: v2\nname: chart\n", "kind is missing: use a manifest; for a Helm chart, use"),
    ],
)  # fmt: skip
def test_a_template_is_to_be_rendered_first(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "m.yaml").write_text(text)
    (line,) = validate.check_files([tmp_path / "m.yaml"], OPTIONS).invalid
    assert said in line


@pytest.mark.parametrize("image", ['"{{ .Values.image }}"', "$VLLM_IMAGE", '"{{ x }}:1"'])
def test_a_placeholder_of_a_template_that_is_yaml_is_named(tmp_path: Path, image: str) -> None:
    (tmp_path / "m.yaml").write_text(
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: w}\nspec:\n  template:\n"
        f"    spec:\n      containers:\n        - {{name: e, image: {image}, args: [serve, m]}}\n"
    )
    (note,) = validate.check_files([tmp_path / "m.yaml"], OPTIONS).notes
    assert f"the image {image.strip(chr(34))} is a placeholder: replace it first" in note


def test_the_exit_status_says_what_was_found(tmp_path: Path) -> None:
    good, file = ROOT / "examples/tiny.yaml", tmp_path / "m.yaml"
    run = CliRunner().invoke
    done = run(app, ["validate", str(good), str(ROOT / "examples/supervision-policy.yaml")])
    assert done.exit_code == 0
    assert "InferenceService.plimsoll.dev: valid" in done.stdout
    file.write_text(
        "apiVersion: plimsoll.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: chat}\n"
        'spec:\n  replicas: "2"\n  model: {uri: "pvc://models/m"}\n'
        "  engine:\n    resources:\n      limits: {memory: 24Gi, nvidia.com/gpu: 0.5}\n"
    )
    done = run(app, ["validate", str(file), str(good)])
    assert done.exit_code == 2
    assert "spec.replicas: must be a valid integer" in done.stderr
    assert "limits.nvidia.com/gpu: must be an integer or a quoted string" in done.stderr
    file.write_text("a: [")
    assert run(app, ["validate", str(file)]).exit_code == 2
    file.write_text("apiVersion: plimsoll.dev/v1alpha1\nkind: LeakIncident\n")
    assert (
        "kind must be InferenceService or SupervisionPolicy"
        in run(app, ["validate", str(file)]).stderr
    )


def test_a_message_of_validate_names_what_its_reader_can_set(tmp_path: Path) -> None:
    """``validate`` has no flag for the user or the port of an engine."""
    workload = tmp_path / "w.yaml"
    workload.write_text(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: p, labels: {app: vllm}}\nspec:\n"
        "  containers: [{name: c, image: vllm/vllm-openai}]\n---\n"
        "apiVersion: v1\nkind: Pod\nmetadata: {name: q, labels: {app: vllm}}\nspec:\n"
        "  containers: [{name: c, image: vllm/vllm-openai, args: [--port, $(PORT)]}]\n"
    )
    alone = CliRunner().invoke(app, ["validate", str(workload)])
    assert "set it with plimsoll inject --run-as-user; on OpenShift, use plimsoll" in alone.stdout
    assert "set it with plimsoll inject --port" in alone.stderr
    policy = str(ROOT / "examples/supervision-policy.yaml")
    selected = CliRunner().invoke(app, ["validate", str(workload), "--policy", policy])
    assert "set it with runAsUser\n" in selected.stdout
    assert f"set it with spec.engine.port in {policy}" in selected.stderr
    assert alone.exit_code == selected.exit_code == 1


def test_an_item_that_is_no_object_is_invalid(tmp_path: Path) -> None:
    """As for kubectl: nothing of such a List is applied."""
    file = tmp_path / "list.yaml"
    file.write_text("apiVersion: v1\nkind: List\nitems: [5, null]\n")
    found = validate.check_files([file], OPTIONS)
    assert found.exit_status == 2
    told = f"{file}: document 1, item 1: must be a Kubernetes object, not a string or a number"
    assert found.invalid[0].startswith(told)


def test_a_policy_that_selects_nothing_fails(tmp_path: Path) -> None:
    """A selector with a typing error would otherwise pass in CI."""
    policy, workload = str(ROOT / "examples/supervision-policy.yaml"), tmp_path / "w.yaml"
    selected, other = (
        f"apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, labels: {{app: {name}}}}}\nspec:\n"
        "  securityContext: {runAsUser: 1000}\n"
        "  containers: [{name: c, image: vllm/vllm-openai, ports: [{containerPort: 8000}]}]\n"
        for name in ("vllm", "vlm")
    )
    workload.write_text(other)
    none = CliRunner().invoke(app, ["validate", str(workload), "--policy", policy])
    assert "does not match the pod's labels (app=vlm)" in none.stdout
    assert f"{policy}: no workload in these files gets a supervisor" in none.stderr
    assert none.exit_code == 1
    assert CliRunner().invoke(app, ["validate", str(workload)]).exit_code == 0
    workload.write_text(f"{other}---\n{selected}")
    some = CliRunner().invoke(app, ["validate", str(workload), "--policy", policy])
    assert (some.exit_code, some.stderr) == (0, "")


def test_what_the_operator_refuses_is_said(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(
        "apiVersion: plimsoll.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: chat}\n"
        "spec:\n  model: {uri: 'pvc://models/m'}\n  podTemplate:\n    spec: {hostPID: true}\n"
    )
    found = validate.check_files([file], OPTIONS)
    assert found.exit_status == 2
    assert "hostPID" in found.invalid[0]
