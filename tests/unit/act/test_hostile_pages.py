"""Pages of an engine that try to crash its supervisor: each counts as unknown.

Tests ``act/adapters/external_load.py``, ``act/adapters/external_server.py``,
``act/adapters/plimsoll_engine.py`` and the probes' answers (``signals/probes.py``).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from plimsoll_api.admin import Diagnostic, EngineState, Load, Status
from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.external_load import ExternalLoad
from plimsoll_sidecar.act.adapters.external_profile import VLLM
from plimsoll_sidecar.act.adapters.external_server import identify_engine_type, read_server_version
from plimsoll_sidecar.act.adapters.optional_paths import OptionalReader, parse_pause
from plimsoll_sidecar.act.adapters.plimsoll_engine import PlimsollEngine
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.signals.metrics_page import MetricsPage
from plimsoll_sidecar.signals.probes import Probes
from tests.unit.clients.raw_server import ok, serve

STATUS = msgspec.json.encode(Status(EngineState.SERVING, "a:1", "1", "m", 1.0, Load())).replace(
    b"a:1", b"%s"
)
NESTED = b'{"x":' + b"[" * 1000 + b"]" * 1000 + b"}"


def test_nested_brackets_on_any_page_say_nothing() -> None:
    with serve(ok(NESTED)) as url:
        server = HttpClient(url)
        assert identify_engine_type(server) is None
        assert read_server_version(server, VLLM) == ""
        assert OptionalReader(server, "/is_paused", parse_pause).read() is None
        assert ExternalLoad(server, VLLM)._read_frontend_inflight(MetricsPage({})) is None


@pytest.mark.parametrize(
    "answer",
    [
        b"x" * 60_000 + b"\r\n\r\n",
        ok(b'{"state": "' + b"x" * 900_000 + b'"}'),
        ok(b"{" + b" " * (2 << 20) + b"}"),
        ok(STATUS % (b"e" * 100_000)),
        b"HTTP/1.1 500 -\r\n\r\n" + b'{"code": "c", "message": "' + b"m" * 100_000 + b'"}',
    ],
    ids=["status line", "word", "body", "epoch", "reason"],
)
def test_what_an_engine_says_is_never_a_long_error(tmp_path: Path, answer: bytes) -> None:
    """It is logged, and the journal keeps it."""
    token = tmp_path / "token"
    token.write_text("t")
    with serve(answer) as url:
        engine = PlimsollEngine(EngineEndpoint(EngineType.PLIMSOLL, url, url), token)
        with pytest.raises(EngineError) as caught:
            engine.status()
        assert len(str(caught.value)) < 2000


def test_nested_brackets_of_a_probe_are_no_text_and_no_trim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Probes(tmp_path)
    monkeypatch.setattr(found, "_query", lambda *_: {1: NESTED})
    assert found.read_texts(Diagnostic.STACKS) == {}
    assert found.trim(is_idle=True) is None
