"""What is taken for an engine and where it listens: one decision, with its evidence.

Tests ``injection/programs.py``, ``injection/listening.py``, ``injection/command_line.py`` and
``injection/shape.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_api.engines import EngineType
from plimsoll_api.supervision_policy import SelectedEngine
from plimsoll_operator.injection import command_line
from plimsoll_operator.injection.engine import EngineContainer, describe_containers, find_engine
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import InjectionOptions
from plimsoll_operator.injection.shape import check_types

Object = dict[str, Any]
VLLM, SGLANG = EngineType.VLLM, EngineType.SGLANG
IMAGE = "vllm/vllm-openai:v0.24.0"


def shell(script: str, *flags: str) -> Object:
    return {"image": "python:3.12", "command": ["bash", *(flags or ("-c",)), script]}


def found(container: Object, **options: Any) -> EngineContainer | None:
    return find_engine(
        {"containers": [{"name": "c", **container}]}, "Pod p", InjectionOptions("s", **options)
    )


def engine(container: Object, **options: Any) -> EngineContainer:
    made = found(container, **options)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("container", "kind", "by"),
    [
        ({"command": ["vllm", "serve", "m"]}, VLLM, "its command vllm serve"),
        ({"command": ["/opt/venv/bin/vllm"], "args": ["serve", "m"]}, VLLM, "vllm serve"),
        ({"command": ["sglang", "serve", "--model-path", "m"]}, SGLANG, "sglang serve"),
        ({"command": ["python3.12", "-u", "-m", "sglang.launch_server"]}, SGLANG, "launch_server"),
        ({"command": ["python3", "/a/vllm/entrypoints/openai/api_server.py"]}, VLLM, "api_server"),
        ({"command": ["uv", "run", "--frozen", "vllm", "serve", "m"]}, VLLM, "vllm serve"),
        ({"command": ["tini", "--", "env", "A=1", "vllm", "serve", "m"]}, VLLM, "vllm serve"),
        ({"command": ["numactl", "--cpunodebind=0", "python", "-m",
                      "vllm.entrypoints.openai.api_server"]}, VLLM, "api_server"),
        (shell("pip install vllm && exec vllm serve m"), VLLM, "vllm serve"),
        (shell("set -e; source /venv/bin/activate\nvllm serve m 2>&1 | tee /logs/x", "-lc"), VLLM,
         "vllm serve"),
        (shell("if [ -n \"$X\" ]; then vllm serve m --headless; else vllm serve m; fi"), VLLM,
         "vllm serve"),
        (shell("nohup ray start --head & sleep 5; VLLM_USE_V1=1 vllm serve m"), VLLM, "vllm serve"),
        (shell("bash -c 'exec vllm serve m'", "-euxo", "pipefail", "-c"), VLLM, "vllm serve"),
        (shell("trap 'kill 0' TERM; vllm serve m & wait", "-c", "--"), VLLM, "vllm serve"),
        (shell("until up; do sleep 1; done; exec \"$@\"") | {"args": ["sh", "vllm", "serve", "m"]},
         VLLM, "vllm serve"),
        ({"image": "x", "args": ["-c", "vllm serve m"]}, VLLM, "vllm serve"),
        ({"image": "r:5000/team/vllm-openai:v1@sha256:00"}, VLLM, "its image vllm-openai"),
        ({"image": "lmsysorg/sglang:v0.5", "command": ["/start.sh"],
          "ports": [{"containerPort": 1}]},
         SGLANG, "its image sglang"),
        ({"image": "x", "args": ["--model", "m", "--gpu-memory-utilization=0.9"]}, VLLM, "options"),
        ({"image": "x", "command": ["python", "/c/standin.py"],
          "args": ["--kind=vllm", "--port=1"]},
         VLLM,
         "its options"),
        ({"image": "kserve/huggingfaceserver:1", "args": ["--model_id=m"]}, VLLM, "its image"),
    ],
)  # fmt: skip
def test_an_engine_says_by_what_it_is_known(container: Object, kind: EngineType, by: str) -> None:
    made = engine(container)
    assert made.type is kind
    assert by in made.evidence


@pytest.mark.parametrize(
    ("container", "why"),
    [
        ({"image": IMAGE, "command": ["vllm", "bench", "serve"], "args": ["--port", "80"]},
         "runs vllm bench, which serves no requests"),
        ({"image": IMAGE, "command": ["vllm", "run-batch"]},
         "runs vllm run-batch, which serves no requests"),
        ({"image": IMAGE, "args": ["chat", "--url", "http://x"]},
         "runs vllm chat, which serves no requests"),
        ({"image": IMAGE, "command": ["sleep", "infinity"]}, "runs sleep"),
        (shell("huggingface-cli download org/vllm --local-dir /m && sleep inf") | {"image": IMAGE},
         "runs sleep"),
        ({"image": IMAGE, "command": ["python3", "benchmarks/benchmark_serving.py", "--backend",
                                      "vllm"]}, "runs benchmark_serving.py"),
        ({"image": "lmsysorg/sglang:1", "command": ["python3", "-m", "sglang.bench_serving"]},
         "runs sglang.bench_serving"),
        ({"image": IMAGE, "command": ["python", "-c", "import vllm"]},
         "runs Python code from the command line"),
        ({"image": "nvcr.io/ai-dynamo/vllm-runtime:1", "command": ["python3", "-m",
          "dynamo.frontend"]}, "runs dynamo.frontend"),
        ({"image": "x/epp:1", "args": ["-poolName", "vllm-llama", "-grpcPort", "9002"]}, ""),
        ({"image": "harbor.example.org/vllm/nginx:1.27"}, ""),
        ({"image": "ghcr.io/example/vllm-console:1.4"}, ""),
        ({"image": "r/chat-vllm/ui:1"}, ""),
        ({"image": "r/vllm-metrics-exporter"}, ""),
        ({"image": "lmsysorg/sglang-router:1"}, ""),
        ({"image": "x", "args": ["--backend", "vllm", "--base-url", "http://x"]}, ""),
        ({"image": "x", "args": ["--config=/etc/vllm.yaml", "--namespace", "vllm"]}, ""),
    ],
)  # fmt: skip
def test_what_only_has_to_do_with_an_engine_is_none(container: Object, why: str) -> None:
    assert found(container, named_is_custom=False) is None
    pod = {"containers": [{"name": "c", **container}]}
    assert describe_containers(pod, InjectionOptions("s")) == f"c {why}".rstrip()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["python3", "-m", "dynamo.vllm"], "has no OpenAI server"),
        (["python3", "-m", "vllm.entrypoints.grpc_server"], "serves gRPC"),
        (["vllm", "serve", "m", "--headless"], "with --headless, this process"),
        (["python3", "-m", "sglang.launch_server", "--node-rank", "1"], "--node-rank 1"),
        (
            ["vllm", "serve", "m", "--uds", "/run/x"],
            "--uds /run/x, the engine listens on a Unix socket",
        ),
    ],
)
def test_a_server_without_a_port_is_left_alone(command: list[str], reason: str) -> None:
    with pytest.raises(InjectionError, match=reason):
        found({"image": IMAGE, "command": command})
    assert (
        engine({"image": IMAGE, "command": command}, engine=SelectedEngine(port=9000)).port == 9000
    )


PORT_9000 = [{"name": "PORT", "value": "9000"}]
SECRET = [{"name": "PORT", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]


@pytest.mark.parametrize(
    ("container", "port", "by"),
    [
        ({"args": ["--port=9000"]}, 9000, "--port"),
        ({"args": ["--port", "$(PORT)"], "env": PORT_9000}, 9000, "--port"),
        ({"args": ["--port=$(P)"], "env": [*PORT_9000, {"name": "P", "value": "$(PORT)"}]}, 9000,
         "--port"),
        (shell("P=9000; vllm serve m --port ${P}"), 9000, "--port"),
        (shell("vllm serve m --port ${PORT:-9000}"), 9000, "--port"),
        (shell("vllm serve m --port $PORT") | {"env": PORT_9000}, 9000, "--port"),
        ({"args": ["--port=$(LISTEN)"], "envFrom": [{"configMapRef": {"name": "c"}}]}, 9000,
         "--port"),
        ({"args": ["--port=$(PORT)"], "env": SECRET, "startupProbe":
          {"httpGet": {"path": "/health", "port": 9000}}}, 9000, "the startupProbe"),
        ({"readinessProbe": {"httpGet": {"port": "x"}}, "ports": [
          {"name": "x", "containerPort": 9000}]}, 9000, "the readinessProbe"),
        ({"livenessProbe": {"exec": {"command": ["curl", "-f", "http://localhost:9000/health"]}}},
         9000, "the livenessProbe"),
        ({"ports": [{"name": "prom", "containerPort": 9100},
                    {"name": "http", "containerPort": 9000}]},
         9000, "the declared port http"),
        ({"ports": [{"name": "nccl", "containerPort": 9100}, {"containerPort": 8000}]}, 8000,
         "the declared ports"),
        ({"ports": [{"name": "metrics", "containerPort": 9100}]}, 8000, "the default"),
        ({"image": "lmsysorg/sglang:1"}, 30_000, "the default"),
        (shell("pip install vllm && vllm serve m --port 9000"), 9000, "--port"),
        ({"image": "vllm/vllm-openai", "command": ["/start.sh"], "env": PORT_9000}, 9000,
         "the variable PORT"),
        ({"name": "kserve-container", "image": "vllm/vllm-openai"}, 8080, "the default"),
    ],
)  # fmt: skip
def test_where_it_listens(container: Object, port: int, by: str) -> None:
    maps = {"c": {"LISTEN": "9000"}}
    made = engine({"image": IMAGE, **container}, config_maps=maps)
    assert made.port == port
    assert made.evidence.endswith(f"port {port} from {by}")


@pytest.mark.parametrize(
    ("container", "reason"),
    [
        ({"image": IMAGE, "args": ["--port=$(PORT)"], "env": SECRET}, "known only in the cluster"),
        ({"image": "r/ray-vllm", "ports": [{"name": "gcs", "containerPort": 6379},
          {"name": "serve", "containerPort": 8000}]}, "starts only Ray"),
        ({"image": IMAGE, "command": ["python3", "offline.py"]}, "no option, probe or port name"),
        ({"image": IMAGE, "args": ["--port=70000"]}, "not a valid port number"),
        ({"image": IMAGE, "ports": [{"containerPort": "8000"}]}, "'8000' is not a valid port"
         " number"),
    ],
)  # fmt: skip
def test_a_port_that_is_not_known_is_never_invented(container: Object, reason: str) -> None:
    with pytest.raises(InjectionError, match=reason):
        found(container)


@pytest.mark.parametrize(
    ("container", "note"),
    [
        ({"args": ["--host", "$(IP)"], "env": [
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]},
         "listens only on the pod's own address"),
        ({"args": ["--host=10.0.0.1"]}, "listens only on 10.0.0.1"),
        ({"args": ["--disable-log-stats"]}, "the metrics are empty because of --disable-log-stats"),
        ({"args": ["--ssl-certfile", "c", "--ssl-cert-reqs", "2"]}, "requires client certificates"),
        ({"args": ["--api-key", "k"]}, "no API key"),
        ({"command": ["python3", "-m", "sglang.launch_server"]}, "without --enable-metrics"),
        ({"command": ["vllm", "serve", "m", "--node-rank", "$RANK"]}, "differs between the pods"),
    ],
)  # fmt: skip
def test_what_the_supervisor_will_not_see_is_said(container: Object, note: str) -> None:
    assert any(note in one for one in engine({"image": IMAGE, **container}).notes)
    plain = {"args": ["--model", "m", "--host", "0.0.0.0"]}
    assert not engine({"image": IMAGE, **plain}).notes


@pytest.mark.parametrize(
    ("args", "env", "model"),
    [
        (["--model=$(M)"], [{"name": "M", "value": "org/model"}], "org/model"),
        (["serve", "org/model", "--max-model-len", "9"], [], "org/model"),
        (["--model", "org/model", "--served-model-name", "chat", "other"], [], "chat"),
        (["--model=$(M)"], [], ""),
    ],
)
def test_the_models_name(args: list[str], env: list[Object], model: str) -> None:
    assert engine({"image": IMAGE, "args": args, "env": env}).model == model


def test_tls_and_model_after_other_commands() -> None:
    made = engine(shell("pip install vllm && exec vllm serve org/m --ssl-certfile /c"))
    assert (made.scheme, made.model) == ("https", "org/m")


def test_the_best_evidence_decides_between_containers() -> None:
    pod = {
        "containers": [
            {"name": "web", "image": IMAGE},
            {"name": "engine", "image": "x", "command": ["vllm", "serve", "m"]},
        ]
    }
    made = find_engine(pod, "Pod p", InjectionOptions("s"))
    assert made is not None
    assert made.container == "engine"


def test_an_engine_may_be_a_native_sidecar() -> None:
    pod = {
        "restartPolicy": "OnFailure",
        "containers": [{"name": "worker", "image": "x"}],
        "initContainers": [
            {"name": "before", "image": IMAGE, "command": ["vllm", "serve", "m"]},
            {"name": "engine", "image": IMAGE, "restartPolicy": "Always"},
        ],
    }
    made = find_engine(pod, "Pod p", InjectionOptions("s"))
    assert made is not None
    assert (made.container, made.path) == ("engine", "Pod p.initContainers[engine]")
    assert not made.no_restart_reason, (
        "the kubelet restarts a native sidecar whatever the pod's policy is"
    )
    pod["containers"] = [{"name": "main", "image": IMAGE}]
    made = find_engine(pod, "Pod p", InjectionOptions("s"))
    assert made is not None
    assert made.container == "main"
    assert made.no_restart_reason == "restartPolicy: OnFailure"
    made = find_engine(pod, "Pod p", InjectionOptions("s", SelectedEngine(container="engine")))
    assert made is not None
    assert made.container == "engine"


SERVES = "#!/bin/bash\nset -e\npip install x\nexec vllm serve $1 --port ${PORT:-9000}\n"


@pytest.mark.parametrize(
    ("command", "volume", "mount", "script", "port"),
    [
        (["/s/run.sh", "m"], {"configMap": {"name": "c"}}, {}, SERVES, 9000),
        (["bash", "-e", "/s/run.sh"], {"configMap": {"name": "c"}}, {}, SERVES, 9000),
        (["sh", "-c", "sleep 1; . /x; /s/run.sh"], {"configMap": {"name": "c"}}, {}, SERVES, 9000),
        (["/s/go"], {"configMap": {"name": "c", "items": [{"key": "run.sh", "path": "go"}]}}, {},
         SERVES, 9000),
        (["/go.sh"], {"configMap": {"name": "c"}}, {"mountPath": "/go.sh", "subPath": "run.sh"},
         SERVES, 9000),
        (["/s/run.sh"], {"projected": {"sources": [{"secret": {}}, {"configMap": {"name": "c"}}]}},
         {}, SERVES, 9000),
        (["/s/run.sh"], {"configMap": {"name": "other"}}, {}, SERVES, None),
        (["/s/run.sh"], {"configMap": {"name": "c"}}, {}, "#!/usr/bin/python\nvllm serve m", None),
        (["/s/run.sh"], {"configMap": {"name": "c"}}, {}, "x\n" * 40_000 + "vllm serve", None),
    ],
)  # fmt: skip
def test_a_script_of_a_config_map_beside_it_is_read(
    command: list[str], volume: Object, mount: Object, script: str, port: int | None
) -> None:
    pod = {
        "containers": [
            {
                "name": "c",
                "image": "python:3.12",
                "command": command,
                "volumeMounts": [{"name": "v", "mountPath": "/s", **mount}],
            }
        ],
        "volumes": [{"name": "v", **volume}],
    }
    check_types(pod, "Pod p")
    made = find_engine(pod, "Pod p", InjectionOptions("s", config_maps={"c": {"run.sh": script}}))
    assert (made.port if made else None) == port


def test_a_script_that_runs_itself_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = {
        "containers": [
            {"name": "c", "command": ["/s/a"], "volumeMounts": [{"name": "v", "mountPath": "/s"}]}
        ],
        "volumes": [{"name": "v", "configMap": {"name": "c"}}],
    }
    scripts = {"a": "/s/a;/s/b;" * 1000, "b": "vllm serve m;" + "/s/a;/s/b;" * 1000}
    parsed: list[str] = []

    def split_commands(script: str) -> list[list[str]]:
        parsed.append(script)
        return list(original(script))

    original = command_line.split_commands
    monkeypatch.setattr(command_line, "split_commands", split_commands)
    assert find_engine(pod, "Pod p", InjectionOptions("s", config_maps={"c": scripts})) is not None
    assert [parsed.count(script) for script in scripts.values()] == [1, 1]


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        ({"containers": {}}, "containers must be a list, not an object"),
        ({"containers": ["x"]}, r"containers\[0\] must be an object, not a string"),
        ({"containers": [{"image": "x"}]}, r"containers\[0\]\.name: required"),
        ({"containers": [{"name": "e", "env": {"A": "b"}}]},
         r"containers\[e\]\.env must be a list"),
        ({"containers": [{"name": "e", "args": ["--port", 8000]}]},
         r"containers\[e\]\.args\[1\] must be a string, not the number 8000"),
        ({"containers": [{"name": "e", "env": [{"name": "A", "value": True}]}]},
         r"containers\[e\]\.env\[A\]\.value must be a string, not the boolean true"),
        ({"volumes": [{"emptyDir": {}}]}, r"volumes\[0\]\.name: required"),
        ({"containers": [None]}, r"containers\[0\] must not be empty"),
        ({"securityContext": []}, "securityContext must be an object"),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_shape_is_named(pod: Object, message: str) -> None:
    with pytest.raises(InjectionError, match=rf"^Pod p: spec\.{message}"):
        check_types(pod, "Pod p: spec")
