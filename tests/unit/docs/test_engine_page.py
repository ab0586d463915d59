"""docs/engine.md names files of the engine; each exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "engine_image" / "plimsoll_engine"


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "engine.md").read_text()))
    assert len(named) > 35
    assert [name for name in sorted(named) if not (PACKAGE / name).is_file()] == []
