"""``spec.parallelism``: which specs are admitted, and how many nodes a replica has."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from plimsoll_api import parallelism
from plimsoll_api.inferenceservice import InferenceService
from tests.lab.definitions import Definitions
from tests.lab.objects import Refused


def service(name: str = "big", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"model": {"uri": "file:///m"}} | spec,
    }


def engine(limits: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    resources = {"resources": {"limits": limits}} if limits else {}
    return {"type": "vllm", "image": "vllm:1"} | resources | more


EIGHT = {"memory": "200Gi", "nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"}


@pytest.mark.parametrize(
    ("wanted", "limits", "nodes"),
    [
        ({"tensor": 8, "pipeline": 2}, EIGHT, 2),
        ({"tensor": 16}, EIGHT, 2),
        ({"tensor": 8}, EIGHT, 1),
        ({"data": 16}, EIGHT, 2),
        ({"tensor": 4, "data": 8}, EIGHT, 4),
        ({"tensor": 4}, {"nvidia.com/mig-1g.10gb": "2"}, 2),
        ({"tensor": 4}, {"amd.com/gpu": "4"}, 1),
        ({"pipeline": 2}, {"memory": "4Gi"}, 2),
        ({"pipeline": 2}, {"rdma/hca": "8"}, 2),
        ({"tensor": 8, "devicesPerNode": 4}, None, 2),
        (None, EIGHT, 1),
    ],
)
def test_the_number_of_nodes_follows_from_ranks_and_devices(
    wanted: dict[str, int] | None, limits: dict[str, str] | None, nodes: int
) -> None:
    more: dict[str, Any] = {"parallelism": wanted} if wanted else {}
    made = service(engine=engine(limits), **more)
    assert InferenceService.model_validate(made).spec.nodes == nodes


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (service(parallelism={"tensor": 2}), parallelism.ENGINE_MESSAGE),
        (
            service(parallelism={}, engine={"type": "custom", "image": "a"}),
            parallelism.ENGINE_MESSAGE,
        ),
        (
            service(parallelism={"data": 2}, engine=engine(type="sglang")),
            parallelism.DATA_MESSAGE,
        ),
        (service(parallelism={"tensor": 12}, engine=engine(EIGHT)), parallelism.NODES_MESSAGE),
        (service(parallelism={"tensor": 4}, engine=engine(EIGHT)), parallelism.NODES_MESSAGE),
        (service(parallelism={"tensor": 128}, engine=engine()), parallelism.NODES_MESSAGE),
        (
            service(parallelism={"tensor": 6, "data": 4}, engine=engine(EIGHT)),
            parallelism.NODES_MESSAGE,
        ),
        (
            service(parallelism={}, engine=engine(args=["--tensor_parallel_size", "2"])),
            parallelism.FLAGS_MESSAGE,
        ),
        (
            service(parallelism={}, engine=engine(args=["--data-parallel-rank=1"])),
            parallelism.FLAGS_MESSAGE,
        ),
        (
            service(parallelism={}, engine=engine(type="sglang", args=["--dist-init-addr=a:1"])),
            parallelism.FLAGS_MESSAGE,
        ),
        (service("b" * 45, parallelism={}, engine=engine()), parallelism.NAME_MESSAGE),
    ],
)
def test_what_cannot_start_is_refused_by_both(
    definitions: Definitions, document: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused) as refused:
        definitions.create(document)
    assert message in str(refused.value)
    with pytest.raises(ValidationError, match="parallelism"):
        InferenceService.model_validate(document)


def test_attention_data_parallelism_of_sglang_stays_an_argument(definitions: Definitions) -> None:
    args = ["--enable-dp-attention", "--dp-size=16"]
    made = service(parallelism={"tensor": 16}, engine=engine(EIGHT, type="sglang", args=args))
    assert InferenceService.model_validate(definitions.create(made)).spec.nodes == 2


SIZES = st.sampled_from((1, 2, 3, 4, 8, 16, 64))
FLAGS = (
    "--tp",
    "-tp=2",
    "--tpu",
    "--headless",
    "-n",
    "--nnodes=2",
    "--dp-size=2",
    "--max-num-seqs",
)
RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.10gb", "rdma/hca", "memory")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wanted=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("tensor", "pipeline", "data", "devicesPerNode"), SIZES)
    ),
    limits=st.dictionaries(st.sampled_from(RESOURCES), st.sampled_from(("0", "1", "2", "8"))),
    kind=st.sampled_from(("vllm", "vllm", "sglang", "plimsoll")),
    args=st.lists(st.sampled_from(FLAGS), max_size=1),
)
def test_the_models_and_the_api_server_judge_alike(
    definitions: Definitions,
    wanted: dict[str, int],
    limits: dict[str, str],
    kind: str,
    args: list[str],
) -> None:
    made = service(parallelism=wanted, engine=engine(limits, type=kind, args=args))
    try:
        stored = definitions.create(made)
    except Refused:
        with pytest.raises(ValidationError):
            InferenceService.model_validate(made)
    else:
        assert 1 <= InferenceService.model_validate(stored).spec.nodes <= parallelism.MAX_NODES
