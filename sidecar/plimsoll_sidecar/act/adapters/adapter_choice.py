"""Which adapter speaks to an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter
from plimsoll_sidecar.act.adapters.plimsoll_engine import PlimsollEngine


def adapter_for(
    endpoint: EngineEndpoint, token_file: Path, group_serves: Callable[[], bool] | None = None
) -> EngineAdapter:
    """Return the adapter of ``endpoint.type``; only our own protocol needs the token.

    ``group_serves`` is there for the worker of a multi-node group.
    """
    if endpoint.type is EngineType.PLIMSOLL:
        return PlimsollEngine(endpoint, token_file)
    # Imported here: it brings a parser of metrics, which a replica of ours never needs.
    from plimsoll_sidecar.act.adapters.external_engine import ExternalEngine

    return ExternalEngine(endpoint, group_serves=group_serves)
