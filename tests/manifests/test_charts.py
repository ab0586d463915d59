"""The manifests of other projects, in the form that they render: each row of docs/adopt.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from plimsoll_cli.inject import validate
from plimsoll_cli.main import app
from plimsoll_operator.injection.options import Options

ROOT = Path(__file__).parents[2]
CHARTS, EXAMPLES = ROOT / "tests/manifests/charts", ROOT / "examples/inject"
OPTIONS = Options("supervisor", group_restarts=True)


@pytest.mark.parametrize(
    ("project", "file", "status", "said"),
    [
        ("KServe `InferenceService`, `Standard`", EXAMPLES / "kserve-inferenceservice.yaml", 0,
         ["vllm in container kserve-container", "port 8080 the default"]),
        ("KServe `InferenceService`, `Serverless`", CHARTS / "kserve-serverless.yaml", 1,
         ["Knative refuses shareProcessNamespace"]),
        ("KServe `LLMInferenceService`", EXAMPLES / "kserve-llminferenceservice.yaml", 0,
         ["vllm in container main, port 8001"]),
        ("LeaderWorkerSet with vLLM", EXAMPLES / "vllm-leaderworkerset.yaml", 0,
         ["vllm in container vllm-leader, by its command", "workerTemplate.spec: left unchanged"]),
        ("LeaderWorkerSet with SGLang", CHARTS / "lws-sglang.yaml", 0,
         ["sglang in container sglang-leader, by its command", "pods of rank 1 and above",
          "workerTemplate.spec: left unchanged"]),
        ("llm-d", EXAMPLES / "llm-d.yaml", 0,
         ["llama-decode: spec.template.spec: vllm in container vllm, by its command",
          "llama-prefill: spec.template.spec: vllm",
          "llama-epp: spec.template.spec: left unchanged"]),
        ("vLLM's production stack", EXAMPLES / "production-stack.yaml", 0,
         ["vllm in container vllm, by its command", "router: spec.template.spec: left unchanged"]),
        ("AIBrix", CHARTS / "aibrix.yaml", 0,
         ["vllm in container vllm-openai, by its command", "port 8000 by --port"]),
        ("KubeRay with Ray Serve", CHARTS / "kuberay.yaml", 0,
         ["headGroupSpec.template.spec: left unchanged: no container runs vLLM"]),
        ("OPEA", CHARTS / "opea.yaml", 0,
         ["vllm in container vllm, by its image vllm, port 2080 by --port"]),
    ],
)  # fmt: skip
def test_what_is_recognised(project: str, file: Path, status: int, said: list[str]) -> None:
    found = validate.run([file], OPTIONS)
    lines = "\n".join([*found.notes, *found.refused, *found.invalid])
    for one in said:
        assert one in lines
    assert found.status == status
    assert f"| {project} |" in (ROOT / "docs/adopt.md").read_text()


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
    assert "spec.replicas: Input should be a valid integer" in done.stderr
    assert "limits.nvidia.com/gpu: must be a whole number" in done.stderr
    file.write_text("a: [")
    assert run(app, ["validate", str(file)]).exit_code == 2
    file.write_text("apiVersion: plimsoll.dev/v1alpha1\nkind: LeakIncident\n")
    assert "write InferenceService or SupervisionPolicy" in run(app, ["validate", str(file)]).stderr


def test_what_the_operator_refuses_is_said(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(
        "apiVersion: plimsoll.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: chat}\n"
        "spec:\n  model: {uri: 'pvc://models/m'}\n  podTemplate:\n    spec: {hostPID: true}\n"
    )
    found = validate.run([file], OPTIONS)
    assert found.status == 2
    assert "hostPID" in found.invalid[0]
