"""Pages of an engine that try to crash its supervisor: each counts as unknown.

Tests ``act/adapters/external_load.py``, ``act/adapters/external_server.py``,
``act/adapters/external_load.py`` and the probes' answers (``signals/probes.py``).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll_api.admin import Diagnostic
from plimsoll_sidecar.act.adapters.external_load import ExternalLoad, PauseReader
from plimsoll_sidecar.act.adapters.external_profile import VLLM
from plimsoll_sidecar.act.adapters.external_server import engine_type, server_version
from plimsoll_sidecar.clients.http import HttpClient
from plimsoll_sidecar.signals.metrics_page import Page
from plimsoll_sidecar.signals.probes import Probes
from tests.unit.clients.raw_server import ok, serve

NESTED = b'{"x":' + b"[" * 1000 + b"]" * 1000 + b"}"


def test_nested_brackets_on_any_page_say_nothing() -> None:
    with serve(ok(NESTED)) as url:
        server = HttpClient(url)
        assert engine_type(server) is None
        assert server_version(server, VLLM) == ""
        assert PauseReader(server, "/is_paused").read() is None
        assert ExternalLoad(server, VLLM)._at_the_door(Page({})) is None


def test_nested_brackets_of_a_probe_are_no_text_and_no_trim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Probes(tmp_path)
    monkeypatch.setattr(found, "_ask", lambda *_: {1: NESTED})
    assert found.texts(Diagnostic.STACKS) == {}
    assert found.trim(idle=True) is None
