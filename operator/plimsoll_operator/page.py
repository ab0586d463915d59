"""Read-only web page of the fleet, without external content.

The page shows names and texts from all watched namespaces, so it is off by default. The texts of
incidents come from pods; every text is truncated and escaped. Tables have at most :data:`MAX_ROWS`
rows, worst first. The page is cached for :data:`CACHE_S` seconds.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any

from plimsoll_api.fleet_row import FleetRow, make_policy_row, make_service_row, sort_worst_first
from plimsoll_api.incidents import ENDED_PHASES
from plimsoll_api.page_security import CONTENT_SECURITY_POLICY, is_ip_address, parse_host_name
from plimsoll_api.times import format_rfc3339
from plimsoll_operator.fleet.slots import Allocation
from plimsoll_operator.kinds import INCIDENT, POLICY, SERVICE, Key, Object, Ref
from plimsoll_operator.runtime.cache import Store

MAX_ROWS = 200
MAX_INCIDENTS = 100
MAX_CELL = 200
"""Maximum number of characters in a cell."""
CACHE_S = 5.0
AT_ONCE = 100
"""Number of objects to decompress before yielding to other tasks of the event loop."""
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
ALARM_STATES = frozenset({"RestartBudgetExhausted", "MemoryNearLimit", "Conflicting", "SlowLeak"})
HEALTHY_STATES = frozenset({"Ready", "Supervised", "NoPods", "Unknown"})
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
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
    """Restart slots of the cluster: the number in use, the limit, and the names of closed slots."""

    held: int
    limit: int
    waiting: tuple[str, ...] = ()


@dataclass
class Fleet:
    """Content of the page. ``budgets`` are the host and device budgets by row key."""

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

    def __init__(
        self,
        store: Store,
        slots: Callable[[], Allocation],
        limit: int,
        leading: Callable[[], bool],
        namespaces: tuple[str, ...] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the page. ``slots`` returns the circuit breaker's last decision."""
        self._store, self._slots, self._limit = store, slots, limit
        self._leading, self._clock = leading, clock
        self._scope = f"Namespaces {', '.join(namespaces)}" if namespaces else "All namespaces"
        self._lock = asyncio.Lock()
        self._made, self._at = b"", float("-inf")

    async def get(self) -> bytes:
        """Return the page as UTF-8 HTML, at most :data:`CACHE_S` seconds old."""
        async with self._lock:
            now = self._clock()
            if not self._made or not 0 <= now - self._at < CACHE_S:
                self._made, self._at = await self._make(now), now
            return self._made

    async def _make(self, now: float) -> bytes:
        if not self._leading():
            body = "<p>This operator is on standby. The leader's page shows the fleet.</p>"
            return render(body, self._scope, now)
        slots = self._slots()
        waiting = sorted({_slot_owner(lease) for lease in slots.close})
        fleet = await read(self._store, SlotUsage(slots.held, self._limit, tuple(waiting)))
        return render(fleet_html(fleet), self._scope, now)


async def read(store: Store, breaker: SlotUsage) -> Fleet:
    """Read the fleet from the cache in batches, so that other tasks can run in between."""
    fleet = Fleet(breaker)
    kept: list[FleetRow] = []
    for count, key in enumerate(store.known_keys()):
        if count % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
        item = store.get(key, Ref(key.kind, key.name))
        if item is None:
            continue
        row = make_service_row(item) if key.kind == SERVICE.kind else make_policy_row(item)
        fleet.services_count += key.kind == SERVICE.kind
        fleet.policies_count += key.kind == POLICY.kind
        fleet.open_count += row.incidents
        fleet.budgets[row.key] = _budgets(item)
        fleet.suspects += _suspects(row, item)
        kept.append(row)
    fleet.rows = sort_worst_first(kept)[:MAX_ROWS]
    fleet.budgets = {row.key: fleet.budgets[row.key] for row in fleet.rows}
    fleet.suspects = fleet.suspects[:MAX_ROWS]
    found: list[Object] = []
    for row in fleet.rows:
        await asyncio.sleep(0)
        found = heapq.nlargest(MAX_INCIDENTS, [*found, *_incidents(store, row)], key=_opened)
    fleet.incidents = found
    return fleet


def _incidents(store: Store, row: FleetRow) -> Iterator[Object]:
    """Yield the open incidents of a row."""
    key = Key(row.namespace, row.name, row.kind)
    for incident in store.children(key, (INCIDENT.kind,)) if row.incidents else ():
        if (incident.get("status") or {}).get("phase") not in ENDED_PHASES:
            yield incident


def _opened(incident: Object) -> str:
    return str(incident["spec"].get("openedAt", ""))


def _budgets(item: Object) -> tuple[str, str]:
    memory = (item.get("spec") or {}).get("memory") or {}
    host, device = memory.get("host") or {}, memory.get("device") or {}
    return str(host.get("growthBudget", "")), str(device.get("growthBudget", ""))


def _suspects(row: FleetRow, item: Object) -> Iterator[Object]:
    status = item.get("status") or {}
    if found := status.get("suspectRevision"):
        yield {"of": row.shown, **found}
    for workload in status.get("workloads") or ():
        if found := workload.get("suspectRevision"):
            yield {"of": f"{row.shown}: {workload.get('name', '')}", **found}


def _slot_owner(lease: Object) -> str:
    return f"{lease['metadata'].get('namespace', '')}/{lease['metadata']['name']}"


def render(body: str, scope: str, now: float) -> bytes:
    """Return the page with the HTML ``body``. ``now`` is in Unix seconds."""
    return PAGE.format(scope=_text(scope), at=format_rfc3339(now), body=body).encode()


def fleet_html(fleet: Fleet) -> str:
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
            _section("Services and policies", _ROWS, map(_row(fleet.budgets), fleet.rows),
                     "No services and no policies.", all_rows - len(fleet.rows)),
            _section("Open incidents", _INCIDENTS, map(_incident, fleet.incidents),
                     "No incident is open.", fleet.open_count - len(fleet.incidents)),
            _section("Suspect revisions", _SUSPECTS, map(_suspect, fleet.suspects),
                     "No revision leaks in most of its replicas.", 0),
            _section("Circuit breaker", _WAITING, map(_waiting, breaker.waiting[:MAX_ROWS]),
                     "No restart slot is kept closed.", len(breaker.waiting) - MAX_ROWS),
        )
    )  # fmt: skip


_Heads = tuple[tuple[str, str], ...]
"""Title and CSS classes of each column: ``n`` for numbers, ``w`` for columns that are hidden in
narrow windows."""
_ROWS: _Heads = (
    ("name", ""), ("mode", "w"), ("state", ""), ("pods", "n"), ("host budget", ""),
    ("device budget", ""), ("incidents", "n"), ("restarts", "n w"),
)  # fmt: skip
_INCIDENTS: _Heads = (
    ("incident", ""), ("kind", ""), ("phase", ""), ("pod", "w"), ("segment", ""), ("since", ""),
    ("what happens", ""),
)  # fmt: skip
_SUSPECTS: _Heads = (
    ("service or workload", ""), ("revision", ""), ("leak", ""), ("replicas", "n"),
    ("action", ""), ("since", "w"),
)  # fmt: skip
_WAITING: _Heads = (("restart slot that is kept closed while others are in use", ""),)


def _section(title: str, head: _Heads, rows: Iterable[str], none: str, more: int) -> str:
    """Return a section with a scrollable table. ``more`` is the number of omitted rows."""
    listed = list(rows)
    name = title.lower().replace(" ", "-")
    if not listed:
        return f"<section><h2>{title}</h2><p class=dim>{none}</p></section>"
    titles = "".join(f'<th scope=col class="{classes}">{text}</th>' for text, classes in head)
    omitted = f"<p class=dim>{more} more are left out.</p>" if more > 0 else ""
    return (
        f"<section><h2 id={name}>{title}</h2><div class=t tabindex=0 role=region"
        f" aria-labelledby={name}><table><thead><tr>{''.join(titles)}</tr></thead>"
        f"<tbody>{''.join(listed)}</tbody></table></div>{omitted}</section>"
    )


def _row(budgets: dict[str, tuple[str, str]]) -> Callable[[FleetRow], str]:
    def html(row: FleetRow) -> str:
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
            f"<tr><th scope=row>{_text(row.shown)} <small>{kind}</small></th>"
            f"<td class=w>{_text(row.mode)}</td><td class={state}>{_text(row.state)}</td>"
            f"<td class=n>{_count(row.ready)}/{_count(row.replicas)}</td>"
            f"<td>{_meter('host', row, row.host, host)}</td>"
            f"<td>{_meter('device', row, row.device, device)}</td>"
            f"<td class=n>{row.incidents}</td>"
            f'<td class="n w">{_count(row.restarts)}</td></tr>'
        )

    return html


def _meter(side: str, row: FleetRow, percent: int | None, budget: str) -> str:
    """Return a meter of a consumed budget, or text if its value or the budget is not known."""
    if not budget and percent is None:
        return "<small>none</small>"
    if percent is None:
        return f"<small>unknown of {_text(budget)}</small>"
    label = _text(f"{side} budget of {row.shown}")
    return (
        f'<meter min=0 max=100 low=50 high=99 optimum=0 value="{min(max(percent, 0), 100)}"'
        f' aria-label="{label}"></meter> {percent}% <small>of {_text(budget)}</small>'
    )


def _incident(item: Object) -> str:
    spec, status = item["spec"], item.get("status") or {}
    meta, growth = item["metadata"], status.get("attribution") or {}
    role = (spec.get("target") or {}).get("role")
    place = " ".join(str(growth[one]) for one in ("segment", "process") if growth.get(one))
    return (
        f"<tr><th scope=row>{_text(meta.get('namespace', ''))}/{_text(meta['name'])}</th>"
        f"<td>{_text(spec.get('kind'))}</td>"
        f"<td class=warn>{_text(status.get('phase', 'Unknown'))}</td>"
        f"<td class=w>{_text(spec.get('pod'))} <small>{_text(role)}</small></td>"
        f"<td>{_text(place or 'unknown')}</td>"
        f"<td class=d>{_text(spec.get('openedAt'))}</td>"
        f"<td class=m>{_text(status.get('message'))}</td></tr>"
    )


def _suspect(found: Object) -> str:
    counts = f"{_count(found.get('leakingReplicas'))} of {_count(found.get('replicas'))}"
    return (
        f"<tr><th scope=row>{_text(found['of'])}</th><td>{_text(found.get('revision'))}</td>"
        f"<td>{_text(found.get('leak'))}</td><td class=n>{counts}</td>"
        f"<td>{_text(found.get('action'))}</td>"
        f'<td class="d w">{_text(found.get("since"))}</td></tr>'
    )


def _waiting(name: str) -> str:
    return f"<tr><th scope=row>{_text(name)}</th></tr>"


def _text(value: Any) -> str:
    """Return a value as escaped text of at most :data:`MAX_CELL` characters; empty for None."""
    text = "" if value is None else str(value)
    return escape(text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 1]}…")


def _count(value: Any) -> str:
    return str(value) if isinstance(value, int) else "?"


def refusal(host: str | None) -> str | None:
    """Return why a request with this Host header is rejected; None to accept it.

    A public web site cannot have an IP address or a cluster-internal name as its host name
    (:mod:`plimsoll_api.page_security`).
    """
    name = parse_host_name(host or "")
    in_cluster = "." not in name or name.endswith((".svc", ".svc.cluster.local"))
    if in_cluster or is_ip_address(name):
        return None
    shown = name[:MAX_CELL]
    return f"host {shown!r} is not answered: open the page by port-forward, as localhost"
