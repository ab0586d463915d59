"""Find the role of a pod in disaggregated or multi-node serving.

Labels of controllers take precedence over the engine's arguments. Anyone who may create pods can
set labels, so a role grants no permissions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.names import ROLE_LABEL
from plimsoll_api.open_enum import OpenEnum

KV_TRANSFER_CONFIG_FLAG = "--kv-transfer-config"
DISAGGREGATION_MODE_FLAG = "--disaggregation-mode"

DISAGGREGATED_SET_ROLE_LABEL = "disaggregatedset.x-k8s.io/role"
"""Label with the role's name in a DisaggregatedSet; its author chooses the name, and Plimsoll
recognizes the usual ones."""
LLM_D_ROLE_LABEL = "llm-d.ai/role"
"""Label of llm-d, which KServe also sets on the pods of an LLMInferenceService."""
DYNAMO_TYPE_LABEL = "nvidia.com/dynamo-component-type"
DYNAMO_SUBTYPE_LABEL = "nvidia.com/dynamo-sub-component-type"
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


POSITION_ROLES = frozenset({PodRole.LEADER, PodRole.WORKER})
"""Roles that only describe the position of a pod in its group; other roles take precedence."""
_LLM_D_ROLES = {
    "prefill": PodRole.PREFILL,
    "encode-prefill": PodRole.PREFILL,
    "decode": PodRole.DECODE,
    "both": PodRole.BOTH,
    "prefill-decode": PodRole.BOTH,
    "encode-prefill-decode": PodRole.BOTH,
}
_DYNAMO_ROLES = {
    "prefill": PodRole.PREFILL,
    "decode": PodRole.DECODE,
    "frontend": PodRole.ROUTER,
    "epp": PodRole.ROUTER,
}
_KSERVE_ROLES = {
    "llminferenceservice-workload-prefill": PodRole.PREFILL,
    "llminferenceservice-workload-leader-prefill": PodRole.PREFILL,
    "llminferenceservice-workload-worker-prefill": PodRole.PREFILL,
    "llminferenceservice-workload-leader": PodRole.LEADER,
    "llminferenceservice-workload-worker": PodRole.WORKER,
    "llminferenceservice-router": PodRole.ROUTER,
    "llminferenceservice-router-scheduler": PodRole.ROUTER,
}
_ROLES_BY_LABEL: tuple[tuple[str, Mapping[str, PodRole]], ...] = (
    (ROLE_LABEL, {role.value.lower(): role for role in PodRole}),
    (DISAGGREGATED_SET_ROLE_LABEL, _LLM_D_ROLES | {"router": PodRole.ROUTER}),
    (LLM_D_ROLE_LABEL, _LLM_D_ROLES),
    (DYNAMO_TYPE_LABEL, _DYNAMO_ROLES),
    (DYNAMO_SUBTYPE_LABEL, _DYNAMO_ROLES),
    (COMPONENT_LABEL, _KSERVE_ROLES),
)
"""Pod labels with the role for each value, most specific label first."""
_KV_ROLES = {
    "kv_producer": PodRole.PREFILL,
    "kv_consumer": PodRole.DECODE,
    "kv_both": PodRole.BOTH,
}
_DISAGGREGATION_MODE_ROLES = {"prefill": PodRole.PREFILL, "decode": PodRole.DECODE}
_PROGRAM_ROLES = {
    "sglang_router.launch_router": PodRole.ROUTER,
    "dynamo.frontend": PodRole.ROUTER,
    "mooncake_master": PodRole.KV_STORE,
    "lmcache_server": PodRole.KV_STORE,
}


# vLLM accepts sizes such as 80g in its JSON arguments, outside strings.
_STRING_OR_SIZE_PATTERN = re.compile(
    r'"(?:[^"\\]|\\.?)*+(?:"|\Z)|\b(?P<number>\d+(?:\.\d+)?)(?P<unit>[kKmMgGtT])\b', re.S
)
_SIZE_UNITS = {unit: 1000.0**exponent for exponent, unit in enumerate("kmgt", 1)}
_SIZE_UNITS |= {unit: 1024.0**exponent for exponent, unit in enumerate("KMGT", 1)}


class ConnectorOptions(msgspec.Struct):
    """Options of a KV connector: the time for which it holds blocks, and nested connectors."""

    kv_lease_duration: float | None = None
    decoder_kv_blocks_ttl: float | None = None
    connectors: list[TransferConfig] | None = None


class TransferConfig(msgspec.Struct):
    """Fields of vLLM's ``KVTransferConfig`` that Plimsoll uses."""

    kv_connector: str = ""
    kv_role: str | None = None
    kv_connector_extra_config: ConnectorOptions | None = None


def find_role(
    labels: Mapping[str, Any], arguments: Sequence[str] = (), worker: bool | None = None
) -> PodRole | None:
    """Return the pod's role according to its labels and its engine's arguments; None if unknown.

    ``worker`` is whether the pod is a worker of its group; None for a pod without a group.
    """
    candidates = [_find_role_in_label(labels, label, roles) for label, roles in _ROLES_BY_LABEL]
    candidates.append(find_role_in_arguments(arguments))
    known = [role for role in candidates if role is not None]
    serving_roles = [role for role in known if role not in POSITION_ROLES]
    if serving_roles or known:
        return (serving_roles or known)[0]
    return None if worker is None else PodRole.WORKER if worker else PodRole.LEADER


def find_role_in_arguments(arguments: Sequence[str]) -> PodRole | None:
    """Return the role that the engine's arguments set; None if they set no role."""
    if (
        mode := _DISAGGREGATION_MODE_ROLES.get(
            next(iterate_option_values(arguments, DISAGGREGATION_MODE_FLAG), "")
        )
    ) is not None:
        return mode
    config = parse_transfer_config(arguments)
    if config is not None and (role := _KV_ROLES.get(config.kv_role or "")) is not None:
        return role
    programs = (word.rsplit("/", 1)[-1] for word in arguments)
    return next((_PROGRAM_ROLES[name] for name in programs if name in _PROGRAM_ROLES), None)


def parse_transfer_config(arguments: Sequence[str]) -> TransferConfig | None:
    """Return vLLM's KV-transfer configuration from its arguments; None if it is malformed."""
    text = next(iterate_option_values(arguments, KV_TRANSFER_CONFIG_FLAG), None)
    if text is None:
        return _parse_dotted_flags(arguments)
    try:
        return decode(_STRING_OR_SIZE_PATTERN.sub(_expand_size, text).encode(), TransferConfig)
    except MalformedError:
        return None


def _expand_size(match: re.Match[str]) -> str:
    if match["number"] is None:
        return match[0]
    return str(float(match["number"]) * _SIZE_UNITS[match["unit"]])


def iterate_option_values(arguments: Sequence[str], flag: str) -> Iterator[str]:
    """Yield the values of a flag from last to first, because the last one takes precedence."""
    for number in range(len(arguments) - 1, -1, -1):
        name, equals, value = arguments[number].partition("=")
        if name.replace("_", "-") != flag:
            continue
        if equals:
            yield value
        elif number + 1 < len(arguments):
            yield arguments[number + 1]


# An example is ``--kv-transfer-config.kv_role``.
def _parse_dotted_flags(arguments: Sequence[str]) -> TransferConfig:
    def get_value(key: str) -> str | None:
        flag = f"{KV_TRANSFER_CONFIG_FLAG}.{key.replace('_', '-')}"
        return next(iterate_option_values(arguments, flag), None)

    return TransferConfig(get_value("kv_connector") or "", get_value("kv_role"))


def _find_role_in_label(
    labels: Mapping[str, Any], label: str, roles: Mapping[str, PodRole]
) -> PodRole | None:
    return roles.get(str(labels.get(label, "")).lower())
