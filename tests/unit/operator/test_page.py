"""The page of the fleet: what it shows, within bounds, and escaped.

Tests ``operator/plimsoll_operator/page.py`` and ``crds/plimsoll_api/fleet_row.py``.
"""

from __future__ import annotations

import asyncio
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from plimsoll_api.names import INCIDENT_KIND, POLICY_KIND, SERVICE_KIND
from plimsoll_operator import page
from plimsoll_operator.fleet.circuit_breaker import SlotAllocation
from plimsoll_operator.page import FleetPage, explain_refused_host
from plimsoll_operator.runtime.cache import Store

EVIL = "<script>alert(1)</script>\"'&"
VERSIONS = iter(range(1, 1_000_000))


def stored(kind: str, name: str, spec: Any, status: Any, namespace: str = "ml") -> dict[str, Any]:
    meta = {
        "name": name, "namespace": namespace, "uid": f"{kind}-{namespace}-{name}",
        "resourceVersion": str(next(VERSIONS)),
    }  # fmt: skip
    return {"kind": kind, "apiVersion": "v1", "metadata": meta, "spec": spec, "status": status}


def service(name: str, **status: Any) -> dict[str, Any]:
    spec = {"replicas": 2, "memory": {"host": {"growthBudget": "512Mi"}}}
    known = {"conditions": [{"type": "Ready", "status": "True", "reason": "ReplicasReady"}]}
    return stored(SERVICE_KIND, name, spec, {"readyReplicas": 2, **known, **status})


def incident(name: str, of: str, **status: Any) -> dict[str, Any]:
    spec = {
        "workloadRef": {"kind": SERVICE_KIND, "name": of}, "pod": f"{of}-0", "kind": "HostGrowth",
        "openedAt": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    return stored(INCIDENT_KIND, name, spec, {"phase": "Confirmed", **status})


def suspect(revision: str) -> dict[str, Any]:
    return {
        "revision": revision, "leak": "HostGrowth in python_objects", "leakingReplicas": 2,
        "replicas": 3, "action": "Held", "since": "2026-01-01T00:00:00Z",
    }  # fmt: skip


class Seen(HTMLParser):
    """The cells of all table rows, and the elements that the page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.elements: set[str] = set()
        self.feed(text)
        self.rows = [row for row in self.rows if row]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def shown(*items: dict[str, Any], slots: SlotAllocation | None = None, leading: bool = True) -> str:
    store = Store()
    for item in items:
        store.put(item)
    made = FleetPage(store, lambda: slots or SlotAllocation(), 10, lambda: leading)
    return asyncio.run(made.get_page()).decode()


def test_a_fleet_has_its_rows_the_worst_first() -> None:
    memory = {"hostConsumedPercent": 85, "replica": "bad-0"}
    works = {"selected": 4, "supervised": 3, "conditions": [
        {"type": "Ready", "status": "True", "reason": "Supervised"}],
        "workloads": [{"kind": "Deployment", "name": "vllm", "suspectRevision": suspect("9f")}],
    }  # fmt: skip
    lease = stored("Lease", "bad-slot-0", {}, {})
    text = shown(
        service("calm"),
        service("bad", memory=memory, openIncidents=1, restarts=3, suspectRevision=suspect("7c")),
        stored(POLICY_KIND, "all", {"memory": {"device": {"growthBudget": "1Gi"}}}, works),
        incident("bad-0-a", "bad", attribution={"segment": "python_objects", "process": "worker"}),
        incident("bad-0-b", "bad", phase="Resolved"),
        slots=SlotAllocation(close=[lease], held=3),
    )
    rows = Seen(text).rows
    names = [row[0] for row in rows]
    assert names[1:4] == ["ml/bad service", "ml/calm service", "ml/all policy"]
    assert rows[1][2:] == ["Ready", "2/2", " 85% of 512Mi", "none", "1", "3"]
    assert rows[3][2:] == ["Supervised", "3/4", "none", "unknown of 1Gi", "0", "?"]
    assert rows[5][:3] == ["ml/bad-0-a", "HostGrowth", "Confirmed"]
    assert "ml/bad-0-b" not in text, "it has ended"
    assert rows[5][4] == "python_objects worker"
    assert [row[:4] for row in rows if row[0] in ("ml/bad", "ml/all: vllm")] == [
        ["ml/bad", "7c", "HostGrowth in python_objects", "2 of 3"],
        ["ml/all: vllm", "9f", "HostGrowth in python_objects", "2 of 3"],
    ]
    assert rows[-1] == ["ml/bad-slot-0"]
    assert "<dd>3 of 10</dd>" in text


def test_text_of_pods_is_escaped_and_cut() -> None:
    bad = service("bad", openIncidents=1, suspectRevision=suspect(EVIL))
    text = shown(
        bad, incident("i", "bad", message=EVIL + 5000 * "x", attribution={"segment": EVIL})
    )
    seen = Seen(text)
    assert "script" not in seen.elements
    assert EVIL not in text
    longest = max(len(cell) for row in seen.rows for cell in row)
    assert longest == page.MAX_CELL_CHARS


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = shown(service("calm"))
    assert not re.search(r"https?:|//|src=|url\(|@import", text)


def test_a_large_fleet_has_a_bounded_page() -> None:
    services = [service(f"s{number:04d}", openIncidents=1) for number in range(700)]
    incidents = [incident(f"i{number:04d}", f"s{number:04d}") for number in range(700)]
    text = shown(*services, *incidents)
    assert len(Seen(text).rows) == 1 + page.MAX_ROWS + 1 + page.MAX_INCIDENTS
    assert "500 more are not shown" in text
    assert "600 more are not shown" in text
    assert "<dt>Open incidents</dt><dd>700</dd>" in text
    assert len(text) < 200_000


def test_an_operator_on_standby_says_so() -> None:
    text = shown(service("calm"), leading=False)
    assert "on standby" in text
    assert "calm" not in text


def test_a_page_serves_all_readers_of_some_seconds() -> None:
    now, made = [100.0], []
    store = Store()

    def slots() -> SlotAllocation:
        made.append(now[0])
        return SlotAllocation()

    async def reads() -> None:
        one = FleetPage(store, slots, 10, lambda: True, (), lambda: now[0])
        await asyncio.gather(*(one.get_page() for _ in range(20)))
        now[0] += page.PAGE_CACHE_S
        await one.get_page()

    asyncio.run(reads())
    assert made == [100.0, 105.0]


@pytest.mark.parametrize(
    "host",
    ["localhost:8080", "127.0.0.1:8080", "[::1]:8080", "10.1.2.3", "operator", None,
     "plimsoll-operator.plimsoll-system.svc:8080", "operator.ns.svc.cluster.local"],
)  # fmt: skip
def test_names_of_the_cluster_and_addresses_are_answered(host: str | None) -> None:
    assert explain_refused_host(host) is None


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example"])
def test_a_web_site_s_name_is_not_answered(host: str) -> None:
    assert "port-forward" in (explain_refused_host(host) or "")
