"""``plimsoll_api/roles.py``: the role of a pod, from its labels and its engine's arguments."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.names import ROLE_LABEL
from plimsoll_api.roles import PodRole, find_role, find_role_in_arguments

PREFILL, DECODE, BOTH, ROUTER = PodRole.PREFILL, PodRole.DECODE, PodRole.BOTH, PodRole.ROUTER
DYNAMO = "nvidia.com/dynamo-component-type"
COMPONENT = "app.kubernetes.io/component"


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ({"disaggregatedset.x-k8s.io/role": "prefill"}, PREFILL),
        ({"disaggregatedset.x-k8s.io/role": "Decode"}, DECODE),
        ({"disaggregatedset.x-k8s.io/role": "my-part"}, None),
        ({"llm-d.ai/role": "both"}, BOTH),
        ({"llm-d.ai/role": "prefill-decode"}, BOTH),
        ({"llm-d.ai/role": "encode"}, None),
        ({DYNAMO: "frontend"}, ROUTER),
        ({DYNAMO: "prefill"}, PREFILL),
        ({DYNAMO: "worker"}, None),
        ({DYNAMO: "worker", "nvidia.com/dynamo-sub-component-type": "decode"}, DECODE),
        ({DYNAMO: "planner"}, None),
        ({COMPONENT: "llminferenceservice-workload-prefill"}, PREFILL),
        ({COMPONENT: "llminferenceservice-workload-leader"}, PodRole.LEADER),
        (
            {COMPONENT: "llminferenceservice-workload-worker", "llm-d.ai/role": "decode"},
            DECODE,
        ),
        ({COMPONENT: "llminferenceservice-router-scheduler"}, ROUTER),
        ({COMPONENT: "database"}, None),
        ({ROLE_LABEL: "kvstore", "llm-d.ai/role": "decode"}, PodRole.KV_STORE),
        ({ROLE_LABEL: "nonsense", "llm-d.ai/role": "decode"}, DECODE),
        ({"disaggregatedset.x-k8s.io/role": "my-part", "llm-d.ai/role": "prefill"}, PREFILL),
    ],
)
def test_the_labels_of_each_controller(labels: dict[str, str], role: PodRole | None) -> None:
    assert find_role(labels) is role


@pytest.mark.parametrize(
    ("words", "role"),
    [
        (["vllm", "serve", "m", "--kv-transfer-config", '{"kv_role":"kv_producer"}'], PREFILL),
        (["vllm", "serve", "--kv_transfer_config={}", "--kv-transfer-config",
          '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'], BOTH),
        (["vllm", "serve", "--kv-transfer-config.kv_role", "kv_consumer"], DECODE),
        (["python", "-m", "sglang.launch_server", "--disaggregation-mode=prefill"], PREFILL),
        (["python", "-m", "sglang.launch_server", "--disaggregation-mode", "null"], None),
        (["python3", "-m", "sglang_router.launch_router", "--pd-disaggregation"], ROUTER),
        (["python3", "-m", "dynamo.frontend"], ROUTER),
        (["/usr/local/bin/mooncake_master", "--port=50051"], PodRole.KV_STORE),
        (["vllm", "serve", "m", "--kv-transfer-config", "{"], None),
        (["vllm", "serve", "m", "--kv-transfer-config"], None),
        (["vllm", "serve", "m"], None),
        ([], None),
    ],
)  # fmt: skip
def test_the_arguments_of_each_engine(words: list[str], role: PodRole | None) -> None:
    assert find_role_in_arguments(words) is role
    assert find_role({}, words) is role
    assert find_role({"llm-d.ai/role": "decode"}, words) is DECODE, "labels come first"


def test_a_pod_of_a_group_without_another_role_is_leader_or_worker() -> None:
    assert find_role({}, (), worker=False) is PodRole.LEADER
    assert find_role({}, (), worker=True) is PodRole.WORKER
    assert find_role({}, (), worker=None) is None
    assert find_role({}, ["--disaggregation-mode=decode"], worker=True) is DECODE
    component = {COMPONENT: "llminferenceservice-workload-worker"}
    assert find_role(component, ["--disaggregation-mode=decode"]) is DECODE


@given(
    st.dictionaries(st.text(max_size=9) | st.just(ROLE_LABEL), st.text(max_size=9)),
    st.lists(st.sampled_from(("--kv-transfer-config", "--disaggregation-mode=x")) | st.text()),
)
def test_any_labels_and_arguments_are_read(labels: dict[str, str], words: list[str]) -> None:
    found = find_role(labels, [*words, json.dumps(labels)])
    assert found is None or found in set(PodRole)
