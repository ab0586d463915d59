"""inject: a supervisor in the published manifests' shapes, and nothing else changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_api import supervision
from plimsoll_api.supervision import EngineType, SupervisorConfig
from plimsoll_cli.errors import UsageError
from plimsoll_cli.inject import command, engine
from plimsoll_cli.inject.sidecar import Injected, Wish, inject

EXAMPLES = Path(__file__).parents[3] / "examples" / "inject"
WISH = Wish(image="registry.example/supervisor:1")
Object = dict[str, Any]


def documents(name: str) -> list[Object]:
    return list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))


def done(document: Object, wish: Wish = WISH) -> Injected:
    made = inject(document, wish)
    assert made is not None
    return made


def config_of(made: Injected) -> SupervisorConfig:
    return supervision.decode(made.config_map["data"]["supervisor.json"].encode())


def pod_of(document: Object) -> Object:
    spec = document["spec"]
    found: Object = spec["template"]["spec"] if "template" in spec else spec.get("predictor", spec)
    return found


@pytest.mark.parametrize(
    ("name", "index", "kind", "port", "model", "limit"),
    [
        ("vllm-deployment", 1, EngineType.VLLM, 8000, "mistralai/Mistral-7B-Instruct-v0.3",
         20 * 10**9),
        ("sglang-deployment", 0, EngineType.SGLANG, 30000, "meta-llama/Llama-3.1-8B-Instruct",
         40 << 30),
        ("kserve-inferenceservice", 0, EngineType.VLLM, 8080, "huggingface-llama3", 24 << 30),
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
    (sidecar,) = pod["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["image"] == WISH.image
    assert pod["shareProcessNamespace"] is True
    mounted = {mount["name"] for mount in sidecar["volumeMounts"]}
    assert mounted <= {volume["name"] for volume in pod["volumes"]}
    assert made.config_map["metadata"]["name"] == f"{document['metadata']['name']}-supervisor"


def test_a_slice_of_a_device_is_shared_and_the_nodes_exporter_is_asked() -> None:
    document = documents("vllm-deployment")[1]
    assert not config_of(done(document)).memory.shared_device
    limits = pod_of(document)["containers"][0]["resources"]["limits"]
    limits["nvidia.com/gpu.shared"] = limits.pop("nvidia.com/gpu", "1")
    made = done(document, Wish(WISH.image, dcgm_exporter_port=9400))
    assert config_of(made).memory.shared_device
    (sidecar,) = pod_of(made.document)["initContainers"]
    assert {"name": "DCGM_EXPORTER_PORT", "value": "9400"} in sidecar["env"]


@pytest.mark.parametrize("name", ["vllm-deployment", "sglang-deployment"])
def test_what_was_there_stays(name: str) -> None:
    document = next(one for one in documents(name) if one["kind"] == "Deployment")
    before = copy.deepcopy(document)
    made = done(document).document
    assert document == before, "the argument is not changed"
    old, new = pod_of(before), pod_of(made)
    assert new["containers"] == old["containers"]
    assert new["volumes"][: len(old["volumes"])] == old["volumes"]
    assert made["spec"]["selector"] == before["spec"]["selector"]
    labels = made["spec"]["template"]["metadata"]["labels"]
    assert labels == before["spec"]["template"]["metadata"]["labels"] | {
        "plimsoll.dev/service": before["metadata"]["name"]
    }


def test_injecting_twice_is_injecting_once() -> None:
    once = done(documents("vllm-deployment")[1])
    assert done(once.document) == once
    other = done(once.document, Wish(image="registry.example/supervisor:2"))
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
    with pytest.raises(UsageError, match="Name it with --container: a, b"):
        engine.find(pod, "Pod p")
    assert engine.find(pod, "Pod p", "b").type is EngineType.CUSTOM
    with pytest.raises(UsageError, match="no container 'c'"):
        engine.find(pod, "Pod p", "c")
    pod["containers"][1]["image"] = "registry.local:5000/team/vllm:3"
    assert engine.find(pod, "Pod p").container == "b"


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
    found = engine.find({"containers": [{"name": "e", "image": "vllm/x", "args": args}]}, "Pod p")
    assert (found.port, found.model) == (port, model)


def test_files(tmp_path: Path) -> None:
    text, notes = command.run(EXAMPLES / "vllm-deployment.yaml", WISH)
    kinds = [one["kind"] for one in yaml.safe_load_all(text)]
    assert kinds == ["Secret", "ConfigMap", "Deployment"]
    assert notes[0].startswith("Deployment mistral-7b: vllm in container mistral-7b, port 8000")
    listed = tmp_path / "list.yaml"
    items = documents("sglang-deployment")
    listed.write_text(yaml.safe_dump({"kind": "List", "apiVersion": "v1", "items": items}))
    text, _ = command.run(listed, WISH)
    assert [one["kind"] for one in yaml.safe_load_all(text)] == [
        "ConfigMap", "Deployment", "Service",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("kind: Service\n", "holds Service"),
        ("", "holds nothing"),
        ("a: [", "not YAML"),
        ("- 1\n", "holds a list"),
        ("kind: Deployment\nmetadata: {name: x}\n", "which container is the engine"),
    ],
)
def test_what_cannot_be_injected_is_said(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(content)
    with pytest.raises(UsageError, match=expected):
        command.run(file, WISH)
    with pytest.raises(UsageError, match="cannot be read"):
        command.run(tmp_path / "absent", WISH)
