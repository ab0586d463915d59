"""The file with the admin token is in a folder where the engine can put anything.

Tests ``act/adapters/plimsoll_engine.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys
from pathlib import Path
from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.plimsoll_engine import PlimsollEngine
from plimsoll_sidecar.clients.http import EngineError

resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
url = "http://127.0.0.1:9"
engine = PlimsollEngine(EngineEndpoint(EngineType.PLIMSOLL, url, url), Path(sys.argv[1]))
try:
    engine.status()
except EngineError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("pipe", "not a regular file"),
        ("endless", "Too many levels of symbolic links"),
        ("bytes", "GET /status failed"),
        ("huge", "GET /status failed"),
    ],
)
def test_whatever_is_in_its_place_is_an_error(tmp_path: Path, kind: str, told: str) -> None:
    token = tmp_path / "admin-token"
    match kind:
        case "pipe":
            os.mkfifo(token)
        case "endless":
            token.symlink_to("/dev/zero")
        case "bytes":
            token.write_bytes(b"\xff\xfe\n\0\x80")
        case _:
            with token.open("wb") as file:
                file.truncate(8 << 30)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(token)], capture_output=True, text=True, timeout=30
    )
    assert told in done.stdout, done.stderr
