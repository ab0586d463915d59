"""docs/architecture.md names files and folders; each exists, and each walk names its files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PATH = re.compile(r"`((?:crds|operator|sidecar|engine_image|faults|probe|cli)/[\w/]+(?:\.py)?)`")


def test_every_path_exists() -> None:
    named = set(PATH.findall(PAGE))
    assert len(named) > 50
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_each_walk_names_its_files() -> None:
    walks = re.split(r"^## Walk \d: ", PAGE, flags=re.MULTILINE)[1:]
    assert len(walks) == 3
    assert all(len(PATH.findall(walk)) >= 10 for walk in walks)
