"""podTemplate over the rendered template; the wanted object against the live one.

Tests ``render/compare.py``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_operator.render.compare import (
    get_owned_fields_hash,
    has_all_fields,
    list_missing_fields,
    merge_patch,
    merge_template,
    needs_apply,
)

BASE = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "initContainers": [{"name": "supervisor", "env": [{"name": "X", "value": "1"}]}],
        "containers": [
            {"name": "engine", "args": ["a", "b"], "volumeMounts": [{"mountPath": "/x"}]}
        ],
        "tolerations": [{"key": "one"}],
    },
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["a", "b", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "env", "spec", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def test_containers_merge_by_name_and_other_lists_are_replaced() -> None:
    before = copy.deepcopy(BASE)
    patch = {
        "spec": {
            "containers": [
                {"name": "engine", "args": ["c"], "volumeMounts": [{"mountPath": "/y"}]},
                {"name": "extra", "image": "i"},
            ],
            "tolerations": [{"key": "two"}],
        }
    }
    merged = merge_template(BASE, patch)["spec"]
    assert [one["name"] for one in merged["containers"]] == ["engine", "extra"]
    assert merged["containers"][0]["args"] == ["c"]
    assert merged["containers"][0]["volumeMounts"] == [{"mountPath": "/x"}, {"mountPath": "/y"}]
    assert merged["tolerations"] == [{"key": "two"}]
    assert before == BASE, "nothing is changed in place"


def test_the_supervisor_may_be_named_among_the_containers() -> None:
    patch = {"spec": {"containers": [{"name": "supervisor", "env": [{"name": "X", "value": "2"}]}]}}
    merged = merge_template(BASE, patch)["spec"]
    assert merged["initContainers"] == [
        {"name": "supervisor", "env": [{"name": "X", "value": "2"}]}
    ]
    assert [one["name"] for one in merged["containers"]] == ["engine"]


def test_null_removes() -> None:
    assert "tolerations" not in merge_template(BASE, {"spec": {"tolerations": None}})["spec"]


@given(JSON)
def test_merging_nothing_and_merging_twice_change_nothing(value: Any) -> None:
    base = {"spec": value}
    assert merge_patch(base, {}) == base
    once = merge_patch({"spec": {}}, base)
    assert merge_patch(once, base) == once


@given(JSON)
def test_everything_contains_itself(value: Any) -> None:
    assert has_all_fields(value, value)


@pytest.mark.parametrize(
    ("live", "wanted", "holds"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, {"a": 1, "b": ""}, True),
        ({"a": 1}, {"a": 1, "b": {"c": {}}}, False),
        ({"args": ["a"]}, {"args": ["a", "b"]}, False),
        (
            {"resources": {"limits": {"cpu": "1"}}},
            {"resources": {"limits": {"cpu": "1000m"}}},
            True,
        ),
        ({"resources": {"limits": {"cpu": "2"}}}, {"resources": {"limits": {"cpu": "1"}}}, False),
        # Wherever the type is a quantity: of an autoscaler, a volume, a device.
        ({"target": {"averageValue": "500m"}}, {"target": {"averageValue": "0.5"}}, True),
        ({"target": {"averageValue": "10"}}, {"target": {"averageValue": "1e1"}}, True),
        ({"ephemeral": {"storage": "1Gi"}}, {"ephemeral": {"storage": "1024Mi"}}, True),
        ({"divisor": "1"}, {"divisor": 1}, True),
        ({"replicas": 1}, {"replicas": "1"}, False),
        ({"annotations": {"a": "500m"}}, {"annotations": {"a": "0.5"}}, False),
        ({"args": ["500m"]}, {"args": ["0.5"]}, False),
        # Outside of amounts equal numbers are different texts.
        ({"env": [{"name": "A", "value": "1k"}]}, {"env": [{"name": "A", "value": "1000"}]}, False),
        (
            {"env": [{"name": "B", "value": "2"}, {"name": "A", "value": "1"}]},
            {"env": [{"name": "A", "value": "1"}]},
            True,
        ),
    ],
)
def test_contains(live: Any, wanted: Any, holds: bool) -> None:
    assert has_all_fields(live, wanted) is holds


def test_a_field_that_was_taken_out_is_applied() -> None:
    hashed = {"metadata": {"annotations": {"plimsoll.dev/applied-hash": "new"}}}
    live = {"metadata": {"annotations": {"plimsoll.dev/applied-hash": "old"}}, "spec": {"x": 1}}
    assert needs_apply(hashed, live)
    assert needs_apply(hashed, None)
    assert not needs_apply(hashed, hashed | {"spec": {"x": 1}})


def object_of(fields: str | None, **spec: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {"annotations": {"plimsoll.dev/applied-hash": "h"}}
    return {"metadata": meta | ({"ownedFields": fields} if fields else {}), "spec": spec}


def test_what_the_server_or_a_webhook_made_of_a_wish_is_not_sent_again() -> None:
    wanted = object_of(None, image="engine:1", replicas=1, hostnameOverride="a")
    live = object_of("f+replicas", image="mirror.example/engine:1", replicas=1)
    assert needs_apply(wanted, live), "after a start nothing is known of the last application"
    assert not needs_apply(wanted, live, get_owned_fields_hash(live, wanted))


def test_a_field_that_somebody_else_took_is_applied() -> None:
    wanted = object_of(None, image="engine:1", replicas=1)
    known = get_owned_fields_hash(object_of("f+replicas"), wanted)
    assert needs_apply(wanted, object_of("f", image="engine:1", replicas=7), known)
    assert needs_apply(wanted, object_of("g+replicas", image="theirs:1", replicas=1), known)
    assert needs_apply(wanted, object_of(None, image="engine:1", replicas=1), known)


def test_an_autoscaler_that_takes_the_replicas_changes_nothing_of_ours() -> None:
    wanted = object_of(None, image="engine:1")
    known = get_owned_fields_hash(object_of("f+replicas"), wanted)
    assert known == "f"
    assert not needs_apply(wanted, object_of("f", image="engine:1", replicas=3), known)


def test_fields_that_a_cluster_did_not_keep_are_named() -> None:
    wanted = {
        "spec": {
            "hostnameOverride": "abc",
            "hostPID": False,
            "minReadySeconds": 0,
            "containers": [
                {"name": "engine", "image": "e:1", "lifecycle": {"stopSignal": "SIGINT"}},
                {"name": "extra", "image": "x:1"},
            ],
            "metrics": [{"type": "Pods", "pods": {"target": {"averageValue": "0.5"}}}],
        }
    }
    live = {
        "spec": {
            "containers": [{"name": "engine", "image": "mirror/e:1", "lifecycle": {}}],
            "metrics": [{"type": "Pods", "pods": {"target": {"averageValue": "500m"}}}],
        }
    }
    assert list_missing_fields(live, wanted) == [
        "spec.hostnameOverride",
        "spec.containers[engine].lifecycle.stopSignal",
        "spec.containers[extra]",
    ]
    assert list_missing_fields(wanted, wanted) == []
    many = list_missing_fields({"spec": {}}, {"spec": {f"f{n:02}": "x" for n in range(20)}})
    assert (len(many), many[-1]) == (9, "12 more")


@given(JSON)
def test_nothing_is_absent_from_itself(value: Any) -> None:
    assert list_missing_fields({"spec": value}, {"spec": value}) == []
