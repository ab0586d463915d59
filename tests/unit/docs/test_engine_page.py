"""docs/engine.md, docs/engine-api.md and those of docs/design/ name files; each exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "engine_image" / "plimsoll_engine"


@pytest.mark.parametrize(
    ("page", "least"),
    [("engine.md", 20), ("engine-api.md", 6), ("design/engine.md", 4), ("design/request.md", 35)],
)
def test_every_file_that_a_page_of_the_engine_names_exists(page: str, least: int) -> None:
    files = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / page).read_text()))
    assert len(files) >= least
    assert [
        name
        for name in sorted(files)
        if not (PACKAGE / name).is_file() and not (ROOT / name).is_file()
    ] == []
