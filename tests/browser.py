"""Chromium for tests of pages, and what axe-core finds wrong with them.

axe-core judges pages for people who use a keyboard or a screen reader.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import TYPE_CHECKING

from tests.missing import lacks

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Run Debian's Chromium. Without it a test is skipped, and fails in CI."""
    binary = shutil.which("chromium")
    if binary is None:
        lacks("chromium is missing: apt-get install chromium")
    from playwright.sync_api import sync_playwright  # slow, in every worker that collects tests

    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield running
        running.close()


def violations(page: Page, passed_over: Sequence[str] = ()) -> list[str]:
    """One line for each violation: its rule, what it means, and the element.

    ``passed_over`` are rules that are not asked for.
    """
    source = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
    page.evaluate(source)
    found = page.evaluate("() => axe.run().then(result => result.violations)")
    return [
        f"{rule['id']} ({rule['help']}): {' '.join(map(str, node['target']))}"
        for rule in found
        if rule["id"] not in passed_over
        for node in rule["nodes"]
    ]
