"""A podTemplate is held to the restricted standard by the operator itself, field by field.

Tests ``plimsoll_operator/plans/service.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_operator.kinds import InvalidSpecError
from plimsoll_operator.plans.service import Plan, make_plan, parse_service
from plimsoll_operator.render import Images
from tests.pod_templates import (
    ALLOWED,
    CREDENTIALS,
    NO_DOWNLOAD,
    REFUSED,
    REFUSED_WITHOUT_DOWNLOAD,
)

IMAGES = Images("engine:1", "supervisor:1")


def plan(template: Any, restricted: bool = True, spec: Any = CREDENTIALS) -> Plan:
    meta = {"name": "qwen", "namespace": "ml", "uid": "u-1", "generation": 1}
    about = {"apiVersion": "plimsoll.dev/v1alpha1", "kind": "InferenceService", "metadata": meta}
    service = parse_service(about | {"spec": spec | {"podTemplate": template}})
    return make_plan(service, {}, [], [], IMAGES, None, restricted)


@pytest.mark.parametrize(("spec", "said"), REFUSED)
def test_what_goes_beyond_is_refused_by_its_field(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSpecError) as refused:
        plan({"spec": spec})
    assert str(refused.value).startswith("spec.podTemplate.")
    assert said in str(refused.value)
    assert "podTemplate.unrestrictedNamespaces" in str(refused.value)
    assert plan({"spec": spec}, restricted=False).desired, "an administrator may open a namespace"


@pytest.mark.parametrize(("spec", "said"), REFUSED_WITHOUT_DOWNLOAD)
def test_a_container_is_ours_only_where_we_render_it(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSpecError) as refused:
        plan({"spec": spec}, spec=NO_DOWNLOAD)
    assert said in str(refused.value)


@pytest.mark.parametrize("spec", ALLOWED)
def test_what_stays_within_is_rendered(spec: dict[str, Any]) -> None:
    assert plan({"spec": spec}).desired


@pytest.mark.parametrize("profile", ["unconfined", "runtime/default"])
def test_an_old_annotation_sets_no_profile(profile: str) -> None:
    key = "container.apparmor.security.beta.kubernetes.io/engine"
    with pytest.raises(InvalidSpecError, match=r"metadata\.annotations"):
        plan({"metadata": {"annotations": {key: profile}}})


FIELDS = st.sampled_from(
    [
        "spec", "metadata", "containers", "initContainers", "volumes", "name", "engine",
        "securityContext", "capabilities", "drop", "add", "env", "volumeMounts", "projected",
        "sources", "secret", "annotations", "labels", "lifecycle", "preStop", "ports", "sysctls",
        "seccompProfile", "type", "hostNetwork", "resources", "limits",
    ]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | FIELDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=25,
)


@given(st.dictionaries(FIELDS, JSON, max_size=4))
def test_whatever_is_written_as_a_template_is_that_services_own_error(template: Any) -> None:
    said = "spec.podTemplate"
    try:
        plan(template)
    except InvalidSpecError as error:
        said = str(error)
    assert said.startswith("spec.podTemplate")
