"""What axe-core finds wrong with a page for people who use a keyboard or a screen reader."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page


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
