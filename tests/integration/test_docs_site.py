"""``make docs``: the site that it builds, served, has every page and what they and alerts link to.

Tests ``docs/tools/site.py``. mkdocs itself fails on links to pages and headings that do not exist.
"""

from __future__ import annotations

import functools
import re
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.error import HTTPError
from urllib.parse import urldefrag, urljoin

import pytest
import yaml

from dashboards import alerts
from docs.tools import site
from plimsoll_operator.render.monitoring import RUNBOOKS_URL
from tests.browser import chromium, violations

ROOT = Path(__file__).parents[2]
THEME = ("aria-dialog-name", "landmark-unique", "scrollable-region-focusable")
"""Rules that mkdocs-material's own search, navigation and tables break."""
NO_INDEX = ("error sending request", "Failed to fetch")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        ["make", "--silent", "docs", f"SITE={folder}"],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if done.returncode and any(one in done.stderr for one in NO_INDEX):
        pytest.skip("needs a package index")
    assert done.returncode == 0, done.stdout + done.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode(errors="replace"))


@pytest.mark.long
def test_each_page_and_each_link_on_it_is_served(address: str) -> None:
    wanted, seen, missing = [address], set[str](), []
    while wanted:
        url = wanted.pop()
        if url in seen:
            continue
        seen.add(url)
        try:
            text = read(url)
        except HTTPError as error:
            missing.append(f"{url}: {error.code}")
            continue
        if not url.endswith("/"):
            continue
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            to, _ = urldefrag(urljoin(url, unescape(link)))
            if to.startswith(address):
                wanted.append(to)
    assert missing == []
    pages = {f"{address}{path.stem}/" for path in (ROOT / "docs").glob("[a-z]*.md")}
    assert pages <= seen, "each page can be reached from the first one"


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing(address: str, scheme: Literal["light", "dark"], width: int) -> None:
    """On one page of each kind: the first, a long one, a generated one, tables, pictures."""
    with chromium() as browser:
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        page = context.new_page()
        found = {}
        for name in ("", "quickstart/", "operations/", "metrics/", "support/", "tour/"):
            page.goto(address + name)
            found[name] = violations(page, THEME)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.long
def test_the_address_in_each_alert_leads_to_its_runbook(address: str) -> None:
    host = RUNBOOKS_URL.removesuffix("/runbooks") + "/"
    config = (ROOT / "mkdocs.yml").read_text()
    assert f"site_url: {host}\n" in config
    for rule in alerts.rules():
        url = rule["annotations"]["runbook_url"].replace(host, address)
        found = re.search(r'url=([^"]+)"', read(url))
        assert found, url
        assert rule["alert"] in read(urljoin(f"{url}/", found[1]))


@pytest.mark.long
def test_addresses_that_registries_show_are_on_the_site(address: str) -> None:
    """Those of the chart and of SECURITY-INSIGHTS.yml, whose schema 2.0 requires these fields."""
    chart = (ROOT / "charts" / "plimsoll" / "Chart.yaml").read_text()
    text = (ROOT / "SECURITY-INSIGHTS.yml").read_text()
    urls = set(re.findall(r"https://plimsoll\.dev/[^\s#]*", chart + text))
    assert len(urls) > 10
    for url in urls:
        assert read(url.replace("https://plimsoll.dev/", address)), url
    told = yaml.safe_load(text)
    assert told["header"].keys() >= {"schema-version", "last-updated", "last-reviewed", "url"}
    assert told["project"].keys() >= {
        "name", "administrators", "repositories", "vulnerability-reporting",
    }  # fmt: skip
    assert told["repository"].keys() >= {
        "url", "status", "accepts-change-request", "accepts-automated-change-request", "core-team",
        "license", "security",
    }  # fmt: skip


def test_links_lead_to_the_same_file_on_the_site() -> None:
    text = (
        "[a](docs/adopt.md#x) ![b](docs/demo.png) [c](docs/runbooks/) `[d](docs/adopt.md)`\n"
        "[e](https://example.com) [f](#here) [[g]](CHANGELOG.md)\n"
    )
    assert site.rewritten(text, "README.md") == (
        "[a](adopt.md#x) ![b](demo.png) c `[d](docs/adopt.md)`\n"
        "[e](https://example.com) [f](#here) [[g]](CHANGELOG.md)\n"
    )
    assert site.rewritten("[r](../README.md)", "docs/tour.md") == "[r](index.md)"
    assert site.rewritten("[s](../scale.md)", "docs/runbooks/X.md") == "[s](../scale.md)"
