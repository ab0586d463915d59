"""Tests that the documents name as proof exist, and every failure mode names one.

Tests ``docs/failure-modes.md`` and ``docs/security.md``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PAGES = ("security.md", "failure-modes.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_named_test_exists(page: str) -> None:
    named = NAMED.findall((ROOT / "docs" / page).read_text())
    assert len(named) > 15

    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (path := ROOT / file).is_file()
        or not re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_no_test_is_named_in_another_form(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert text.count("tests/") == len(NAMED.findall(text))


def test_every_failure_mode_has_a_test() -> None:
    rows = [
        line
        for line in (ROOT / "docs" / "failure-modes.md").read_text().splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| Failure |"))
    ]
    assert len(rows) > 40
    assert [row for row in rows if not NAMED.search(row)] == []
