"""Which adapter speaks to an engine."""

from __future__ import annotations

from pathlib import Path

from plimsoll_api.supervision import EngineEndpoint, EngineType
from plimsoll_sidecar.act.adapter import EngineAdapter
from plimsoll_sidecar.act.foreign import ForeignEngine
from plimsoll_sidecar.act.plimsoll import PlimsollEngine


def adapter_for(endpoint: EngineEndpoint, token_file: Path) -> EngineAdapter:
    """The adapter of ``endpoint.type``; only our own protocol needs the token."""
    if endpoint.type is EngineType.PLIMSOLL:
        return PlimsollEngine(endpoint, token_file)
    return ForeignEngine(endpoint)
