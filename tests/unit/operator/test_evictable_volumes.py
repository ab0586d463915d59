"""cluster-autoscaler may remove a node with supervised pods, whose volumes on disk are named.

Tests ``render/eviction.py``, for each way in which a pod gets a supervisor.
"""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_operator.injection.documents import inject_document
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import InjectionOptions
from plimsoll_operator.injection.policy import inject_pod
from plimsoll_operator.render.containers import Images
from plimsoll_operator.render.eviction import (
    EVICTABLE_VOLUMES_ANNOTATION,
    mark_evictable_volumes,
)
from tests.pod_specs import SELECTED, policy
from tests.unit.operator.test_render_options import objects

Object = dict[str, Any]
IMAGES = Images("engine:1", "supervisor:1")
OPTIONS = InjectionOptions("supervisor:1")
SCRATCH = [{"name": "scratch", "emptyDir": {}}]


def pod_spec() -> Object:
    return {
        "containers": [{"name": "engine", "image": "vllm/vllm-openai:v0.24.0"}],
        "volumes": list(SCRATCH),
    }


def admit(annotations: Object) -> tuple[Object, Object]:
    meta = {"generateName": "vllm-", "labels": dict(SELECTED), "annotations": annotations}
    given = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod_spec()}
    made = inject_pod(given, policy(), IMAGES)
    assert made.refusal is None
    assert inject_pod(made.pod, policy(), IMAGES) == made
    return made.pod["metadata"]["annotations"], made.pod["spec"]


def inject(annotations: Object, options: InjectionOptions = OPTIONS) -> tuple[Object, Object]:
    template = {"metadata": {"annotations": annotations}, "spec": pod_spec()}
    given = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm"},
        "spec": {"template": template},
    }
    made = inject_document(given, options).document
    assert inject_document(made, options).document == made
    found = made["spec"]["template"]
    return found["metadata"]["annotations"], found["spec"]


def render(annotations: Object) -> tuple[Object, Object]:
    patch = {"metadata": {"annotations": annotations}, "spec": {"volumes": list(SCRATCH)}}
    template = objects(podTemplate=patch)["Deployment", "qwen"]["spec"]["template"]
    return template["metadata"]["annotations"], template["spec"]


def find_blocking_volumes(annotations: Object, spec: Object) -> set[str]:
    """Return the volumes for which the autoscaler keeps the node, by its documented rule."""
    safe = annotations[EVICTABLE_VOLUMES_ANNOTATION].split(",")
    return {
        one["name"]
        for one in spec["volumes"]
        if "emptyDir" in one
        and (one["emptyDir"] or {}).get("medium") != "Memory"
        and one["name"] not in safe
    }


@pytest.mark.parametrize("way", [admit, inject, render])
def test_only_the_authors_own_volumes_keep_a_pod_on_its_node(way: Any) -> None:
    annotations, spec = way({"team": "a"})
    assert find_blocking_volumes(annotations, spec) == {"scratch"}
    assert annotations["team"] == "a"
    assert "cluster-autoscaler.kubernetes.io/safe-to-evict" not in annotations
    listed = annotations[EVICTABLE_VOLUMES_ANNOTATION].split(",")
    assert set(listed) <= {one["name"] for one in spec["volumes"]}


@pytest.mark.parametrize("way", [admit, inject, render])
def test_the_authors_names_stay_and_so_does_their_safe_to_evict(way: Any) -> None:
    refuse = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    annotations, spec = way({EVICTABLE_VOLUMES_ANNOTATION: "scratch,later"} | refuse)
    assert annotations[EVICTABLE_VOLUMES_ANNOTATION].startswith("scratch,later,")
    assert not find_blocking_volumes(annotations, spec)
    assert annotations.items() >= refuse.items()


def test_the_volumes_of_the_probe_come_and_go_with_it() -> None:
    annotations, spec = inject({}, InjectionOptions("supervisor:1", probe=True))
    assert find_blocking_volumes(annotations, spec) == {"scratch"}
    assert "plimsoll-probe-run" in annotations[EVICTABLE_VOLUMES_ANNOTATION]
    assert inject(annotations) == inject({})


def test_a_download_and_a_cache_are_ours_and_a_claim_is_none_of_these() -> None:
    def list_names(**spec: Any) -> set[str]:
        template = objects(**spec)["Deployment", "qwen"]["spec"]["template"]
        assert not find_blocking_volumes(template["metadata"]["annotations"], template["spec"])
        return set(template["metadata"]["annotations"][EVICTABLE_VOLUMES_ANNOTATION].split(","))

    model: Object = {"uri": "hf://Qwen/Qwen3-4B"}
    assert list_names(model=model) == {"state", "cache", "tmp", "model"}
    assert list_names(model=model | {"cache": {"claimName": "c"}}) == {"state", "cache", "tmp"}


def test_an_llm_service_that_lists_volumes_lists_ours_too() -> None:
    given = {
        "apiVersion": "serving.kserve.io/v1alpha2",
        "kind": "LLMInferenceService",
        "metadata": {"name": "llama"},
        "spec": {
            "model": {"uri": "hf://org/m"},
            "annotations": {EVICTABLE_VOLUMES_ANNOTATION: "a"},
            "template": {"containers": [{"name": "main", "securityContext": {"runAsUser": 2000}}]},
        },
    }
    made = inject_document(given, OPTIONS)
    listed = {EVICTABLE_VOLUMES_ANNOTATION: "a,plimsoll-state,plimsoll-tmp"}
    assert made.document["spec"]["annotations"] == listed, "it would override the configuration"
    assert "annotations" not in made.others[0]["spec"]


def test_a_predictor_keeps_the_names_that_its_service_lists() -> None:
    given = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": "vllm", "annotations": {EVICTABLE_VOLUMES_ANNOTATION: "scratch"}},
        "spec": {"predictor": pod_spec()},
    }
    predictor = inject_document(given, OPTIONS).document["spec"]["predictor"]
    assert predictor["annotations"] == {
        EVICTABLE_VOLUMES_ANNOTATION: "scratch,plimsoll-state,plimsoll-tmp"
    }


def test_annotations_of_another_type_are_refused() -> None:
    with pytest.raises(InjectionError, match="annotations of these pods must be an object"):
        inject(["team"])  # type: ignore[arg-type]


def test_names_with_spaces_stay_because_the_autoscaler_compares_them_as_they_are() -> None:
    given = {EVICTABLE_VOLUMES_ANNOTATION: "a, tmp"}
    made = mark_evictable_volumes(given, [{"name": "tmp", "emptyDir": {}}], {"tmp", "run"})
    assert made == {EVICTABLE_VOLUMES_ANNOTATION: "a, tmp,tmp"}
