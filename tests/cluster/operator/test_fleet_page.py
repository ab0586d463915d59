"""The operator's page of the fleet, from a real API server, in a real browser."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import yaml

from plimsoll_operator.config import parse_config
from tests.browser import chromium, violations
from tests.cluster.operator.test_fleet_safety import leaking
from tests.lab.helm import CHART
from tests.lab.kube import Kube
from tests.lab.lab import Lab

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Request

ROOT = Path(__file__).parents[3]
EVIL = "<img src=x onerror=alert(1)> grew by 412 MiB"
WIDTHS = (390, 820, 1280)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def read(operator: Any, host: str = "127.0.0.1") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{operator.port}/", headers={"Host": host})
    with urllib.request.urlopen(request, timeout=5) as answer:
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        return str(answer.read().decode())


def test_the_page_shows_the_fleet(
    kubectl: Any,
    start: Callable[..., Any],
    manifest: dict[str, Any],
    eventually: Any,
    browser: Browser,
    tmp_path: Path,
) -> None:
    operator = start("--fleet-page")
    kubectl.apply(manifest)
    policy = yaml.safe_load((ROOT / "examples" / "supervision-policy.yaml").read_text())
    kubectl.apply(policy)
    leaking(kubectl, "tiny-1", "tiny-x", message=EVIL)
    leaking(kubectl, "tiny-2", "tiny-y", phase="Resolved", outcome="WorkerRestart")
    kubectl.play_kubelet("tiny")
    space = kubectl.namespace
    budget = manifest["spec"]["memory"]["host"]["growthBudget"]
    wanted = (
        f"{space}/tiny <small>service", f"{space}/{policy['metadata']['name']} <small>policy",
        f"{space}/tiny-1", f"of {budget}", "<dt>Open incidents</dt><dd>1</dd>", "0 of 10",
    )  # fmt: skip
    text = eventually(lambda: (text := read(operator)) and all(w in text for w in wanted) and text)
    assert f"{space}/tiny-2" not in text
    assert "&lt;img src=x" in text

    with pytest.raises(urllib.error.HTTPError, match="403"):
        read(operator, "evil.example")
    for scheme in SCHEMES:
        for width in WIDTHS:
            tab = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
            asked: list[str] = []

            def note(request: Request, asked: list[str] = asked) -> None:
                asked.append(request.url)

            tab.on("request", note)
            tab.goto(f"http://127.0.0.1:{operator.port}/")
            wide = tab.evaluate("() => document.documentElement.scrollWidth")
            assert wide <= width, "the page does not scroll sideways"
            assert [url for url in asked if "favicon" not in url] == [tab.url]
            assert violations(tab) == []
            tab.screenshot(path=tmp_path / f"fleet-{scheme}-{width}.png", full_page=True)
            tab.close()


def test_without_the_flag_there_is_no_page(start: Callable[..., Any]) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        read(start())


def test_the_component_of_the_plain_manifests_is_the_chart_s_flag(
    cluster: Lab, tmp_path: Path
) -> None:
    for folder in ("config", "crds"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    with (tmp_path / "config" / "kustomization.yaml").open("a") as file:
        file.write("components:\n  - fleet-page\n")
    kube = Kube(cluster.kube.kubectl, cluster.kubeconfig, "plimsoll-system")
    documents = list(yaml.safe_load_all(kube("kustomize", str(tmp_path / "config"))))
    (deployment,) = (one for one in documents if one["kind"] == "Deployment")
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert parse_config(args, {}).fleet_page
    assert "- --fleet-page" in (CHART / "templates" / "deployment.yaml").read_text()
