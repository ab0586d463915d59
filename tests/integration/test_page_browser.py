"""The page in a real browser: readable, by keyboard, light and dark, with nothing from outside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plimsoll_sidecar.page import render_page as render
from plimsoll_sidecar.record.server import AllowedHosts, StateServer
from tests.browser import chromium, violations
from tests.unit.test_supervisor_page import history, state

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    points = history(100).read_points()
    hosts = AllowedHosts("pod-0", "qwen", "team-a")
    server = StateServer(
        "127.0.0.1", 0, lambda: b"", state, lambda live: render(state(), points, live), hosts
    )
    server.start()
    yield f"http://127.0.0.1:{server.port}"
    server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def opened(browser: Browser, url: str, scheme: str = "light", width: int = 1000) -> Page:
    context = browser.new_context(
        color_scheme="dark" if scheme == "dark" else "light",
        viewport={"width": width, "height": 800},
    )
    page = context.new_page()
    page.set_default_timeout(10_000)
    page.goto(url)
    return page


def test_nothing_is_fetched_and_no_error_is_logged(browser: Browser, url: str) -> None:
    page = browser.new_context().new_page()
    asked: list[str] = []
    errors: list[str] = []

    def note(request: Request) -> None:
        asked.append(request.url)

    page.on("request", note)
    page.on("console", lambda message: errors.append(message.text))
    answer = page.goto(url)
    assert answer is not None
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert [one for one in asked if not one.endswith("/favicon.ico")] == [f"{url}/"]
    assert [text for text in errors if "favicon" not in text] == []


def test_a_screen_reader_finds_its_way(browser: Browser, url: str) -> None:
    page = opened(browser, url)
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.get_by_role("heading", level=1).count() == 1
    for name in ("Budgets", "Memory", "Remediation ladder", "Incidents", "Ledger"):
        assert page.get_by_role("region", name=name).is_visible()
    assert page.get_by_role("img", name="Host memory by segment over time").is_visible()
    assert page.get_by_role("meter", name="host leak budget").is_visible()
    assert page.locator('[aria-current="step"]').inner_text() == "No action"
    for table in page.get_by_role("table").all():
        assert table.locator("caption").count() == 1
        assert table.locator("th[scope=col]").count() >= 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1000, 1600])
def test_axe_finds_nothing(browser: Browser, url: str, scheme: str, width: int) -> None:
    assert violations(opened(browser, url, scheme, width)) == []


def test_incidents_open_and_close_by_keyboard(browser: Browser, url: str) -> None:
    page = opened(browser, url)
    details = page.locator("details").first
    assert details.get_attribute("open") is not None
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert details.get_attribute("open") is None
    page.get_by_role("link", name="Follow").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/live")
    assert page.locator('meta[http-equiv="refresh"]').count() == 1


def test_light_and_dark_have_contrast(browser: Browser, url: str) -> None:
    for scheme in ("light", "dark"):
        page = opened(browser, url, scheme)
        colours = page.evaluate(
            "() => { const s = getComputedStyle(document.body);"
            " return [s.color, s.backgroundColor] }"
        )
        text, ground = (_luminance(colour) for colour in colours)
        assert (text < ground) is (scheme == "light")
        high, low = max(text, ground), min(text, ground)
        assert (high + 0.05) / (low + 0.05) > 7, "WCAG AAA"


def test_a_narrow_window_does_not_scroll_sideways(browser: Browser, url: str) -> None:
    page = opened(browser, url, width=420)
    wide = page.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= 420


def test_pictures_can_be_looked_at(browser: Browser, url: str, tmp_path: Path) -> None:
    for scheme in ("light", "dark"):
        file = tmp_path / f"{scheme}.png"
        opened(browser, url, scheme).screenshot(path=file, full_page=True)
        assert file.stat().st_size > 20_000


def _luminance(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)`` (WCAG 2.2)."""
    parts = [int(part) / 255 for part in colour[4:-1].split(",")[:3]]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
