"""docs/engine.md names files of the engine, and some from the top folder; each exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "engine_image" / "plimsoll_engine"
PAGE = ROOT / "docs" / "engine.md"


def test_every_file_that_the_engine_page_names_exists() -> None:
    files = set(re.findall(r"`([\w/]+\.py)`", PAGE.read_text()))
    assert len(files) > 35
    assert [
        name
        for name in sorted(files)
        if not (PACKAGE / name).is_file() and not (ROOT / name).is_file()
    ] == []
