"""Render the read-only web page of the fleet.

It shows names and texts from all watched namespaces, so it is disabled by default. Texts of
incidents are untrusted, so every text is truncated and escaped.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any

from plimsoll_api.fleet_row import (
    FleetRow,
    make_policy_row,
    make_service_row,
    sort_rows_worst_first,
)
from plimsoll_api.incidents import ENDED_PHASES
from plimsoll_api.page_security import CONTENT_SECURITY_POLICY, is_ip_address, parse_host_name
from plimsoll_api.times import format_rfc3339
from plimsoll_operator.fleet.circuit_breaker import SlotAllocation
from plimsoll_operator.kinds import INCIDENT, POLICY, SERVICE, Key, Object, Ref
from plimsoll_operator.runtime.cache import Store

MAX_ROWS = 200
MAX_INCIDENTS = 100
MAX_CELL_CHARS = 200
PAGE_CACHE_S = 5.0
OBJECTS_PER_BATCH = 100
"""Number of objects to decompress before other tasks of the event loop may run."""
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
ALARM_STATES = frozenset({"RestartBudgetExhausted", "MemoryNearLimit", "Conflicting", "SlowLeak"})
HEALTHY_STATES = frozenset({"Ready", "Supervised", "NoPods", "Unknown"})
PAGE_TEMPLATE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>Fleet - Plimsoll</title>
<style>
:root{{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#57606a;--line:#d0d7de;--bad:#b42318;
--good:#1a7f37;--warn:#7d4e00;--here:#0b5cad}}
@media(prefers-color-scheme:dark){{:root{{--bg:#0d1117;--fg:#e6edf3;--dim:#9da7b3;--line:#30363d;
--bad:#ff8a80;--good:#56d364;--warn:#e3b341;--here:#79b8ff}}}}
body{{background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif;margin:1.5rem auto;
max-width:80rem;padding:0 1rem}}
h1{{font-size:1.4rem;margin:0}}h2{{font-size:1.1rem;margin:1.6rem 0 .4rem}}
header p,p.dim{{color:var(--dim);margin:.2rem 0}}
dl{{display:flex;flex-wrap:wrap;gap:.6rem 2rem;margin:1rem 0 0}}dl div{{min-width:6rem}}
dt{{color:var(--dim);font-size:.85rem}}dd{{margin:0;font-size:1.3rem;
font-variant-numeric:tabular-nums}}
.t{{overflow-x:auto}}.t:focus-visible{{outline:2px solid var(--here);outline-offset:2px}}
table{{border-collapse:collapse;width:100%}}
caption{{text-align:left;color:var(--dim);font-size:.85rem}}
th,td{{padding:.25rem .8rem .25rem 0;text-align:left;border-bottom:1px solid var(--line);
font-weight:400;vertical-align:top}}thead th{{color:var(--dim);font-size:.85rem}}
tbody th{{overflow-wrap:anywhere;min-width:9rem}}td.m{{overflow-wrap:anywhere;min-width:14rem}}
td.d{{white-space:nowrap}}
.n,thead .n{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
small{{color:var(--dim);font-size:.8rem}}meter{{width:5rem;max-width:100%}}
.bad{{color:var(--bad);font-weight:600}}.good{{color:var(--good)}}.warn{{color:var(--warn)}}
@media(max-width:50rem){{.w{{display:none}}meter{{width:3rem}}th,td{{padding-right:.5rem;
font-size:.85rem}}tbody th{{min-width:7rem}}}}
</style></head><body><header><h1>Plimsoll fleet</h1><p>{scope}, as of {at}. Read-only.</p></header>
<main>{body}</main></body></html>
"""


@dataclass(frozen=True)
class SlotUsage:
    """Use of the cluster's restart slots; ``closed`` are the names of closed slots."""

    held: int
    limit: int
    waiting: tuple[str, ...] = ()


@dataclass
class Fleet:
    """Content of the page; ``budgets`` maps a row to its host and device budgets as text."""

    breaker: SlotUsage
    rows: list[FleetRow] = field(default_factory=list)
    budgets: dict[str, tuple[str, str]] = field(default_factory=dict)
    suspects: list[Object] = field(default_factory=list)
    incidents: list[Object] = field(default_factory=list)
    services_count: int = 0
    policies_count: int = 0
    open_count: int = 0


class FleetPage:
    """Page of the fleet, rendered from the operator's cache without requests to the API server."""

    # An empty tuple of ``namespaces`` means all namespaces.
    def __init__(
        self,
        store: Store,
        get_allocation: Callable[[], SlotAllocation],
        max_slots: int,
        is_leader: Callable[[], bool],
        namespaces: tuple[str, ...] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._get_allocation, self._max_slots = store, get_allocation, max_slots
        self._leading, self._clock = is_leader, clock
        self._scope = f"Namespaces {', '.join(namespaces)}" if namespaces else "All namespaces"
        self._lock = asyncio.Lock()
        self._made, self._at = b"", float("-inf")

    async def get_page(self) -> bytes:
        """Return the page as UTF-8 HTML, at most :data:`PAGE_CACHE_S` seconds old."""
        async with self._lock:
            now = self._clock()
            if not self._made or not 0 <= now - self._at < PAGE_CACHE_S:
                self._made, self._at = await self._render(now), now
            return self._made

    async def _render(self, now: float) -> bytes:
        if not self._leading():
            body = "<p>This operator is on standby. The leader's page shows the fleet.</p>"
            return render_page(body, self._scope, now)
        slots = self._get_allocation()
        waiting = sorted({_get_slot_owner(lease) for lease in slots.close})
        usage = SlotUsage(slots.held, self._max_slots, tuple(waiting))
        fleet = await read_fleet(self._store, usage)
        return render_page(render_fleet(fleet), self._scope, now)


async def read_fleet(store: Store, slots: SlotUsage) -> Fleet:
    """Read the content of the page from the cache, in batches so that other tasks can run."""
    fleet = Fleet(slots)
    kept: list[FleetRow] = []
    for count, key in enumerate(store.list_known_keys()):
        if count % OBJECTS_PER_BATCH == OBJECTS_PER_BATCH - 1:
            await asyncio.sleep(0)
        item = store.get(key, Ref(key.kind, key.name))
        if item is None:
            continue
        row = make_service_row(item) if key.kind == SERVICE.kind else make_policy_row(item)
        fleet.services_count += key.kind == SERVICE.kind
        fleet.policies_count += key.kind == POLICY.kind
        fleet.open_count += row.incidents
        fleet.budgets[row.key] = _get_budgets(item)
        fleet.suspects += _iterate_suspects(row, item)
        kept.append(row)
    fleet.rows = sort_rows_worst_first(kept)[:MAX_ROWS]
    fleet.budgets = {row.key: fleet.budgets[row.key] for row in fleet.rows}
    fleet.suspects = fleet.suspects[:MAX_ROWS]
    found: list[Object] = []
    for row in fleet.rows:
        await asyncio.sleep(0)
        found = heapq.nlargest(
            MAX_INCIDENTS, [*found, *_iterate_incidents(store, row)], key=_get_opened_at
        )
    fleet.incidents = found
    return fleet


def _iterate_incidents(store: Store, row: FleetRow) -> Iterator[Object]:
    key = Key(row.namespace, row.name, row.kind)
    for incident in store.list_children(key, (INCIDENT.kind,)) if row.incidents else ():
        if (incident.get("status") or {}).get("phase") not in ENDED_PHASES:
            yield incident


def _get_opened_at(incident: Object) -> str:
    return str(incident["spec"].get("openedAt", ""))


def _get_budgets(item: Object) -> tuple[str, str]:
    memory = (item.get("spec") or {}).get("memory") or {}
    host, device = memory.get("host") or {}, memory.get("device") or {}
    return str(host.get("growthBudget", "")), str(device.get("growthBudget", ""))


def _iterate_suspects(row: FleetRow, item: Object) -> Iterator[Object]:
    status = item.get("status") or {}
    if found := status.get("suspectRevision"):
        yield {"of": row.display_name, **found}
    for workload in status.get("workloads") or ():
        if found := workload.get("suspectRevision"):
            yield {"of": f"{row.display_name}: {workload.get('name', '')}", **found}


def _get_slot_owner(lease: Object) -> str:
    return f"{lease['metadata'].get('namespace', '')}/{lease['metadata']['name']}"


def render_page(body: str, scope: str, now: float) -> bytes:
    """Return the page with the HTML ``body``. ``now`` is in Unix seconds."""
    return PAGE_TEMPLATE.format(
        scope=_escape_cell(scope), at=format_rfc3339(now), body=body
    ).encode()


def render_fleet(fleet: Fleet) -> str:
    """Return the page's tables as HTML."""
    breaker = fleet.breaker
    counts = (
        ("Services", fleet.services_count),
        ("Policies", fleet.policies_count),
        ("Open incidents", fleet.open_count),
        ("Suspect revisions", len(fleet.suspects)),
        ("Restart slots in use", f"{breaker.held} of {breaker.limit}"),
        ("Slots kept closed", len(breaker.waiting)),
    )
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in counts)
    all_rows = fleet.services_count + fleet.policies_count
    return f"<dl>{listed}</dl>" + "".join(
        (
            _render_section(
                "Services and policies", _ROW_COLUMNS,
                map(_make_row_renderer(fleet.budgets), fleet.rows),
                "There are no services and no policies.", all_rows - len(fleet.rows),
            ),
            _render_section(
                "Open incidents", _INCIDENT_COLUMNS, map(_render_incident, fleet.incidents),
                "No incidents are open.", fleet.open_count - len(fleet.incidents),
            ),
            _render_section(
                "Suspect revisions", _SUSPECT_COLUMNS, map(_render_suspect, fleet.suspects),
                "No revision leaks in most of its replicas.", 0,
            ),
            _render_section(
                "Circuit breaker", _CLOSED_SLOT_COLUMNS,
                map(_render_closed_slot, breaker.waiting[:MAX_ROWS]),
                "No restart slots are kept closed.", len(breaker.waiting) - MAX_ROWS,
            ),
        )
    )  # fmt: skip


_Columns = tuple[tuple[str, str], ...]
"""Title and CSS classes of each column: ``n`` for numbers, and ``w`` for wide windows only."""
_ROW_COLUMNS: _Columns = (
    ("name", ""), ("mode", "w"), ("state", ""), ("pods", "n"), ("host budget", ""),
    ("device budget", ""), ("incidents", "n"), ("restarts", "n w"),
)  # fmt: skip
_INCIDENT_COLUMNS: _Columns = (
    ("incident", ""), ("kind", ""), ("phase", ""), ("pod", "w"), ("segment", ""), ("since", ""),
    ("what happens", ""),
)  # fmt: skip
_SUSPECT_COLUMNS: _Columns = (
    ("service or workload", ""), ("revision", ""), ("leak", ""), ("replicas", "n"),
    ("action", ""), ("since", "w"),
)  # fmt: skip
_CLOSED_SLOT_COLUMNS: _Columns = (("restart slot that is closed while other slots are in use", ""),)


def _render_section(
    title: str, columns: _Columns, rows: Iterable[str], empty_text: str, omitted_count: int
) -> str:
    listed = list(rows)
    name = title.lower().replace(" ", "-")
    if not listed:
        return f"<section><h2>{title}</h2><p class=dim>{empty_text}</p></section>"
    titles = "".join(f'<th scope=col class="{classes}">{text}</th>' for text, classes in columns)
    omitted = f"<p class=dim>{omitted_count} more are not shown.</p>" if omitted_count > 0 else ""
    return (
        f"<section><h2 id={name}>{title}</h2><div class=t tabindex=0 role=region"
        f" aria-labelledby={name}><table><thead><tr>{''.join(titles)}</tr></thead>"
        f"<tbody>{''.join(listed)}</tbody></table></div>{omitted}</section>"
    )


def _make_row_renderer(budgets: dict[str, tuple[str, str]]) -> Callable[[FleetRow], str]:
    def render_row(row: FleetRow) -> str:
        host, device = budgets.get(row.key, ("", ""))
        state = (
            "bad"
            if row.state in ALARM_STATES
            else "good"
            if row.state in HEALTHY_STATES
            else "warn"
        )
        kind = "policy" if row.kind == POLICY.kind else "service"
        return (
            f"<tr><th scope=row>{_escape_cell(row.display_name)} <small>{kind}</small></th>"
            f"<td class=w>{_escape_cell(row.mode)}</td>"
            f"<td class={state}>{_escape_cell(row.state)}</td>"
            f"<td class=n>{_format_count(row.ready)}/{_format_count(row.replicas)}</td>"
            f"<td>{_render_meter('host', row, row.host, host)}</td>"
            f"<td>{_render_meter('device', row, row.device, device)}</td>"
            f"<td class=n>{row.incidents}</td>"
            f'<td class="n w">{_format_count(row.restarts)}</td></tr>'
        )

    return render_row


def _render_meter(side: str, row: FleetRow, percent: int | None, budget: str) -> str:
    """Return an HTML meter of the used part of the budget, or a text if it is unknown."""
    if not budget and percent is None:
        return "<small>none</small>"
    if percent is None:
        return f"<small>unknown of {_escape_cell(budget)}</small>"
    label = _escape_cell(f"{side} budget of {row.display_name}")
    return (
        f'<meter min=0 max=100 low=50 high=99 optimum=0 value="{min(max(percent, 0), 100)}"'
        f' aria-label="{label}"></meter> {percent}% <small>of {_escape_cell(budget)}</small>'
    )


def _render_incident(item: Object) -> str:
    spec, status = item["spec"], item.get("status") or {}
    meta, growth = item["metadata"], status.get("attribution") or {}
    role = (spec.get("target") or {}).get("role")
    place = " ".join(str(growth[one]) for one in ("segment", "process") if growth.get(one))
    return (
        f"<tr><th scope=row>{_escape_cell(meta.get('namespace', ''))}/"
        f"{_escape_cell(meta['name'])}</th>"
        f"<td>{_escape_cell(spec.get('kind'))}</td>"
        f"<td class=warn>{_escape_cell(status.get('phase', 'Unknown'))}</td>"
        f"<td class=w>{_escape_cell(spec.get('pod'))} <small>{_escape_cell(role)}</small></td>"
        f"<td>{_escape_cell(place or 'unknown')}</td>"
        f"<td class=d>{_escape_cell(spec.get('openedAt'))}</td>"
        f"<td class=m>{_escape_cell(status.get('message'))}</td></tr>"
    )


def _render_suspect(suspect: Object) -> str:
    leaking, replicas = (_format_count(suspect.get(one)) for one in ("leakingReplicas", "replicas"))
    return (
        f"<tr><th scope=row>{_escape_cell(suspect['of'])}</th>"
        f"<td>{_escape_cell(suspect.get('revision'))}</td>"
        f"<td>{_escape_cell(suspect.get('leak'))}</td><td class=n>{leaking} of {replicas}</td>"
        f"<td>{_escape_cell(suspect.get('action'))}</td>"
        f'<td class="d w">{_escape_cell(suspect.get("since"))}</td></tr>'
    )


def _render_closed_slot(name: str) -> str:
    return f"<tr><th scope=row>{_escape_cell(name)}</th></tr>"


# At most :data:`MAX_CELL_CHARS` characters; empty for None.
def _escape_cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return escape(text if len(text) <= MAX_CELL_CHARS else f"{text[: MAX_CELL_CHARS - 1]}…")


def _format_count(value: Any) -> str:
    return str(value) if isinstance(value, int) else "?"


def explain_refused_host(host: str | None) -> str | None:
    """Return why a request with this Host header is rejected; None if it is accepted.

    Only names that no public web site can have are accepted.
    """
    name = parse_host_name(host or "")
    in_cluster = "." not in name or name.endswith((".svc", ".svc.cluster.local"))
    if in_cluster or is_ip_address(name):
        return None
    shown = name[:MAX_CELL_CHARS]
    return (
        f"requests to host {shown!r} are not allowed: open the page on localhost through kubectl"
        " port-forward"
    )
