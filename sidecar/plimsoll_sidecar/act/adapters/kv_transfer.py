"""Determine how long a disaggregated engine may hold KV blocks for another engine.

A prefill engine keeps the blocks of a finished request until a decode engine has read them, or
until the connector's timeout. Although no request runs or waits meanwhile, these blocks are not
lost. If the prefill engine ends, the decode engine's request fails.

The timeout comes from the arguments and environment of the engine's main process.
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

Environment = Callable[[str], str | None]
"""Function that returns an environment variable of the engine; None if it is unset or unreadable.
"""

NIXL_LEASE_S = 480.0
"""vLLM up to 0.13: ``VLLM_NIXL_ABORT_REQUEST_TIMEOUT``.

Later versions have a lease of 30 s, which the decode engine renews while its request waits, and one
of 480 s for blocks on the decode engine.
"""
MOONCAKE_LEASE_S = 480.0
"""vLLM: the default of ``VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT``."""
MORIIO_LEASE_S = 3600.0
"""vLLM: the constant ``VLLM_MORI_READ_ABORT_REQUEST_TIMEOUT``."""
SGLANG_LEASE_S = 300.0
"""SGLang: the default of ``SGLANG_DISAGGREGATION_WAITING_TIMEOUT``."""
UNKNOWN_CONNECTOR_LEASE_S = 480.0
"""Assumed lease of a producer whose connector is not in this table."""
NIXL_PREFIX = "Nixl"
"""Prefix of the names of vLLM's connectors that use NIXL."""
LAST_BLOCKED_VERSIONS = {NIXL_PREFIX: (0, 26)}
"""Last version of vLLM, by connector, in which an engine cannot reconnect to a restarted partner.

vLLM up to 0.26 installs NIXL up to 1.3.2. With it, decode engines crash, or transfers fail, once
the other side has restarted (vllm-project/vllm#49238). Later versions are restarted alone, and
then tested with their partners.
"""
_VERSION_PATTERN = re.compile(r"(\d{1,4})\.(\d{1,4})")
MAX_LEASE_S = 86_400.0
MAX_CONNECTORS = 16
"""Maximum number of connectors that are read from a ``MultiConnector``."""


def read_lease_s(
    kind: EngineType, arguments: Sequence[str], environment: Environment = lambda name: None
) -> float | None:
    """Return the longest time in seconds for which the engine holds blocks for another one.

    ``arguments`` is the command line. None if the engine holds no blocks, or if its configuration
    cannot be read.
    """
    if kind is EngineType.SGLANG:
        if next(iterate_option_values(arguments, DISAGGREGATION_MODE_FLAG), "null") == "null":
            return None
        return _parse_seconds(environment("SGLANG_DISAGGREGATION_WAITING_TIMEOUT"), SGLANG_LEASE_S)
    if kind is not EngineType.VLLM:
        return None
    config = parse_transfer_config(arguments)
    if config is None:
        return None
    leases = [_connector_lease_s(one, environment) for one in _iterate_connectors(config)]
    return max((lease for lease in leases if lease is not None), default=None)


def read_connector(kind: EngineType, arguments: Sequence[str]) -> str:
    """Return the name of vLLM's KV connector in a command line; empty without one.

    If there are several, prefer one that uses NIXL, because it decides how engines connect.
    """
    config = parse_transfer_config(arguments) if kind is EngineType.VLLM else None
    names = [one.kv_connector for one in _iterate_connectors(config)] if config is not None else []
    return next((name for name in names if name.startswith(NIXL_PREFIX)), names[0] if names else "")


def can_meet(connector: str) -> bool:
    """Report whether the test requests to a prefill and to a decode engine are known."""
    return connector.startswith(NIXL_PREFIX)


def find_restart_blocker(connector: str, version: str) -> str | None:
    """Return why an engine must restart together with its partners; None if it need not.

    ``version`` is vLLM's. If it is unknown, the engine may restart alone.
    """
    tied = (last for prefix, last in LAST_BLOCKED_VERSIONS.items() if connector.startswith(prefix))
    last = next(tied, None)
    found = _VERSION_PATTERN.match(version)
    if last is None or found is None or tuple(map(int, found.groups())) > last:
        return None
    return (
        f"with vLLM {version} and {connector}, a restart of one engine breaks the engines that it "
        f"exchanges KV blocks with: restart the prefill and decode pods together, or upgrade vLLM "
        f"beyond {last[0]}.{last[1]}"
    )


def _iterate_connectors(config: TransferConfig) -> Iterator[TransferConfig]:
    yield config
    nested = config.kv_connector_extra_config and config.kv_connector_extra_config.connectors
    yield from (nested or [])[:MAX_CONNECTORS]


def _connector_lease_s(config: TransferConfig, environment: Environment) -> float | None:
    name, extra = config.kv_connector, config.kv_connector_extra_config or ConnectorOptions()
    if name.startswith("Nixl"):
        configured = max(extra.kv_lease_duration or 0.0, extra.decoder_kv_blocks_ttl or 0.0)
        timeout_s = _parse_seconds(environment("VLLM_NIXL_ABORT_REQUEST_TIMEOUT"), NIXL_LEASE_S)
        return min(MAX_LEASE_S, max(configured, timeout_s))
    if name == "MooncakeConnector":
        return _parse_seconds(environment("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"), MOONCAKE_LEASE_S)
    if name == "MoRIIOConnector":
        return MORIIO_LEASE_S
    return UNKNOWN_CONNECTOR_LEASE_S if name and config.kv_role == "kv_producer" else None


def _parse_seconds(text: str | None, default: float) -> float:
    """Return ``text`` as a positive number of seconds, at most one day, or else ``default``."""
    try:
        given = float(text) if text else default
    except ValueError:
        return default
    return min(MAX_LEASE_S, given) if given > 0 else default
