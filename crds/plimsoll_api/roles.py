"""Find the role of a pod in disaggregated or multi-node serving.

The labels of controllers take precedence over the engine's arguments. A pod of a multi-node group
without another role is its leader or a worker. Anyone who may create pods can set labels, so a role
grants no permissions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.names import ROLE_LABEL
from plimsoll_api.open_enum import OpenEnum

KV_TRANSFER_CONFIG = "--kv-transfer-config"
DISAGGREGATION_MODE = "--disaggregation-mode"

DISAGGREGATED_SET_ROLE = "disaggregatedset.x-k8s.io/role"
"""Label with the name of a role. Its author may choose any; only the usual names are recognized."""
LLM_D_ROLE = "llm-d.ai/role"
"""Label of llm-d, which KServe also sets on the pods of an LLMInferenceService."""
DYNAMO_TYPE = "nvidia.com/dynamo-component-type"
DYNAMO_SUBTYPE = "nvidia.com/dynamo-sub-component-type"
COMPONENT_LABEL = "app.kubernetes.io/component"


class PodRole(OpenEnum):
    """Role of a pod in disaggregated or multi-node serving."""

    PREFILL = "Prefill"
    DECODE = "Decode"
    BOTH = "Both"
    LEADER = "Leader"
    WORKER = "Worker"
    ROUTER = "Router"
    KV_STORE = "KVStore"


PLACES = frozenset({PodRole.LEADER, PodRole.WORKER})
"""Roles that only describe the position of a pod in its group. Any other role takes precedence."""
_LLM_D = {
    "prefill": PodRole.PREFILL,
    "encode-prefill": PodRole.PREFILL,
    "decode": PodRole.DECODE,
    "both": PodRole.BOTH,
    "prefill-decode": PodRole.BOTH,
    "encode-prefill-decode": PodRole.BOTH,
}
_DYNAMO = {
    "prefill": PodRole.PREFILL,
    "decode": PodRole.DECODE,
    "frontend": PodRole.ROUTER,
    "epp": PodRole.ROUTER,
}
_KSERVE = {
    "llminferenceservice-workload-prefill": PodRole.PREFILL,
    "llminferenceservice-workload-leader-prefill": PodRole.PREFILL,
    "llminferenceservice-workload-worker-prefill": PodRole.PREFILL,
    "llminferenceservice-workload-leader": PodRole.LEADER,
    "llminferenceservice-workload-worker": PodRole.WORKER,
    "llminferenceservice-router": PodRole.ROUTER,
    "llminferenceservice-router-scheduler": PodRole.ROUTER,
}
_BY_LABEL: tuple[tuple[str, Mapping[str, PodRole]], ...] = (
    (ROLE_LABEL, {role.value.lower(): role for role in PodRole}),
    (DISAGGREGATED_SET_ROLE, _LLM_D | {"router": PodRole.ROUTER}),
    (LLM_D_ROLE, _LLM_D),
    (DYNAMO_TYPE, _DYNAMO),
    (DYNAMO_SUBTYPE, _DYNAMO),
    (COMPONENT_LABEL, _KSERVE),
)
"""Labels with the roles of their values, most specific label first."""
_KV_ROLES = {
    "kv_producer": PodRole.PREFILL,
    "kv_consumer": PodRole.DECODE,
    "kv_both": PodRole.BOTH,
}
_MODES = {"prefill": PodRole.PREFILL, "decode": PodRole.DECODE}
_PROGRAMS = {
    "sglang_router.launch_router": PodRole.ROUTER,
    "dynamo.frontend": PodRole.ROUTER,
    "mooncake_master": PodRole.KV_STORE,
    "lmcache_server": PodRole.KV_STORE,
}


class ConnectorOptions(msgspec.Struct):
    """Options of a connector that limit how long it holds blocks, and its nested connectors."""

    kv_lease_duration: float | None = None
    decoder_kv_blocks_ttl: float | None = None
    connectors: list[TransferConfig] | None = None


class TransferConfig(msgspec.Struct):
    """Fields of vLLM's ``KVTransferConfig`` that Plimsoll uses."""

    kv_connector: str = ""
    kv_role: str | None = None
    kv_connector_extra_config: ConnectorOptions | None = None


def role_of(
    labels: Mapping[str, Any], words: Sequence[str] = (), worker: bool | None = None
) -> PodRole | None:
    """Return the role of a pod with ``labels`` and the engine arguments ``words``; None if unknown.

    ``worker`` is whether the pod is a worker of its group; None for a pod without a group.
    """
    candidates = [_role_of_label(labels, label, roles) for label, roles in _BY_LABEL]
    candidates.append(role_of_arguments(words))
    known = [role for role in candidates if role is not None]
    serving_roles = [role for role in known if role not in PLACES]
    if serving_roles or known:
        return (serving_roles or known)[0]
    return None if worker is None else PodRole.WORKER if worker else PodRole.LEADER


def role_of_arguments(words: Sequence[str]) -> PodRole | None:
    """Return the role that the arguments ``words`` set; None if they set none."""
    if (mode := _MODES.get(next(option_values(words, DISAGGREGATION_MODE), ""))) is not None:
        return mode
    config = transfer_config(words)
    if config is not None and (role := _KV_ROLES.get(config.kv_role or "")) is not None:
        return role
    programs = (word.rsplit("/", 1)[-1] for word in words)
    return next((_PROGRAMS[name] for name in programs if name in _PROGRAMS), None)


def transfer_config(words: Sequence[str]) -> TransferConfig | None:
    """Return vLLM's KV-transfer configuration from the arguments; None if it is malformed."""
    text = next(option_values(words, KV_TRANSFER_CONFIG), None)
    if text is None:
        return _from_keys(words)
    try:
        return decode(text.encode(), TransferConfig)
    except MalformedError:
        return None


def option_values(words: Sequence[str], flag: str) -> Iterator[str]:
    """Yield the values of a flag from last to first, because the last one takes precedence."""
    for number in range(len(words) - 1, -1, -1):
        name, equals, value = words[number].partition("=")
        if name.replace("_", "-") != flag:
            continue
        if equals:
            yield value
        elif number + 1 < len(words):
            yield words[number + 1]


def _from_keys(words: Sequence[str]) -> TransferConfig:
    """Return the configuration from arguments such as ``--kv-transfer-config.kv_role``."""

    def value(key: str) -> str | None:
        flag = f"{KV_TRANSFER_CONFIG}.{key.replace('_', '-')}"
        return next(option_values(words, flag), None)

    return TransferConfig(value("kv_connector") or "", value("kv_role"))


def _role_of_label(
    labels: Mapping[str, Any], label: str, roles: Mapping[str, PodRole]
) -> PodRole | None:
    return roles.get(str(labels.get(label, "")).lower())
