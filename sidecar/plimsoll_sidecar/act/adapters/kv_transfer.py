"""The time for which an engine of a disaggregated deployment may hold KV blocks for another one.

A prefill engine keeps the blocks of a finished request until a decode engine has read them, or
until the connector's timeout. Although no request runs or waits meanwhile, these blocks are not
lost. If the prefill engine ends, the decode engine's request fails.

The timeout comes from the engine's arguments and environment, as its main process has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from plimsoll_api.engines import EngineType
from plimsoll_api.roles import (
    DISAGGREGATION_MODE,
    ConnectorOptions,
    TransferConfig,
    option_values,
    transfer_config,
)

Environment = Callable[[str], str | None]
"""Returns a variable of the engine's environment; None if it is not set or not readable."""

NIXL_S = 480.0
"""vLLM up to 0.13: ``VLLM_NIXL_ABORT_REQUEST_TIMEOUT``. Later versions have a lease of 30 s, which
the decode engine renews for as long as its request waits, and 480 s for blocks on that engine."""
MOONCAKE_S = 480.0
"""vLLM: the default of ``VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT``."""
MORIIO_S = 3600.0
"""vLLM: ``VLLM_MORI_READ_ABORT_REQUEST_TIMEOUT``, a constant."""
SGLANG_S = 300.0
"""SGLang: the default of ``SGLANG_DISAGGREGATION_WAITING_TIMEOUT``."""
UNKNOWN_S = 480.0
"""Lease of a connector that this table does not know, if its engine is a producer."""
MAX_LEASE_S = 86_400.0
MAX_CONNECTORS = 16
"""Maximum number of connectors of a ``MultiConnector`` that are read."""


def read_lease_s(
    kind: EngineType, words: Sequence[str], environment: Environment = lambda name: None
) -> float | None:
    """Return the longest time in seconds that blocks are held for another engine.

    ``words`` is the command line. None if the engine holds none, or its configuration cannot be
    read.
    """
    if kind is EngineType.SGLANG:
        if next(option_values(words, DISAGGREGATION_MODE), "null") == "null":
            return None
        return _seconds(environment("SGLANG_DISAGGREGATION_WAITING_TIMEOUT"), SGLANG_S)
    if kind is not EngineType.VLLM:
        return None
    config = transfer_config(words)
    if config is None:
        return None
    leases = [_connector_lease_s(one, environment) for one in _connectors(config)]
    return max((lease for lease in leases if lease is not None), default=None)


def _connectors(config: TransferConfig) -> Iterator[TransferConfig]:
    yield config
    nested = config.kv_connector_extra_config and config.kv_connector_extra_config.connectors
    yield from (nested or [])[:MAX_CONNECTORS]


def _connector_lease_s(config: TransferConfig, environment: Environment) -> float | None:
    name, extra = config.kv_connector, config.kv_connector_extra_config or ConnectorOptions()
    if name.startswith("Nixl"):
        configured = max(extra.kv_lease_duration or 0.0, extra.decoder_kv_blocks_ttl or 0.0)
        timeout_s = _seconds(environment("VLLM_NIXL_ABORT_REQUEST_TIMEOUT"), NIXL_S)
        return min(MAX_LEASE_S, max(configured, timeout_s))
    if name == "MooncakeConnector":
        return _seconds(environment("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"), MOONCAKE_S)
    if name == "MoRIIOConnector":
        return MORIIO_S
    return UNKNOWN_S if name and config.kv_role == "kv_producer" else None


def _seconds(text: str | None, default: float) -> float:
    """Return a positive number of seconds, at most a day; the default if it is not one."""
    try:
        given = float(text) if text else default
    except ValueError:
        return default
    return min(MAX_LEASE_S, given) if given > 0 else default
