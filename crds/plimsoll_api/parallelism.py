"""``spec.parallelism``: a model that one replica serves with several devices, on one or more nodes.

Each device runs one rank. The number of nodes follows from the ranks and the devices per pod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from plimsoll_api.cel import rule
from plimsoll_api.engines import EngineType
from plimsoll_api.schema import ResourceModel
from plimsoll_api.serving import Engine
from plimsoll_api.units import quantity

MAX_NODES = 64
MAX_SERVICE_NAME = 44
"""Maximum length of the name of a service with ``parallelism``.

The value of a pod label is ``NAME-lws-GROUP-HASH``, with up to 3 digits and 10 characters.
"""

DEVICES = (
    *("nvidia.com/gpu", "nvidia.com/mig-", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe"),
    *("habana.ai/gaudi", "huawei.com/Ascend", "google.com/tpu", "aws.amazon.com/neuron"),
)
"""Name prefixes of resources that are devices for ranks.

The names of network adapters (``rdma/hca``, ``vpc.amazonaws.com/efa``) have a domain, too.
"""

_FLAGS = {
    EngineType.VLLM: r"^(--(tensor|pipeline|data)[-_]parallel[-_]|-([tpd]p|n|r)(=|$)|--nnodes"
    r"|--node[-_]rank|--master[-_]|--headless|--distributed[-_]exec)",
    EngineType.SGLANG: r"^--((tensor|pipeline)[-_]parallel|[tp]p([-_]size)?(=|$)|nnodes"
    r"|node[-_]rank|dist[-_]init)",
}
"""Flags that the operator sets.

SGLang's ``--dp-size`` is not one of them: it belongs to attention data parallelism, which divides
the tensor ranks.
"""

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
    f"{MAX_NODES} nodes, and nodes must not divide a data-parallel rank unevenly: change them, "
    "engine.resources.limits or parallelism.devicesPerNode"
)
FLAGS_MESSAGE = (
    "with spec.parallelism, engine.args must not set parallel sizes, ranks, nodes or their "
    "addresses: the operator sets them"
)
NAME_MESSAGE = (
    f"metadata.name must have at most {MAX_SERVICE_NAME} characters with spec.parallelism: the "
    "pods of a group have a label that contains it"
)


class Parallelism(ResourceModel):
    """Numbers of ranks in one replica, by kind of parallelism."""

    tensor: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="Number of ranks that share each layer. Defaults to 1."
    )
    pipeline: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="Number of stages, which share the layers. Defaults to 1."
    )
    data: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Number of copies of the attention layers within a replica, for models with "
        "experts. Only for `vllm`. Defaults to 1.",
    )
    devices_per_node: Annotated[int, Field(ge=1, le=64)] | None = Field(
        default=None,
        description="Number of devices, and so of ranks, in each pod. Defaults to the number of "
        "GPUs or other accelerators in `engine.resources.limits`, or 1 if it has none. Set it for "
        "devices of a resource claim.",
    )

    @property
    def ranks(self) -> int:
        """Number of ranks of a replica."""
        return self.tensor * self.pipeline * self.data

    def devices(self, limits: Mapping[str, str]) -> int:
        """Return the number of devices of a pod whose engine has these ``limits``."""
        if self.devices_per_node is not None:
            return self.devices_per_node
        named = (amount for name, amount in limits.items() if name.startswith(DEVICES))
        return max(1, int(sum(quantity(amount) for amount in named)))


def count_nodes(wanted: Parallelism | None, engine: Engine) -> int:
    """Return the number of nodes, and therefore of pods, of each replica."""
    return 1 if wanted is None else wanted.ranks // wanted.devices(engine.resources.limits)


def refusal(wanted: Parallelism | None, engine: Engine) -> str | None:
    """Return why ``engine`` cannot have this parallelism; None if it can."""
    if wanted is None:
        return None
    if engine.type not in (EngineType.VLLM, EngineType.SGLANG):
        return ENGINE_MESSAGE
    if engine.type is EngineType.SGLANG and wanted.data > 1:
        return DATA_MESSAGE
    devices, share = wanted.devices(engine.resources.limits), wanted.tensor * wanted.pipeline
    nodes, left = divmod(wanted.ranks, devices)
    uneven = wanted.data > 1 and share % devices and devices % share
    if left or uneven or not 1 <= nodes <= MAX_NODES:
        return NODES_MESSAGE
    pattern = re.compile(_FLAGS[engine.type].replace("$", r"\Z"))
    return FLAGS_MESSAGE if any(pattern.match(one) for one in engine.args) else None


_LIMITS = "self.engine.resources.limits"
_COUNTED = (
    f"(has({_LIMITS}) ? {_LIMITS}.filter(r, {list(DEVICES)}.exists(p, r.startsWith(p)))"
    f".map(r, quantity(string({_LIMITS}[r])).asInteger()).sum() : 0)"
)
_DEVICES = f"[self.parallelism.?devicesPerNode.orValue([1, {_COUNTED}].max())]"
_SHARE = "self.parallelism.tensor * self.parallelism.pipeline"
_RANKS = f"{_SHARE} * self.parallelism.data"
_FITS = (
    f"{_DEVICES}.all(d, {_RANKS} % d == 0 && {_RANKS} / d <= {MAX_NODES} && "
    f"(self.parallelism.data == 1 || ({_SHARE}) % d == 0 || d % ({_SHARE}) == 0))"
)


def _without_flags(type_: EngineType) -> str:
    found = f"self.engine.args.exists(a, a.matches('{_FLAGS[type_]}'))"
    return f"self.engine.type != '{type_}' || !has(self.engine.args) || !{found}"


def _if_set(expression: str, message: str, field: str) -> dict[str, str]:
    return rule(f"!has(self.parallelism) || ({expression})", message, fieldPath=field)


PARALLELISM_RULES = (
    _if_set("self.engine.type in ['vllm', 'sglang']", ENGINE_MESSAGE, ".parallelism"),
    _if_set(
        "self.engine.type != 'sglang' || self.parallelism.data == 1", DATA_MESSAGE, ".parallelism"
    ),
    _if_set(_FITS, NODES_MESSAGE, ".parallelism"),
    *(_if_set(_without_flags(one), FLAGS_MESSAGE, ".engine.args") for one in _FLAGS),
)
"""CEL rules that match :func:`refusal`."""

NAME_RULE = rule(
    f"!has(self.spec.parallelism) || size(self.metadata.name) <= {MAX_SERVICE_NAME}", NAME_MESSAGE
)
