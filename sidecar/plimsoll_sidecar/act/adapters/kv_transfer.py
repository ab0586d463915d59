"""The time for which an engine of a disaggregated deployment may hold KV blocks for another one.

A prefill engine keeps the blocks of a finished request until a decode engine has read them, or
until the connector's timeout. Although no request runs or waits meanwhile, these blocks are not
lost. If the prefill engine ends, the decode engine's request fails.

The timeout comes from the engine's arguments and environment, as its main process has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from plimsoll_api.decoding import Malformed, decode
from plimsoll_api.engines import EngineType

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

KV_TRANSFER_CONFIG = "--kv-transfer-config"
DISAGGREGATION_MODE = "--disaggregation-mode"


class _Extra(msgspec.Struct):
    kv_lease_duration: float | None = None
    decoder_kv_blocks_ttl: float | None = None
    connectors: list[_TransferConfig] | None = None


class _TransferConfig(msgspec.Struct):
    """vLLM's ``KVTransferConfig``, as far as it decides how long blocks are held."""

    kv_connector: str = ""
    kv_role: str | None = None
    kv_connector_extra_config: _Extra | None = None


def read_lease_s(
    kind: EngineType, words: Sequence[str], environment: Environment = lambda name: None
) -> float | None:
    """Return the longest time in seconds that blocks are held for another engine.

    ``words`` is the command line. None if the engine holds none, or its configuration cannot be
    read.
    """
    if kind is EngineType.SGLANG:
        if next(_values(words, DISAGGREGATION_MODE), "null") == "null":
            return None
        return _seconds(environment("SGLANG_DISAGGREGATION_WAITING_TIMEOUT"), SGLANG_S)
    if kind is not EngineType.VLLM:
        return None
    text = next(_values(words, KV_TRANSFER_CONFIG), None)
    try:
        config = _from_keys(words) if text is None else decode(text.encode(), _TransferConfig)
    except Malformed:
        return None
    leases = [_connector_lease_s(one, environment) for one in _connectors(config)]
    return max((lease for lease in leases if lease is not None), default=None)


def _values(words: Sequence[str], flag: str) -> Iterator[str]:
    """Yield the values of a flag from last to first, because the last takes precedence."""
    for number in range(len(words) - 1, -1, -1):
        name, given, value = words[number].partition("=")
        if name.replace("_", "-") != flag:
            continue
        if given:
            yield value
        elif number + 1 < len(words):
            yield words[number + 1]


def _from_keys(words: Sequence[str]) -> _TransferConfig:
    """Return the configuration from arguments such as ``--kv-transfer-config.kv_role``."""

    def value(key: str) -> str | None:
        return next(_values(words, f"{KV_TRANSFER_CONFIG}.{key.replace('_', '-')}"), None)

    return _TransferConfig(value("kv_connector") or "", value("kv_role"))


def _connectors(config: _TransferConfig) -> Iterator[_TransferConfig]:
    yield config
    nested = config.kv_connector_extra_config and config.kv_connector_extra_config.connectors
    yield from (nested or [])[:MAX_CONNECTORS]


def _connector_lease_s(config: _TransferConfig, environment: Environment) -> float | None:
    name, extra = config.kv_connector, config.kv_connector_extra_config or _Extra()
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
