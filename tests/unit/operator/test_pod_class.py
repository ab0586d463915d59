"""A supervisor beside other containers: the pod keeps its QoS class, and a quota admits it.

Tests ``render/containers.py``, and ``injection/sidecar.py`` and ``render/pod.py``, which use it.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.resources import Resources
from plimsoll_api.serving import SUPERVISOR_RESOURCES
from plimsoll_api.units import parse_quantity
from plimsoll_operator.injection.policy import inject_pod
from plimsoll_operator.render.containers import Images, fit_resources
from plimsoll_operator.render.deployment import compute_pod_hash
from plimsoll_operator.render.pod import make_pod_template
from tests.pod_specs import SELECTED, policy

IMAGES = Images("engine:1", "supervisor:1")
Object = dict[str, Any]
FULL = {"cpu": "12", "memory": "48Gi"}
GUARANTEED = {"limits": FULL | {"nvidia.com/gpu": "1"}, "requests": FULL | {"nvidia.com/gpu": "1"}}
DEFAULT = SUPERVISOR_RESOURCES.model_dump(by_alias=True)
COMPUTE = ("cpu", "memory")


def qos(spec: Object) -> str:
    """``ComputePodQOS`` of Kubernetes 1.34, after its defaults, for pods without ``resources``."""
    sums: dict[str, dict[str, Fraction]] = {"requests": {}, "limits": {}}
    guaranteed = True
    for one in [*spec["containers"], *spec.get("initContainers", ())]:
        held = one.get("resources") or {}
        limits = held.get("limits") or {}
        each = {"limits": limits, "requests": limits | (held.get("requests") or {})}
        for kind, amounts in each.items():
            for name in COMPUTE:
                if amount := parse_quantity(str(amounts.get(name, 0))):
                    sums[kind][name] = sums[kind].get(name, Fraction(0)) + Fraction(amount)
        guaranteed &= all(parse_quantity(str(limits.get(name, 0))) > 0 for name in COMPUTE)
    if not sums["requests"] and not sums["limits"]:
        return "BestEffort"
    return "Guaranteed" if guaranteed and sums["requests"] == sums["limits"] else "Burstable"


def pod(*resources: Object, init: tuple[Object, ...] = ()) -> Object:
    made = [{"name": f"c{at}", "image": "x", "resources": one} for at, one in enumerate(resources)]
    before = [{"name": f"i{at}", "image": "x", "resources": one} for at, one in enumerate(init)]
    made[0] |= {"name": "engine", "image": "vllm/vllm-openai:v0.24.0"}
    spec: Object = {"containers": made} | ({"initContainers": before} if before else {})
    metadata = {"generateName": "vllm-", "labels": SELECTED}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def admitted(given: Object, images: Images = IMAGES, **spec: Any) -> Object:
    engine = {"engine": {"container": "engine"}}
    made = inject_pod(given, policy(**engine | spec), images)
    assert made.refusal is None, made.refusal
    found: Object = made.pod["spec"]
    return found


def own(spec: Object, name: str = "supervisor") -> Object:
    (found,) = [one["resources"] for one in spec["initContainers"] if one["name"] == name]
    return dict(found)


@pytest.mark.parametrize(
    ("given", "kept", "resources"),
    [
        (
            pod(GUARANTEED),
            "Guaranteed",
            {
                "limits": {"cpu": "200m", "memory": "256Mi"},
                "requests": {"cpu": "200m", "memory": "256Mi"},
            },
        ),
        (pod({"limits": FULL}), "Guaranteed", None),
        (pod(GUARANTEED, {"limits": {"cpu": "1", "memory": "1Gi"}}), "Guaranteed", None),
        (pod(GUARANTEED, init=({"limits": FULL},)), "Guaranteed", None),
        (pod(GUARANTEED, {}), "Burstable", DEFAULT),
        (pod(GUARANTEED, init=({},)), "Burstable", DEFAULT),
        (pod({"limits": {"memory": "48Gi"}}), "Burstable", DEFAULT),
        (
            # A quota that counts limits.cpu rejects a pod if one of its containers has none.
            pod({"limits": FULL, "requests": {"cpu": "1"}}),
            "Burstable",
            {"limits": {"cpu": "200m", "memory": "256Mi"}, "requests": DEFAULT["requests"]},
        ),
        (
            # The limit on a pod's ephemeral storage is the sum of its containers' limits.
            pod({"limits": {"ephemeral-storage": "10Gi"}}),
            "Burstable",
            {
                "limits": {"memory": "256Mi", "ephemeral-storage": "512Mi"},
                "requests": DEFAULT["requests"] | {"ephemeral-storage": "64Mi"},
            },
        ),
    ],
)
@pytest.mark.parametrize("probe", [False, True])
def test_a_pod_keeps_its_class(
    given: Object, kept: str, resources: Object | None, probe: bool
) -> None:
    before = qos(given["spec"])
    spec = admitted(given, probe={"enabled": probe})
    assert qos(spec) == kept
    assert before in (kept, "BestEffort")
    if resources is not None:
        assert own(spec) == resources
    if kept == "Guaranteed" and probe:
        made = own(spec, "plimsoll-probe")
        assert made["limits"] == made["requests"]
    again = inject_pod(
        pod_of(spec), policy(engine={"container": "engine"}, probe={"enabled": probe}), IMAGES
    )
    assert own(again.pod["spec"]) == own(spec), "a second webhook call changes nothing"


def pod_of(spec: Object) -> Object:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": SELECTED}, "spec": spec}


amounts = st.dictionaries(
    st.sampled_from((*COMPUTE, "ephemeral-storage", "nvidia.com/gpu")),
    st.sampled_from(("0", "1", "100m", "2Gi")),
)
some = st.builds(
    lambda limits, requests: {"limits": limits, "requests": requests}, amounts, amounts
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(some, min_size=1, max_size=3),
    st.lists(some, max_size=2),
    st.booleans(),
    st.sampled_from(
        (
            SUPERVISOR_RESOURCES,
            Resources(requests={"cpu": "2"}),
            Resources(limits={"memory": "1Gi"}),
            Resources(),
        )
    ),
)
def test_no_pod_falls_to_a_lower_class(
    containers: list[Object], init: list[Object], probe: bool, default: Resources
) -> None:
    for one in (*containers, *init):
        # The API server takes no request above its limit.
        one["requests"] = {
            name: one["limits"].get(name, amount) for name, amount in one["requests"].items()
        }
    given = pod(*containers, init=tuple(init))
    before = qos(given["spec"])
    images = Images("engine:1", "supervisor:1", resources=default)
    spec = admitted(given, images, probe={"enabled": probe})
    assert before != "Guaranteed" or qos(spec) == "Guaranteed"
    made = own(spec)
    for name, amount in made["requests"].items():
        assert name not in made["limits"] or parse_quantity(amount) <= parse_quantity(
            made["limits"][name]
        )


def test_what_a_policy_sets_is_taken_as_it_is() -> None:
    wanted = {"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}}
    spec = admitted(
        pod(GUARANTEED),
        Images("e:1", "s:1", pull_secrets=("cluster",)),
        supervisor={
            "resources": wanted,
            "dcgmExporterPort": 9400,
            "amdExporterPort": 5000,
            "imagePullSecrets": [{"name": "team"}],
        },
    )
    assert own(spec) == wanted
    env = {one["name"]: one.get("value") for one in spec["initContainers"][-1]["env"]}
    assert (env["DCGM_EXPORTER_PORT"], env["AMD_EXPORTER_PORT"]) == ("9400", "5000")
    assert spec["imagePullSecrets"] == [{"name": "team"}]


def test_pull_secrets_join_those_of_the_pod() -> None:
    images = Images("e:1", "s:1", pull_secrets=("cluster", "own"))
    given = pod({})
    assert "imagePullSecrets" not in admitted(given)
    given["spec"]["imagePullSecrets"] = [{"name": "own"}, {"name": "hub"}]
    spec = admitted(given, images)
    assert spec["imagePullSecrets"] == [{"name": "hub"}, {"name": "cluster"}, {"name": "own"}]
    again = inject_pod(pod_of(spec), policy(engine={"container": "engine"}), images).pod["spec"]
    assert again["imagePullSecrets"] == spec["imagePullSecrets"]


def service(**spec: Any) -> InferenceService:
    return InferenceService.model_validate(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "chat", "namespace": "ml"},
            "spec": {"model": {"uri": "hf://org/model"}} | spec,
        }
    )


def test_the_pods_of_a_service_are_guaranteed_if_its_engine_is() -> None:
    """The download of the model and the probe run in the same pod."""
    wanted = service(
        engine={"type": "vllm", "image": "vllm:1", "resources": GUARANTEED},
        probe={"enabled": True},
    )
    spec = make_pod_template(wanted, IMAGES)["spec"]
    names = [one["name"] for one in spec["initContainers"]]
    assert names == ["model-download", "plimsoll-probe", "supervisor"]
    assert qos(spec) == "Guaranteed"
    assert qos(make_pod_template(service(), IMAGES)["spec"]) == "Burstable"
    assert own(make_pod_template(service(), IMAGES)["spec"]) == DEFAULT
    secrets = Images("e:1", "s:1", pull_secrets=("hub",))
    assert make_pod_template(service(), secrets)["spec"]["imagePullSecrets"] == [{"name": "hub"}]


def test_the_former_default_of_a_service_rolls_no_pod() -> None:
    """API servers wrote it into stored services."""
    stored = service(supervisor={"resources": DEFAULT})
    assert stored.spec.supervisor.resources is None
    assert compute_pod_hash(stored) == compute_pod_hash(service())


def test_amounts_of_a_manifest_may_be_anything() -> None:
    for wrong in ("many", {"limits": "12"}, {"limits": {"cpu": "lots", "memory": "1Gi"}}, None):
        made = fit_resources(SUPERVISOR_RESOURCES, [{"name": "engine", "resources": wrong}])
        assert made["requests"] == DEFAULT["requests"]
