"""A document nested deeper than Python's stack is refused like any other that cannot be read.

Tests ``plimsoll_sidecar/config.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll_sidecar.config import ConfigError, ConfigFile

DEEP = b'{"unknown":' + b"[" * 100_000


def test_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.json"
    path.write_bytes(DEEP)

    with pytest.raises(ConfigError, match=r"supervisor\.json"):
        ConfigFile(path)
