"""From a supervisor's page to the operator's summary, and from its mounted file to the evidence."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from plimsoll_api.peers import PEERS_FILE, PeerGrowth
from plimsoll_api.supervision import Mode
from plimsoll_operator.fleet.peers import PeersFileCache, list_service_peers
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.supervisor_figures import SupervisorFigures
from plimsoll_operator.kinds import Key
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.scraper import Scraper
from tests.integration.test_external_incident import Pod

LIMIT_S = 120.0
SENTENCE = "with comparable age and load"
PODS: list[dict[str, Any]] = [
    {"metadata": {"name": f"external-{n}", "labels": {"plimsoll.dev/revision": "64d8"}}}
    for n in range(3)
]
INCIDENTS = [{"spec": {"pod": "external-0", "kind": "HostGrowth"}, "status": {"phase": "Open"}}]


def mount(folder: Path, text: str) -> None:
    """Write a key of a ConfigMap as the kubelet does: the folder behind a link is replaced."""
    fresh = folder / f"..{time.monotonic_ns()}"
    fresh.mkdir()
    (fresh / PEERS_FILE).write_text(text)
    link = folder / "..data_tmp"
    link.symlink_to(fresh.name)
    link.rename(folder / "..data")
    if not (folder / PEERS_FILE).is_symlink():
        (folder / PEERS_FILE).symlink_to(os.path.join("..data", PEERS_FILE))


def scraped(port: int) -> SupervisorFigures | None:
    async def run() -> SupervisorFigures | None:
        scraper = Scraper(Store(), lambda _: None, port=port)
        async with scraper.make_session() as session:
            return await scraper.fetch_figures(session, "127.0.0.1")

    return asyncio.run(run())


def growth(port: int) -> dict[str, Any]:
    """What the supervisor suspects now, empty while it is nothing."""
    state = httpx.get(f"http://127.0.0.1:{port}/state", timeout=10).json()
    found = state.get("assessment", {}).get("suspicions", [])
    return next((one for one in found if one["kind"] == "HostGrowth"), {})


def published(figures: SupervisorFigures, own: PeerGrowth) -> str:
    """The operator's summary of this replica, one that does not grow, and one of which nothing is
    known."""
    flat = replace(own, bytes=0, age_s=own.age_s + 9, requests=own.requests * 9 + 900)
    others = {
        "external-1": SupervisorFigures(host_growth=flat),
        "external-2": SupervisorFigures(0.1),
    }
    pods = list_service_peers(map(PodView.parse, PODS))
    return PeersFileCache(time.monotonic).make_text(
        Key("ml", "external"), pods, INCIDENTS, {"external-0": figures} | others
    )


def test_a_supervisor_weighs_what_the_operator_published(tmp_path: Path) -> None:
    engine = ("--leak-mib-s=4", "--requests-s=20")
    pod = Pod(tmp_path, mode=Mode.OBSERVE, arguments=engine)
    pod.start()
    port = pod.ports[1]
    try:
        plain: list[str] = []
        last, deadline = "", time.monotonic() + LIMIT_S
        while SENTENCE not in last:
            assert time.monotonic() < deadline, (last, (tmp_path / "supervisor.log").read_text())
            time.sleep(0.5)
            figures = scraped(port)
            if figures is None or figures.host_growth is None or not (seen := growth(port)):
                continue
            last = seen["evidence"][-1]
            if not plain:
                plain = seen["evidence"]
            mount(tmp_path, published(figures, figures.host_growth))
        assert not any(SENTENCE in text for text in plain), "nothing was published yet"
        assert "0 of 1 of its revision show the same growth; with this evidence, a leak has" in last
        (tmp_path / PEERS_FILE).unlink()
        gone = time.monotonic() + 30
        while SENTENCE in growth(port).get("evidence", ["-"])[-1]:
            assert time.monotonic() < gone
            time.sleep(0.2)
    finally:
        pod.end()
