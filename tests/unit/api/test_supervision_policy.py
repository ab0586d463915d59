"""SupervisionPolicy: its models say what its CRD says; a selector selects what Kubernetes does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from plimsoll_api import generate
from plimsoll_api.engines import EngineType
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.label_selector import LabelSelector
from plimsoll_api.names import make_policy_object_name
from plimsoll_api.supervision import Action, Mode, Recycle, Supervision
from plimsoll_api.supervision_policy import SelectedEngineType, SupervisionPolicy
from plimsoll_api.supervisor_config import (
    EngineEndpoint,
    GroupMember,
    PodEngine,
    ServiceRef,
    SupervisorConfig,
    make_pod_config,
)
from plimsoll_api.workloads import WorkloadRef

SELECTOR = {"matchLabels": {"app": "vllm"}}


def policy(**spec: Any) -> SupervisionPolicy:
    return SupervisionPolicy.model_validate(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "SupervisionPolicy",
            "metadata": {"name": "engines", "namespace": "ml"},
            "spec": {"selector": SELECTOR} | spec,
        }
    )


def test_the_smallest_policy_observes() -> None:
    spec = policy().spec
    assert spec.engine.type is SelectedEngineType.AUTO
    assert (spec.engine.container, spec.engine.port) == (None, None)
    assert spec.supervision.mode == "Observe"
    assert spec.memory.host is None
    assert not spec.probe.enabled


def test_a_policy_of_an_earlier_release_selects_as_before() -> None:
    """The API server wrote the default in lower case into each policy."""
    assert policy(supervision={"drain": {"mode": "carry"}}) == policy()


@pytest.mark.parametrize("key", ["a..b/c", "a.-b/c", "a-.b/c"])
@pytest.mark.parametrize("field", ["matchLabels", "matchExpressions"])
def test_a_key_that_the_api_server_takes_in_no_webhook_is_refused(key: str, field: str) -> None:
    one = {"key": key, "operator": "DoesNotExist"}
    with pytest.raises(ValueError, match="before the slash must be a DNS subdomain"):
        policy(selector={field: {key: "x"} if field == "matchLabels" else [one]})
    assert policy(selector={"matchLabels": {"a.b-c.d/e": "x"}})


def test_shared_fields_are_those_of_an_inference_service() -> None:
    """The same manifest means the same, and the API server applies the same schema and rules."""

    def spec_of(crd: dict[str, Any]) -> dict[str, Any]:
        versions = crd["spec"]["versions"]
        spec = versions[0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        found: dict[str, Any] = spec["properties"]
        return found

    ours, theirs = (
        spec_of(generate.make_supervision_policy_crd()),
        spec_of(generate.make_inference_service_crd()),
    )
    for name in ("memory", "supervision", "probe", "supervisor"):
        same = {key: value for key, value in ours[name].items() if key != "description"}
        other = {key: value for key, value in theirs[name].items() if key != "description"}
        if name in ("probe", "supervisor"):
            # The author of a policy must not choose what runs in other people's pods.
            assert "image" not in same["properties"]
            other["properties"] = {k: v for k, v in other["properties"].items() if k != "image"}
        if name == "supervision":
            # A policy refuses the start gate, which the service's rules explain.
            for one in (same, other):
                rules = one.pop("x-kubernetes-validations")
                one["rules"] = [rule for rule in rules if "startGate" not in rule["rule"]]
        assert same == other
    shared = {
        "memory": {"host": {"growthBudget": "2Gi", "window": "12h"}},
        "supervision": {"mode": "Recover", "restartBudget": {"count": 1}},
    }
    service = InferenceService.model_validate(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "a"},
            "spec": {"model": {"uri": "file:///m"}} | shared,
        }
    )
    found = policy(**shared).spec
    assert (found.memory, found.supervision) == (service.spec.memory, service.spec.supervision)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"probe": {"enabled": True, "image": "stranger:1"}}, "image"),
        ({"supervisor": {"image": "stranger:1"}}, "image"),
        ({"selector": {}}, "selector must not be empty"),
        ({"selector": {"matchLabels": {}}}, "selector must not be empty"),
        ({"selector": {"matchExpressions": []}}, "selector must not be empty"),
        ({"selector": {"matchLabels": {"a b": "c"}}}, "valid label keys"),
        ({"selector": {"matchLabels": {"a": "b c"}}}, "selector.matchLabels.a"),
        (
            {"selector": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
            "values must not be empty",
        ),
        (
            {
                "selector": {
                    "matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]
                }
            },
            "values must not be empty",
        ),
        ({"selector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}}, "operator"),
        ({"engine": {"type": "plimsoll"}}, "engine.type"),
        ({"engine": {"port": 9464}}, "engine.port must not be 9464"),
        ({"engine": {"port": 0}}, "engine.port"),
        ({"engine": {"container": "A"}}, "engine.container"),
        ({"memory": {"host": {"growthBudget": "0"}}}, "must be at least 1Mi"),
        ({"supervision": {"ladder": ["Reboot"]}}, "must contain only"),
        ({"selecter": {}}, "selecter"),
    ],
)
def test_a_bad_policy_is_refused_by_name(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        policy(**spec)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("expression", "labels", "selected"),
    [
        ({"operator": "In", "values": ["a", "b"]}, {"tier": "b"}, True),
        ({"operator": "In", "values": ["a"]}, {"tier": "b"}, False),
        ({"operator": "In", "values": ["a"]}, {}, False),
        ({"operator": "NotIn", "values": ["a"]}, {"tier": "a"}, False),
        ({"operator": "NotIn", "values": ["a"]}, {}, True),  # as Kubernetes does
        ({"operator": "Exists"}, {"tier": ""}, True),
        ({"operator": "Exists"}, {}, False),
        ({"operator": "DoesNotExist"}, {"tier": ""}, False),
        ({"operator": "DoesNotExist"}, {"other": "a"}, True),
    ],
)
def test_requirements_mean_what_they_mean_to_kubernetes(
    expression: dict[str, Any], labels: dict[str, str], selected: bool
) -> None:
    manifest = {"matchExpressions": [{"key": "tier", **expression}]}
    selector = LabelSelector.model_validate(manifest)
    assert selector.matches(labels) is selected
    assert selector.to_manifest() == manifest


def test_all_labels_and_all_requirements_must_hold() -> None:
    selector = LabelSelector.model_validate(
        {
            "matchLabels": {"app": "vllm", "team": "ml"},
            "matchExpressions": [{"key": "canary", "operator": "DoesNotExist"}],
        }
    )
    assert selector.matches({"app": "vllm", "team": "ml", "x": "y"})
    assert not selector.matches({"app": "vllm"})
    assert not selector.matches({"app": "vllm", "team": "ml", "canary": "1"})


def test_no_object_has_the_name_of_one_of_an_inference_service() -> None:
    """Their names hold no dot."""
    assert make_policy_object_name("engines") == "engines.policy"


def test_the_engine_of_a_pod_survives_its_environment_variable() -> None:
    url = "http://127.0.0.1:8000"
    found = PodEngine(
        EngineEndpoint(EngineType.VLLM, url, url, "m", container="server"),
        WorkloadRef("Deployment", "vllm"),
        memory_limit_bytes=1 << 30,
    )
    assert msgspec.json.decode(msgspec.json.encode(found), type=PodEngine) == found


def test_an_engine_that_does_not_start_again_is_not_restarted() -> None:
    url = "http://127.0.0.1:8000"
    endpoint = EngineEndpoint(EngineType.VLLM, url, url, "m", container="server")
    config = SupervisorConfig(
        ServiceRef("p", "n"),
        endpoint,
        supervision=Supervision(mode=Mode.RECOVER, ladder=tuple(Action)),
    )
    job = PodEngine(endpoint, WorkloadRef("Job", "j"), restarts=False)
    assert make_pod_config(config, job).supervision.ladder == (Action.TRIM, Action.POD_REPLACE)


def test_a_pod_that_nothing_may_restart_is_not_recycled() -> None:
    url = "http://127.0.0.1:8000"
    endpoint = EngineEndpoint(EngineType.VLLM, url, url, "m", container="server")
    wanted = Supervision(mode=Mode.RECOVER, recycle=Recycle(86_400.0))
    config = SupervisorConfig(ServiceRef("p", "n"), endpoint, supervision=wanted)
    job = PodEngine(endpoint, WorkloadRef("Job", "j"), restarts=False)
    assert make_pod_config(config, job).supervision.recycle is None
    worker = PodEngine(endpoint, WorkloadRef("X", "x"), GroupMember("0", worker=True))
    assert make_pod_config(config, worker).supervision.recycle is None, (
        "its leader restarts the group"
    )
    assert make_pod_config(config, PodEngine(endpoint)).supervision.recycle == wanted.recycle
