"""Manifests of the kinds that once went wrong: one of each, with what must become of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plimsoll_cli.main import app
from plimsoll_cli.yaml_tree import split_documents

Object = dict[str, Any]
VLLM = "image: vllm/vllm-openai:v0.25.0"
NO_ENGINE = "nothing to inject:\n"


def workload(container: str, pod: str = "", kind: str = "Deployment", name: str = "llm") -> str:
    """A workload with one container, whose fields and those of the pod are lines of YAML."""
    version = "batch/v1" if kind == "Job" else "apps/v1"
    lines = [f"apiVersion: {version}", f"kind: {kind}", f"metadata: {{name: {name}}}", "spec:",
             f"  selector: {{matchLabels: {{app: {name}}}}}", "  template:",
             f"    metadata: {{labels: {{app: {name}}}}}", "    spec:",
             *(f"      {one}" for one in pod.splitlines()), "      containers:",
             "        - name: server",
             *(f"          {one}" for one in container.splitlines())]  # fmt: skip
    return "\n".join(lines) + "\n"


def kserve(model: str, mode: str = "Standard") -> str:
    return (
        "apiVersion: serving.kserve.io/v1beta1\nkind: InferenceService\nmetadata:\n  name: llm\n"
        f"  annotations: {{serving.kserve.io/deploymentMode: {mode}}}\n"
        f"spec:\n  predictor:\n    model: {model}\n"
    )


@dataclass
class Case:
    """A file and the options of inject, with what it prints.

    ``said`` is in the messages, ``url`` and ``model`` in the configuration; no ``url`` is a file
    that inject refuses with exit status 2. ``kept`` stands in the output as in the file.
    """

    text: str
    said: str
    url: str = ""
    model: str = ""
    kept: str = ""
    options: list[str] = field(default_factory=list)
    pod: Object = field(default_factory=dict)


LOCAL = "http://127.0.0.1:"
CASES = {
    "a benchmark is no engine": Case(
        workload(f"{VLLM}\nargs: [bench, serve, --host, gw, --port, '80']", "restartPolicy: Never",
                 "Job"),
        NO_ENGINE + "batch/v1 Job llm: spec.template.spec: left unchanged: no container runs vLLM"
        " or SGLang (containers: server runs vllm bench, which serves no requests)",
    ),
    "comments and scripts stay": Case(
        workload(f"{VLLM}   # pinned: the next one is slow\ncommand: [bash, -c]\nargs:\n  - |\n"
                 "    # weights are there\n    vllm serve /w \\\n      --port 8001\n"),
        "by its command vllm serve, port 8001 from --port", f"{LOCAL}8001", "/w",
        "   # pinned: the next one is slow\n          command: [bash, -c]\n          args:\n"
        "            - |\n              # weights are there\n",
    ),
    "a worker of Dynamo serves nothing itself": Case(
        workload("image: nvcr.io/nvidia/ai-dynamo/sglang-runtime:1.1\n"
                 "command: [python3, -m, dynamo.sglang]\nports: [{containerPort: 9090}]"),
        "dynamo.sglang: a worker of NVIDIA Dynamo has no OpenAI server",
    ),
    "an engine that is a native sidecar": Case(
        workload("image: r.example/task:2", "restartPolicy: Never\ninitContainers:\n"
                 "  - {name: fetch, image: busybox}\n  # starts first\n"
                 f"  - {{name: llm, {VLLM}, restartPolicy: Always, args: [--model=m]}}", "Job"),
        "vllm in container llm, recognized by its image vllm-openai", f"{LOCAL}8000", "m",
        "        # starts first\n        - {name: llm, ", ["--mode", "Recover"],
        {"initContainers": ["fetch", "supervisor", "llm"]},
    ),
    "a map for a list": Case(
        workload(f"{VLLM}\nvolumeMounts: {{/dev/shm: shm}}"),
        "document 1: apps/v1 Deployment llm: spec.template.spec.containers[server].volumeMounts"
        " must be a list, not an object",
    ),
    "the first port is for metrics": Case(
        workload("image: r.example/vllm:1\ncommand: [/start]\nports:\n"
                 "  - {name: metrics, containerPort: 9100}\n  - {name: api, containerPort: 7000}"),
        "port 7000 from the declared port api", f"{LOCAL}7000",
    ),
    "a pod of the class Guaranteed": Case(
        workload(f"{VLLM}\nresources:\n  limits: {{cpu: '4', memory: 8Gi}}"),
        "port 8000 from the default", f"{LOCAL}8000",
        pod={"resources": {"limits": {"cpu": "200m", "memory": "256Mi"},
                           "requests": {"cpu": "200m", "memory": "256Mi"}}},
    ),
    "installed, then started": Case(
        workload("image: python:3.13\ncommand: [bash, -lc]\nargs: ['uv pip install sglang==0.5 &&"
                 " python -m sglang.launch_server --model-path o/m --port 7001 --enable-metrics"
                 " --ssl-keyfile /k --ssl-certfile /c']"),
        "sglang in container server, recognized by its command sglang.launch_server, port 7001"
        " from --port",
        "https://127.0.0.1:7001", "o/m",
    ),
    "a job is not restarted": Case(
        workload(VLLM, "restartPolicy: OnFailure", "Job"),
        "restartPolicy: OnFailure: if the supervisor restarted the engine,"
        " its pod would end: use --mode Observe",
        options=["--mode", "Recover"],
    ),
    "a model without a name": Case(
        kserve("{modelFormat: {name: sglang}, name: '', runtime: mine}"),
        "sglang in container kserve-container, recognized by its model format, port 8080 from"
        " the default",
        f"{LOCAL}8080",
    ),
    "a model's format in capitals": Case(
        kserve("{modelFormat: {name: VLLM}, runtime: llm}", "RawDeployment"),
        "vllm in container kserve-container, recognized by its model format, port 8080 from the"
        " default",
        f"{LOCAL}8080",
    ),
    "a predictor of Knative": Case(
        kserve("{modelFormat: {name: huggingface}}", "Knative"),
        "Knative rejects shareProcessNamespace and init containers, which a supervisor needs; set"
        " the annotation serving.kserve.io/deploymentMode: Standard",
    ),
    "it listens on the pod's address": Case(
        workload(f"{VLLM}\nargs: [--host=$(ADDRESS)]\nenv:\n  - name: ADDRESS\n"
                 "    valueFrom: {fieldRef: {fieldPath: status.podIP}}"),
        "the engine listens only on the pod's own address (--host), but the supervisor queries"
        " 127.0.0.1",
        f"{LOCAL}8000",
    ),
    "the model in a variable": Case(
        workload(f"{VLLM}\nargs: [serve, $(MODEL)]\nenv: [{{name: MODEL, value: org/small}}]"),
        "vllm in container server", f"{LOCAL}8000", "org/small",
    ),
    "something else does not stop the file": Case(
        workload(VLLM) + "---\n" + workload("image: r.example/vllm-dashboard:2\nsecurityContext:"
                                            " {runAsNonRoot: true}", name="board"),
        "apps/v1 Deployment board: spec.template.spec: left unchanged: no container runs vLLM",
        f"{LOCAL}8000", kept="image: r.example/vllm-dashboard:2\n",
    ),
    "the platform assigns the user": Case(
        workload("image: quay.io/x/vllm@sha256:22\nsecurityContext: {capabilities: {drop: [ALL]}}"),
        "the platform", f"{LOCAL}8000", options=["--platform", "openshift"],
        pod={"runAsUser": None},
    ),
    "options with one dash": Case(
        workload("image: r.example/gateway/epp:v2\nargs: [-modelServer, vllm, -port, '9002']"),
        NO_ENGINE + "apps/v1 Deployment llm: spec.template.spec: left unchanged: no container runs",
    ),
    "a ConfigMap has the supervisor's name": Case(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: llm-supervisor}\ndata: {a: b}\n---\n"
        + workload(f"{VLLM}\ncommand: [supervisord, -n]"),
        "Deployment.apps/llm: the supervisor's ConfigMap needs the name llm-supervisor, but"
        " document 1 of the file has this name: rename that ConfigMap or the workload",
    ),
    "the port in a variable": Case(
        workload(f"{VLLM}\nargs: [--port, $(HTTP)]\nenv: [{{name: HTTP, value: '7002'}}]"),
        "port 7002 from --port", f"{LOCAL}7002",
    ),
    "a hook signals process 1": Case(
        workload(f"{VLLM}\nlifecycle:\n  preStop: {{exec: {{command: [sh, -c, kill -s 2 1]}}}}"),
        "[server].lifecycle.preStop.exec.command names process 1, but the engine is not process 1",
    ),
    "a project is called vllm": Case(
        workload("image: r.example/vllm-team/proxy:3\nports: [{containerPort: 8080}]"),
        NO_ENGINE + "apps/v1 Deployment llm: spec.template.spec: left unchanged: no container runs",
    ),
    "a quoted y": Case(
        workload(f"{VLLM}\nenv:\n  - {{name: FLAG, value: 'y'}}\n  - {{name: B, value: \"off\"}}"),
        "vllm in container server", f"{LOCAL}8000",
        kept="- {name: FLAG, value: 'y'}\n            - {name: B, value: \"off\"}\n",
    ),
    "ranks of a StatefulSet": Case(
        workload("image: lmsysorg/sglang:v1\ncommand: [python3, -m, sglang.launch_server, --nnodes,"
                 " '2', --node-rank, $(POD_INDEX), --enable-metrics]", kind="StatefulSet"),
        "--node-rank differs between the pods, and pods of rank 1 and above serve no port",
        f"{LOCAL}30000",
    ),
    "ports of Ray's head": Case(
        "apiVersion: ray.io/v1\nkind: RayCluster\nmetadata: {name: llm}\nspec:\n  headGroupSpec:\n"
        "    template:\n      spec:\n        containers:\n          - name: head\n"
        f"            {VLLM}\n            ports: [{{name: gcs-server, containerPort: 6379}}]\n",
        "the engine's port is unknown (the command starts only Ray, which uses the"
        " declared ports): set it with --port",
    ),
    "SGLang without metrics": Case(
        workload("image: lmsysorg/sglang:v1\ncommand: [sglang, serve, --model-path, m]"),
        "SGLang reports no load without --enable-metrics, so the supervisor detects no stalls and"
        " each drain waits until its deadline: add the option", f"{LOCAL}30000", "m",
    ),
    "a tab after a value": Case(
        workload(VLLM) + "---\napiVersion: v1\nkind: Service\nmetadata: {name: llm}\t\nspec:\n"
        "  clusterIP: None\t# headless\n",
        "vllm in container server", f"{LOCAL}8000", kept="  clusterIP: None\t# headless\n",
    ),
    "a time without quotes": Case(
        workload(VLLM) + "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: times}\n"
        "data: {at: 23:59, mode: 0o640}\n",
        "vllm in container server", f"{LOCAL}8000", kept="data: {at: 23:59, mode: 0o640}\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_becomes_of_it(tmp_path: Path, name: str) -> None:
    case, file = CASES[name], tmp_path / "m.yaml"
    file.write_text(case.text)
    command = ["inject", str(file), "--supervisor-image", "s:1", *case.options]
    done = CliRunner().invoke(app, command)
    if not case.url:
        assert case.said in str(done.exception)
        assert str(done.exception).startswith(f"{file}: ")
        assert done.stdout == ""
        return
    assert done.exit_code == 0
    assert case.said in done.stderr
    assert case.kept in done.stdout
    objects = [
        root.read_value()
        for one in split_documents(done.stdout)
        if (root := one.parse_root()) is not None
    ]
    config = json.loads(objects[0]["data"]["supervisor.json"])["engine"]
    assert config["serving_url"] == case.url
    assert config["model"] == (case.model or "llm")
    spec = objects[1]["spec"]
    pod = spec["predictor"] if "predictor" in spec else spec["template"]["spec"]
    (supervisor,) = [one for one in pod["initContainers"] if one["name"] == "supervisor"]
    if "initContainers" in case.pod:
        assert [one["name"] for one in pod["initContainers"]] == case.pod["initContainers"]
    if "resources" in case.pod:
        assert supervisor["resources"] == case.pod["resources"]
    if "runAsUser" in case.pod:
        assert "runAsUser" not in supervisor["securityContext"]
    file.write_bytes(done.stdout_bytes)
    removed = CliRunner().invoke(app, ["inject", str(file), "--remove"])
    assert removed.stdout_bytes == case.text.encode()


def test_numbers_as_texts_in_a_service_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(
        "apiVersion: plimsoll.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: llm}\nspec:\n"
        "  replicas: true\n  model: {uri: 'pvc://w/m'}\n"
        "  engine: {resources: {limits: {amd.com/gpu: 1.5}}}\n"
    )
    done = CliRunner().invoke(app, ["validate", str(file)])
    assert done.exit_code == 2
    assert "spec.replicas: must be a valid integer, but the value is True" in done.stderr
    assert "limits.amd.com/gpu: must be an integer or a quoted string" in done.stderr


def test_a_time_of_day_in_a_policy_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(
        "apiVersion: plimsoll.dev/v1alpha1\nkind: SupervisionPolicy\nmetadata: {name: p}\nspec:\n"
        "  selector: {matchLabels: {app: llm}}\n"
        "  supervision: {maintenanceWindow: {start: 23:15, duration: 1h}}\n"
    )
    assert CliRunner().invoke(app, ["validate", str(file)]).exit_code == 0
