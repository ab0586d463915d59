"""Determine how long a disaggregated engine may hold KV blocks for another engine.

A prefill engine holds the blocks of a finished request until a decode engine has read them, or
until a timeout of the KV connector. If it ends earlier, the request fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from plimsoll_api.engines import EngineType
from plimsoll_api.roles import (
    DISAGGREGATION_MODE_FLAG,
    ConnectorOptions,
    TransferConfig,
    iterate_option_values,
    parse_transfer_config,
)

ReadVariable = Callable[[str], str | None]
"""Returns an environment variable of the engine; None if it is not set or unreadable."""

# VLLM_NIXL_ABORT_REQUEST_TIMEOUT in vLLM up to 0.13. In later versions, the decode engine renews a
# lease of 30 s while its request waits, and 480 s apply to blocks on the decode engine.
NIXL_LEASE_S = 480.0
# VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT in vLLM.
MOONCAKE_LEASE_S = 480.0
# VLLM_MORI_READ_ABORT_REQUEST_TIMEOUT in vLLM.
MORIIO_LEASE_S = 3600.0
# SGLANG_DISAGGREGATION_WAITING_TIMEOUT in SGLang.
SGLANG_LEASE_S = 300.0
UNKNOWN_CONNECTOR_LEASE_S = 480.0
# vLLM's connectors with this prefix use NIXL.
NIXL_CONNECTOR_PREFIX = "Nixl"
# Last version of vLLM whose engines cannot reconnect to a restarted partner, by connector. Up to
# 0.26, vLLM installs NIXL 1.3.2 or earlier. After a restart of the partner, decode engines crash,
# or transfers fail: vllm-project/vllm#49238.
LAST_VERSIONS_WITHOUT_RECONNECT = {NIXL_CONNECTOR_PREFIX: (0, 26)}
# A build from a repository without tags calls itself 0.1.dev, whatever its version is.
_VERSION_PATTERN = re.compile(r"(?!0\.1\.dev)(\d{1,4})\.(\d{1,4})")
MAX_LEASE_S = 86_400.0
# A MultiConnector lists several connectors.
MAX_CONNECTORS = 16


def read_kv_lease_s(
    engine_type: EngineType,
    arguments: Sequence[str],
    read_variable: ReadVariable = lambda name: None,
) -> float | None:
    """Return the longest time for which the engine holds KV blocks for another engine.

    None if it holds no blocks for other engines, or if its configuration cannot be read.
    """
    if engine_type is EngineType.SGLANG:
        if next(iterate_option_values(arguments, DISAGGREGATION_MODE_FLAG), "null") == "null":
            return None
        return _parse_seconds(
            read_variable("SGLANG_DISAGGREGATION_WAITING_TIMEOUT"), SGLANG_LEASE_S
        )
    if engine_type is not EngineType.VLLM:
        return None
    config = parse_transfer_config(arguments)
    if config is None:
        return None
    leases = [
        _read_connector_lease_s(connector, read_variable)
        for connector in _iterate_connectors(config)
    ]
    return max((lease for lease in leases if lease is not None), default=None)


def read_connector_name(engine_type: EngineType, arguments: Sequence[str]) -> str:
    """Return the name of vLLM's KV connector; empty without a connector."""
    config = parse_transfer_config(arguments) if engine_type is EngineType.VLLM else None
    names = (
        [connector.kv_connector for connector in _iterate_connectors(config)]
        if config is not None
        else []
    )
    # NIXL determines how engines connect.
    return next(
        (name for name in names if name.startswith(NIXL_CONNECTOR_PREFIX)),
        names[0] if names else "",
    )


def can_test_with_connector(connector: str) -> bool:
    """Report whether engines with this connector can be tested with their partners."""
    return connector.startswith(NIXL_CONNECTOR_PREFIX)


def find_restart_blocker(connector: str, version: str) -> str | None:
    """Return the reason why an engine must not restart alone; None if it may restart."""
    tied = (
        last
        for prefix, last in LAST_VERSIONS_WITHOUT_RECONNECT.items()
        if connector.startswith(prefix)
    )
    last = next(tied, None)
    version_match = _VERSION_PATTERN.match(version)
    if last is None or version_match is None or tuple(map(int, version_match.groups())) > last:
        return None
    return (
        f"with vLLM {version} and {connector}, a restart of one engine breaks the engines with "
        "which it exchanges KV blocks: restart the prefill and decode pods together, or upgrade "
        f"vLLM to a version later than {last[0]}.{last[1]}"
    )


def _iterate_connectors(config: TransferConfig) -> Iterator[TransferConfig]:
    yield config
    nested = config.kv_connector_extra_config and config.kv_connector_extra_config.connectors
    yield from (nested or [])[:MAX_CONNECTORS]


def _read_connector_lease_s(config: TransferConfig, read_variable: ReadVariable) -> float | None:
    name, extra = config.kv_connector, config.kv_connector_extra_config or ConnectorOptions()
    if name.startswith("Nixl"):
        configured = max(extra.kv_lease_duration or 0.0, extra.decoder_kv_blocks_ttl or 0.0)
        timeout_s = _parse_seconds(read_variable("VLLM_NIXL_ABORT_REQUEST_TIMEOUT"), NIXL_LEASE_S)
        return min(MAX_LEASE_S, max(configured, timeout_s))
    if name == "MooncakeConnector":
        return _parse_seconds(
            read_variable("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"), MOONCAKE_LEASE_S
        )
    if name == "MoRIIOConnector":
        return MORIIO_LEASE_S
    return UNKNOWN_CONNECTOR_LEASE_S if name and config.kv_role == "kv_producer" else None


def _parse_seconds(text: str | None, default: float) -> float:
    try:
        seconds = float(text) if text else default
    except ValueError:
        return default
    return min(MAX_LEASE_S, seconds) if seconds > 0 else default
