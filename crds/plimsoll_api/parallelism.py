"""``spec.parallelism``: a model that one replica serves with several devices, on one or more nodes.

Each device runs one rank. The number of nodes is the number of ranks divided by the devices per
pod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from plimsoll_api.cel import make_rule
from plimsoll_api.engines import EngineType
from plimsoll_api.schema import ResourceModel
from plimsoll_api.serving import Engine
from plimsoll_api.units import parse_quantity

MAX_NODES = 64
MAX_SERVICE_NAME_CHARS = 44
"""Maximum length of the name of a service with ``parallelism``, whose pods have a label with the
value ``NAME-lws-GROUP-HASH``."""

DEVICE_RESOURCE_PREFIXES = (
    *("nvidia.com/gpu", "nvidia.com/mig-", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe"),
    *("habana.ai/gaudi", "huawei.com/Ascend", "google.com/tpu", "aws.amazon.com/neuron"),
)
"""Name prefixes of the device resources that run ranks, unlike network adapters (``rdma/hca``)."""

_RESERVED_FLAG_PATTERNS = {
    EngineType.VLLM: r"^(--(tensor|pipeline|data)[-_]parallel[-_]|-([tpd]p|n|r)(=|$)|--nnodes"
    r"|--node[-_]rank|--master[-_]|--headless|--distributed[-_]exec)",
    EngineType.SGLANG: r"^--((tensor|pipeline)[-_]parallel|[tp]p([-_]size)?(=|$)|nnodes"
    r"|node[-_]rank|dist[-_]init)",
}
"""Patterns of the flags that the operator sets; SGLang's ``--dp-size`` only divides the tensor
ranks."""

ENGINE_MESSAGE = (
    "parallelism requires engine.type vllm or sglang: the plimsoll engine serves a model on one "
    "node, and Plimsoll does not know how a custom engine starts on several"
)
DATA_MESSAGE = (
    "parallelism.data must be 1 for engine.type sglang: set --dp-size and --enable-dp-attention in "
    "engine.args, or spec.replicas"
)
NODES_MESSAGE = (
    "parallelism.tensor x pipeline x data must be a multiple of the devices of a node, for at most "
    f"{MAX_NODES} nodes. Each data-parallel copy must fill whole nodes, or share its node only "
    "with whole copies. Change these numbers, engine.resources.limits or "
    "parallelism.devicesPerNode"
)
FLAGS_MESSAGE = (
    "with spec.parallelism, engine.args must not set parallel sizes, ranks, nodes or their "
    "addresses: the operator sets them"
)
NAME_MESSAGE = (
    f"metadata.name must have at most {MAX_SERVICE_NAME_CHARS} characters with spec.parallelism: "
    "the pods of a group have a label that contains this name"
)


class Parallelism(ResourceModel):
    """Number of ranks in one replica, by kind of parallelism."""

    tensor: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="Number of ranks that share each layer. Defaults to 1."
    )
    pipeline: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1,
        description="Number of pipeline stages, among which the layers are divided. Defaults to 1.",
    )
    data: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Number of copies of the attention layers within a replica, for models with "
        "experts. Only for `vllm`. Defaults to 1.",
    )
    devices_per_node: Annotated[int, Field(ge=1, le=64)] | None = Field(
        default=None,
        description="Number of devices, and therefore of ranks, in each pod. Set it if the "
        "devices come from a resource claim. Defaults to the number of GPUs or other "
        "accelerators in `engine.resources.limits`, or to 1 if there are none.",
    )

    @property
    def ranks(self) -> int:
        """Number of ranks of a replica."""
        return self.tensor * self.pipeline * self.data

    def count_devices(self, limits: Mapping[str, str]) -> int:
        """Return the number of devices in each pod, given its engine's resource ``limits``."""
        if self.devices_per_node is not None:
            return self.devices_per_node
        named = (
            amount for name, amount in limits.items() if name.startswith(DEVICE_RESOURCE_PREFIXES)
        )
        return max(1, int(sum(parse_quantity(amount) for amount in named)))


def count_nodes(parallelism: Parallelism | None, engine: Engine) -> int:
    """Return the number of nodes of each replica, which is also the number of its pods."""
    return (
        1
        if parallelism is None
        else parallelism.ranks // parallelism.count_devices(engine.resources.limits)
    )


def explain_refused_parallelism(parallelism: Parallelism | None, engine: Engine) -> str | None:
    """Return why ``engine`` does not support this parallelism; None if it does."""
    if parallelism is None:
        return None
    if engine.type not in (EngineType.VLLM, EngineType.SGLANG):
        return ENGINE_MESSAGE
    if engine.type is EngineType.SGLANG and parallelism.data > 1:
        return DATA_MESSAGE
    devices, share = (
        parallelism.count_devices(engine.resources.limits),
        parallelism.tensor * parallelism.pipeline,
    )
    nodes, left = divmod(parallelism.ranks, devices)
    uneven = parallelism.data > 1 and share % devices and devices % share
    if left or uneven or not 1 <= nodes <= MAX_NODES:
        return NODES_MESSAGE
    pattern = re.compile(_RESERVED_FLAG_PATTERNS[engine.type].replace("$", r"\Z"))
    return FLAGS_MESSAGE if any(pattern.match(one) for one in engine.args) else None


_LIMITS_CEL = "self.engine.resources.limits"
_DEVICE_COUNT_CEL = (
    f"(has({_LIMITS_CEL}) ? {_LIMITS_CEL}"
    f".filter(r, {list(DEVICE_RESOURCE_PREFIXES)}.exists(p, r.startsWith(p)))"
    f".map(r, quantity(string({_LIMITS_CEL}[r])).asInteger()).sum() : 0)"
)
_DEVICES_CEL = f"[self.parallelism.?devicesPerNode.orValue([1, {_DEVICE_COUNT_CEL}].max())]"
_RANKS_PER_COPY_CEL = "self.parallelism.tensor * self.parallelism.pipeline"
_RANKS_CEL = f"{_RANKS_PER_COPY_CEL} * self.parallelism.data"
_NODES_CEL = (
    f"{_DEVICES_CEL}.all(d, {_RANKS_CEL} % d == 0 && {_RANKS_CEL} / d <= {MAX_NODES} && "
    f"(self.parallelism.data == 1 || ({_RANKS_PER_COPY_CEL}) % d == 0"
    f" || d % ({_RANKS_PER_COPY_CEL}) == 0))"
)


def _make_flags_expression(type_: EngineType) -> str:
    found = f"self.engine.args.exists(a, a.matches('{_RESERVED_FLAG_PATTERNS[type_]}'))"
    return f"self.engine.type != '{type_}' || !has(self.engine.args) || !{found}"


def _make_rule_if_set(expression: str, message: str, field: str) -> dict[str, str]:
    return make_rule(f"!has(self.parallelism) || ({expression})", message, fieldPath=field)


PARALLELISM_RULES = (
    _make_rule_if_set("self.engine.type in ['vllm', 'sglang']", ENGINE_MESSAGE, ".parallelism"),
    _make_rule_if_set(
        "self.engine.type != 'sglang' || self.parallelism.data == 1", DATA_MESSAGE, ".parallelism"
    ),
    _make_rule_if_set(_NODES_CEL, NODES_MESSAGE, ".parallelism"),
    *(
        _make_rule_if_set(_make_flags_expression(one), FLAGS_MESSAGE, ".engine.args")
        for one in _RESERVED_FLAG_PATTERNS
    ),
)
"""CEL rules that reject the same specs as :func:`explain_refused_parallelism`."""

NAME_LENGTH_RULE = make_rule(
    f"!has(self.spec.parallelism) || size(self.metadata.name) <= {MAX_SERVICE_NAME_CHARS}",
    NAME_MESSAGE,
)
