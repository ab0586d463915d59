"""An LLMInferenceService: its supervisor comes in a configuration, which KServe merges."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from plimsoll_api import supervisor_config
from plimsoll_api.supervision_policy import SelectedEngine, SelectedEngineType
from plimsoll_api.supervisor_config import PodEngine
from plimsoll_operator.injection.configuration import InjectedDocument
from plimsoll_operator.injection.documents import inject_document
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import InjectionOptions
from plimsoll_operator.render.eviction import EVICTABLE_VOLUMES_ANNOTATION as EVICTABLE

EXAMPLE = Path(__file__).parents[4] / "examples" / "inject" / "kserve-llminferenceservice.yaml"
OPTIONS = InjectionOptions("supervisor:1")
TEMPLATED = "{{ if .GlobalConfig.EnableTLS }}https{{ else }}http{{ end }}"
Object = dict[str, Any]


def service(**spec: Any) -> Object:
    return {
        "apiVersion": "serving.kserve.io/v1alpha2",
        "kind": "LLMInferenceService",
        "metadata": {"name": "llama", "namespace": "ml"},
        "spec": {"model": {"uri": "hf://org/m", "name": "org/m"}, **spec},
    }


def main(**container: Any) -> Object:
    user = {"securityContext": {"runAsUser": 2000}}
    return {"containers": [{"name": "main"} | user | container]}


def config_of(made: InjectedDocument) -> Object:
    assert made.config_map is not None, made.notes
    (config,) = made.others
    return config


def engine_of(part: Object) -> PodEngine:
    env = {one["name"]: one.get("value") for one in part["template"]["initContainers"][-1]["env"]}
    return msgspec.json.decode(env["PLIMSOLL_ENGINE"].encode(), type=PodEngine)


def test_the_service_changes_in_its_base_refs_alone() -> None:
    document = service(template=main(), baseRefs=[{"name": "team"}])
    before = copy.deepcopy(document)
    made = inject_document(document, OPTIONS)
    assert document == before, "the argument is not changed"
    refs = made.document["spec"].pop("baseRefs")
    assert refs == [{"name": "team"}, {"name": "llama-supervisor"}]
    assert made.document["spec"] == {k: v for k, v in before["spec"].items() if k != "baseRefs"}
    config = config_of(made)
    assert (config["kind"], config["metadata"]) == (
        "LLMInferenceServiceConfig", {"name": "llama-supervisor", "namespace": "ml"},
    )  # fmt: skip
    assert "baseRefs" not in config["spec"], "KServe refuses them in a configuration"
    assert set(config["spec"]) == {"labels", "annotations", "template"}
    assert config["spec"]["annotations"] == {EVICTABLE: "plimsoll-state,plimsoll-tmp"}
    template = config["spec"]["template"]
    (engine,) = template["containers"]
    assert engine == {"name": "main", "env": [{"name": "PLIMSOLL_CONTAINER", "value": "main"}]}
    (sidecar,) = template["initContainers"]
    mounted = {mount["name"] for mount in sidecar["volumeMounts"]}
    assert mounted <= {volume["name"] for volume in template["volumes"]}
    assert sidecar["securityContext"]["runAsUser"] == 2000
    assert config["spec"]["labels"] == {"plimsoll.dev/service": "llama"}


def test_injecting_twice_is_injecting_once() -> None:
    once = inject_document(service(template=main()), OPTIONS)
    assert inject_document(once.document, OPTIONS) == once


def test_decode_and_prefill_have_the_ports_of_the_presets() -> None:
    made = inject_document(yaml.safe_load(EXAMPLE.read_text()), OPTIONS)
    spec = config_of(made)["spec"]
    decode, prefill = engine_of(spec), engine_of(spec["prefill"])
    assert decode.engine.serving_url == f"{TEMPLATED}://127.0.0.1:8001", "a proxy has port 8000"
    assert prefill.engine.serving_url == f"{TEMPLATED}://127.0.0.1:8000"
    assert decode.engine.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert (decode.memory_limit_bytes, prefill.memory_limit_bytes) == (64 << 30, 48 << 30)
    assert made.config_map is not None
    read = supervisor_config.decode_config(made.config_map["data"]["supervisor.json"].encode())
    whole = supervisor_config.make_pod_config(read, decode)
    assert whole.engine.container == "main"
    assert whole.memory.host is not None
    assert whole.memory.host.limit_bytes == 64 << 30


def test_what_the_service_says_of_its_engine_counts() -> None:
    own = main(command=["vllm", "serve", "/m"], args=["--port=9001", "--ssl-certfile=/t"])
    found = engine_of(config_of(inject_document(service(template=own), OPTIONS))["spec"]).engine
    assert found.serving_url == "https://127.0.0.1:9001"
    more = main(args=["--port=9002"])
    found = engine_of(config_of(inject_document(service(template=more), OPTIONS))["spec"]).engine
    assert found.serving_url == f"{TEMPLATED}://127.0.0.1:9002", "the preset's command stays"
    web = service(template=main(command=["web"]))
    left = inject_document(web, OPTIONS)
    assert (left.document, left.config_map) == (web, None)
    assert "containers[main].command runs neither vLLM nor SGLang" in left.notes[0]
    wanted = SelectedEngine(type=SelectedEngineType.CUSTOM, port=80)
    made = inject_document(web, InjectionOptions("supervisor:1", engine=wanted))
    assert engine_of(config_of(made)["spec"]).engine.serving_url == "http://127.0.0.1:80"


def test_a_user_that_only_the_image_knows_must_be_said() -> None:
    message = r"spec.template.containers\[main\].securityContext: runAsNonRoot is true"
    with pytest.raises(InjectionError, match=message):
        inject_document(service(), OPTIONS)
    config = config_of(
        inject_document(service(), InjectionOptions("supervisor:1", run_as_user=2000))
    )
    (sidecar,) = config["spec"]["template"]["initContainers"]
    assert sidecar["securityContext"]["runAsUser"] == 2000


def test_a_multi_node_service_needs_consent_and_its_workers_stay_as_they_are() -> None:
    document = service(template=main(), worker={"containers": [{"name": "main"}]})
    with pytest.raises(
        InjectionError, match=r"spec: KServe sets restartPolicy .* use --allow-group"
    ):
        inject_document(document, OPTIONS)
    made = inject_document(document, InjectionOptions("supervisor:1", group_restarts=True))
    assert "worker" not in config_of(made)["spec"]
    assert any("LLMInferenceService llama: spec.worker: left" in note for note in made.notes)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            service() | {"apiVersion": "serving.kserve.io/v1alpha1"},
            "LLMInferenceService llama: apiVersion: serving.kserve.io/v1alpha1 is not supported",
        ),
        (service() | {"metadata": {}}, "metadata.name is required"),
        (service(prefill=[]), r"LLMInferenceService llama: spec.prefill must be an object"),
        (service(template=main() | {"hostPID": True}), "spec.template.hostPID: true"),
        (service(template=main(args=["--port=9465"])), "ports 9464 and 9465 are reserved"),
        (
            service(template=main() | {"initContainers": [{"name": "supervisor"}]}),
            r"spec.template.initContainers\[supervisor\]: this name is reserved for a container",
        ),
    ],
)
def test_what_cannot_be_supervised_names_its_field(document: Object, message: str) -> None:
    with pytest.raises(InjectionError, match=message):
        inject_document(document, OPTIONS)


def test_the_probe_does_not_lose_to_the_services_own_path() -> None:
    probed = InjectionOptions("supervisor:1", probe=True)
    config = config_of(inject_document(service(template=main()), probed))
    (engine,) = config["spec"]["template"]["containers"]
    assert {"name": "PYTHONPATH", "value": "/opt/plimsoll-probe"} in engine["env"]
    own = main(env=[{"name": "PYTHONPATH", "value": "/app"}])
    with pytest.raises(InjectionError, match=r"env\[PYTHONPATH\]: this variable would override"):
        inject_document(service(template=own), probed)


def test_the_objects_are_json_that_a_go_template_leaves_whole() -> None:
    """KServe renders the configuration as one Go template: only what it is meant to see opens."""
    config = config_of(inject_document(yaml.safe_load(EXAMPLE.read_text()), OPTIONS))
    text = json.dumps(config)
    assert text.count("{{") == text.count(TEMPLATED) * 3 > 0
