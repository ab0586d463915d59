"""What an external engine's server is (``act/adapters/external_server.py``)."""

from __future__ import annotations

from typing import cast

import pytest

from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.external_server import ServerInfo
from plimsoll_sidecar.act.adapters.processes import OwnedProcesses
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.signals.engine_processes import (
    EngineFinder,
    EngineNotFoundError,
    EngineProcesses,
)


def test_an_engine_that_ends_while_it_is_identified_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor knows this error of an engine, and goes on."""

    def ended(self: EngineFinder) -> EngineProcesses:
        raise EngineNotFoundError("no process")

    class Silent:
        def call(self, *_: object, **__: object) -> tuple[int, bytes]:
            raise EngineError("no answer")

    monkeypatch.setattr(EngineFinder, "find_processes", ended)
    endpoint = EngineEndpoint(EngineType.VLLM, "", "http://127.0.0.1:8000")
    info = ServerInfo(endpoint, cast(HttpClient, Silent()), OwnedProcesses(endpoint))
    with pytest.raises(EngineError, match="does not identify itself as vllm"):
        info.verify_type()
