"""Render the supervisor's read-only web page, which loads no other resources.

All external text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from plimsoll_api.admin import LedgerEntry
from plimsoll_api.assessment import (
    DEVICE_SEGMENTS,
    HOST_SEGMENTS,
    Assessment,
    BudgetState,
    Segment,
    format_slow_leaks,
    format_suspicions,
)
from plimsoll_api.decoding import decode
from plimsoll_api.incident_record import IncidentRecord
from plimsoll_api.incident_story import Story, make_record_story
from plimsoll_api.incidents import IncidentPhase
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.state import View
from plimsoll_api.supervision import Action
from plimsoll_api.times import format_clock_time
from plimsoll_api.units import format_bytes, format_span
from plimsoll_sidecar.history import HistoryPoint, MemoryBand, draw_growth_chart, draw_segment_chart

RELOAD_INTERVAL_S = 5
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
# Before the first sample.
EMPTY_STATE = b"{}"
STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#57606a;--line:#d0d7de;--bad:#b42318;
--good:#1a7f37;--here:#0b5cad}
@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--dim:#9da7b3;--line:#30363d;
--bad:#ff8a80;--good:#56d364;--here:#79b8ff}}
body{background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif;margin:1.5rem auto;
max-width:60rem;padding:0 1rem}
a{color:var(--here)}h1{font-size:1.4rem;margin:0}h2{font-size:1.1rem;margin:1.6rem 0 .4rem}
header p{color:var(--dim);margin:.2rem 0}header .bad,.bad{color:var(--bad);font-weight:600}
header .good{color:var(--good)}dl{display:flex;flex-wrap:wrap;gap:.6rem 2rem;margin:.8rem 0 0}
dl div{min-width:6rem}dt{color:var(--dim);font-size:.85rem}
dd{margin:0;font-size:1.3rem;font-variant-numeric:tabular-nums}
table{border-collapse:collapse;width:100%}caption{text-align:left;color:var(--dim);font-size:.85rem}
th,td{padding:.2rem .7rem .2rem 0;text-align:left;border-bottom:1px solid var(--line);
font-weight:400}
thead th{color:var(--dim);font-size:.85rem}.n,thead .n{text-align:right;
font-variant-numeric:tabular-nums;white-space:nowrap}
meter{width:12rem;max-width:100%}svg{width:100%;height:auto}svg text{fill:var(--dim);font-size:11px}
.grid{stroke:var(--line)}.baseline{stroke:var(--good);fill:var(--good)}
.budget{stroke:var(--bad);fill:var(--bad);stroke-width:2;stroke-dasharray:6 3}
svg text.baseline,svg text.budget{stroke:var(--bg);stroke-width:3;paint-order:stroke;
stroke-dasharray:none}
svg text.baseline{fill:var(--good)}svg text.budget{fill:var(--bad)}
polygon.grown{fill:var(--bad);opacity:.25}polyline.grown{fill:none;stroke:var(--bad);stroke-width:2}
h3{font-size:.95rem;color:var(--dim);font-weight:600;margin:1rem 0 .2rem}
:focus-visible{outline:2px solid var(--here);outline-offset:2px}
.s{stroke:var(--bg);stroke-width:.5}i{display:inline-block;width:.8rem;height:.8rem;
margin-right:.5rem;border-radius:2px}
.ladder{list-style:none;display:flex;flex-wrap:wrap;gap:.4rem;padding:0}.ladder li{border:1px solid
var(--line);border-radius:4px;padding:.1rem .7rem;color:var(--dim)}
.ladder li[aria-current]{border-color:var(--here);color:var(--here);font-weight:600}
@media(max-width:36rem){meter{width:4rem}svg text{font-size:16px}th,td{padding-right:.4rem}
td,th{font-size:.85rem}}
section{overflow-x:auto}code{overflow-wrap:anywhere}
details{border-top:1px solid var(--line);padding:.4rem 0}summary{cursor:pointer}
.p{font-weight:600}.p-Resolved{color:var(--good)}.p-Unresolved{color:var(--bad)}
.s-python_objects{fill:#3b7dd8;background:#3b7dd8}.s-malloc_in_use{fill:#e08e0b;background:#e08e0b}
.s-malloc_retained{fill:#e7c45c;background:#e7c45c}
.s-anonymous_other{fill:#7a68b3;background:#7a68b3}.s-shared{fill:#5aa9a3;background:#5aa9a3}
.s-shared_orphan{fill:#b0567a;background:#b0567a}
.s-hugetlb{fill:#4d8b3f;background:#4d8b3f}.s-kernel{fill:#8a6d4b;background:#8a6d4b}
.s-sockets{fill:#2f6f8f;background:#2f6f8f}.s-charged_other{fill:#a03c3c;background:#a03c3c}
.s-torch_allocated{fill:#3b7dd8;background:#3b7dd8}
.s-torch_reserved_unused{fill:#9cc3f0;background:#9cc3f0}
.s-non_torch{fill:#e08e0b;background:#e08e0b}.s-orphan{fill:#c2453b;background:#c2453b}
"""


def render_page(state: bytes, points: Sequence[HistoryPoint], should_reload: bool = False) -> bytes:
    """Return an HTML page in UTF-8 that shows ``state``, the JSON text of ``/state``."""
    view = None if state == EMPTY_STATE else decode(state, View)
    title = "Plimsoll" if view is None else f"{view.service} - Plimsoll"
    again = f'<meta http-equiv="refresh" content="{RELOAD_INTERVAL_S}">' if should_reload else ""
    body = (
        "<main><p>No sample has been taken yet.</p></main>"
        if view is None
        else _render_body(view, points)
    )
    follow = '<a href="/">Stop following</a>' if should_reload else '<a href="/live">Follow</a>'
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{again}'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}"
        f'<footer><p>{follow} · <a href="/metrics">metrics</a> · <a href="/state">state</a></p>'
        "</footer></body></html>\n"
    )
    return text.encode()


def _render_body(view: View, points: Sequence[HistoryPoint]) -> str:
    mode, seen = view.mode, view.assessment
    memory = decode(bytes(view.budgets), MemoryPolicy)
    role = f", role {escape(view.role)}" if view.role is not None else ""
    shown = [*view.open, *(incident for incident in view.recent if incident.ended)]
    rows = (("host", memory.host, seen.host), ("device", memory.device, seen.device))
    troubled = [text for text in (view.journal_error, view.config_error) if text]
    troubled += [
        f"{name}: {signal.reason}. {signal.message}"
        for name, signal in sorted(view.signals.items())
        if not signal.ok
    ]
    if view.out_of_service:
        troubled.append(
            "The pod is out of service for these reasons: "
            f"{', '.join(sorted(view.out_of_service))}."
        )
    if view.set_aside:
        troubled.append(
            "Parts of the journal were damaged. The supervisor moved them to the folder "
            f"set-aside of its state directory: {', '.join(view.set_aside)}. Supervision "
            "continues without them. Delete the files when you no longer need them."
        )
    if view.restart_budget_exhausted:
        troubled.append(
            "The restart budget is exhausted. Find the cause, and then run plimsoll resume POD."
        )
    troubles = "".join(f"<p class=bad role=alert>{escape(text)}</p>" for text in troubled)
    return (
        f"<header><h1>{escape(view.service)}</h1>"
        f"<p>As of {format_clock_time(view.time, DATE_FORMAT)}, mode {mode}{role},"
        f" epoch <code>{escape(view.epoch or 'unknown')}</code></p>"
        f"{_render_summary(view)}{troubles}</header><main>"
        f"<section tabindex=0 aria-labelledby=b><h2 id=b>Budgets</h2>"
        f"{render_budgets(rows, seen.warm)}{render_suspicions(seen)}</section>"
        "<section tabindex=0 aria-labelledby=m><h2 "
        f"id=m>Memory</h2>{_render_charts(memory, points)}"
        f"{render_segments(seen)}</section>"
        f"<section tabindex=0 aria-labelledby=r><h2 id=r>Remediation ladder</h2>"
        f"{render_ladder(view.ladder, mode, view.open)}</section>"
        f"<section tabindex=0 aria-labelledby=i><h2 id=i>Incidents</h2>{render_incidents(shown)}"
        f"</section><section tabindex=0 aria-labelledby=l><h2 id=l>Ledger</h2>"
        f"{render_ledger(view.ledger)}</section></main>"
    )


def _render_summary(view: View) -> str:
    state = view.engine_state or "does not answer"
    shown = [
        ("Engine", {"serving": "good", None: "bad"}.get(view.engine_state, ""), state),
        ("Open incidents", "bad" if view.open else "", str(len(view.open))),
        (
            "Restarts left",
            "bad" if view.restart_budget_exhausted else "",
            str(view.restarts_left),
        ),
    ]
    sizes_of = view.assessment.segments
    for name, segments in (("Host memory", HOST_SEGMENTS), ("Device memory", DEVICE_SEGMENTS)):
        if sizes := [sizes_of[segment] for segment in segments if segment in sizes_of]:
            shown.append((name, "", format_bytes(sum(sizes))))
    items = (
        f"<div><dt>{name}</dt><dd class='{kind}'>{escape(text)}</dd></div>"
        for name, kind, text in shown
    )
    return f"<dl>{''.join(items)}</dl>"


def _render_charts(memory: MemoryPolicy, points: Sequence[HistoryPoint]) -> str:
    host, device = memory.host, memory.device
    bands = (
        MemoryBand("Host", HOST_SEGMENTS, tuple(p.host_baseline for p in points),
             host.growth_bytes if host else None),
        MemoryBand("Device", DEVICE_SEGMENTS, tuple(p.device_baseline for p in points),
             device.growth_bytes if device else None),
    )  # fmt: skip
    grown = {
        "Host": [(p.at, p.host_growth) for p in points],
        "Device": [(p.at, p.device_growth) for p in points],
    }
    charts = []
    for band in bands:
        if band.budget and (picture := draw_growth_chart(band.name, grown[band.name], band.budget)):
            charts.append(f"<h3>{band.name}: unexplained growth</h3>{picture}")
        if picture := draw_segment_chart(band, points):
            charts.append(f"<h3>{band.name}: memory by segment</h3>{picture}")
    return "".join(charts)


# An incident in another phase has no rung yet.
PHASE_RUNGS = {
    IncidentPhase.TRIMMING: Action.TRIM.value,
    IncidentPhase.CONFIRMED: Action.TRIM.value,
}
NO_ACTION = "No action"


def render_budgets(
    rows: Iterable[tuple[str, MemoryBudget | None, BudgetState | None]], is_warm: bool
) -> str:
    """Return an HTML table with a meter for each leak budget."""
    html_rows = []
    for name, budget, state in rows:
        if budget is None:
            continue
        share = state.consumed_ratio if state else None
        used = state.unexplained if state else None
        text = ("unknown" if is_warm else "warming up") if share is None else f"{share:.0%}"
        grown = "?" if used is None else format_bytes(used)
        left = _format_time_left(state)
        html_rows.append(
            f"<tr><th scope=row>{name}</th><td><meter min=0 max=1 low=.5 high=.99 optimum=0"
            f' value="{min(share or 0.0, 1.0):.3f}" aria-label="{name} leak budget">{text}</meter>'
            f"</td><td class=n>{text}</td>"
            f"<td class=n>{grown} of {format_bytes(budget.growth_bytes)}</td>"
            f"<td class=n>{left}</td></tr>"
        )
    if not html_rows:
        return "<p>No leak budget is set, so the supervisor only observes memory.</p>"
    head = ("budget", "share", ">spent", ">unexplained", ">exhausted")
    return _render_table("Leak budgets", head, html_rows)


def render_suspicions(assessment: Assessment) -> str:
    """Return an HTML paragraph for each suspicion and each slow leak."""
    texts = [f"Suspected: {text}" for text in format_suspicions(assessment.suspicions)]
    texts += [f"Slow leak: {text}" for text in format_slow_leaks(assessment.slow)]
    return "".join(f"<p>{escape(text)}.</p>" for text in texts)


def render_ladder(rungs: Sequence[Action], mode: str, incidents: Sequence[IncidentRecord]) -> str:
    """Return the rungs as an HTML list, in which the current rung is marked."""
    here = find_current_rung(incidents)
    items = []
    for rung in (NO_ACTION, *(action.value for action in rungs)):
        current = ' aria-current="step"' if rung == here else ""
        items.append(f"<li{current}>{rung}</li>")
    note = (
        ""
        if mode == "Recover"
        else " <p>In mode Observe, the supervisor only records what it would do.</p>"
    )
    return f"<ol class=ladder>{''.join(items)}</ol>{note}"


def find_current_rung(incidents: Sequence[IncidentRecord]) -> str:
    """Return the most disruptive current rung; ``No action`` if there is none."""
    order = [NO_ACTION, *(action.value for action in Action)]
    at = [
        incident.rung.value if incident.rung else PHASE_RUNGS.get(incident.phase, NO_ACTION)
        for incident in incidents
    ]
    return max(at, key=order.index, default=NO_ACTION)


def render_incidents(incidents: Sequence[IncidentRecord]) -> str:
    """Return HTML with one expandable entry for each incident and its steps."""
    if not incidents:
        return "<p>There are no incidents.</p>"
    return "".join(_render_incident(make_record_story(incident)) for incident in incidents)


def _render_incident(story: Story) -> str:
    opened = format_clock_time(story.opened_at, DATE_FORMAT)
    back = "" if story.returned_bytes is None else f", {_format_size(story.returned_bytes)} freed"
    steps = [
        f"<tr><td>{format_clock_time(step.at)}</td><td>{escape(step.name)}</td><td>{step.outcome}</td>"
        f"<td class=n>{_format_size(step.before_bytes)}</td>"
        f"<td class=n>{_format_size(step.after_bytes)}</td>"
        f"<td>{escape(step.message)}</td></tr>"
        for step in story.steps
    ]
    head = ("time", "step", "outcome", ">before", ">after", "message")
    evidence = "".join(f"<li>{escape(text)}</li>" for text in story.attribution.evidence)
    return (
        f"<details{'' if story.has_ended else ' open'}><summary><span class='p p-{story.phase}'>"
        f"{escape(story.state)}</span> {opened} {escape(story.headline)}{back}"
        f"</summary><p><code>{escape(story.name)}</code></p><ul>{evidence}</ul>"
        f"{_render_table('Steps', head, steps) if steps else ''}</details>"
    )


def render_segments(assessment: Assessment) -> str:
    """Return an HTML table of the newest sizes, as a text alternative to the chart."""
    rows = [
        f"<tr><th scope=row><i class='s-{segment.value}'></i>{segment.value}</th>"
        f"<td class=n>{format_bytes(assessment.segments[segment])}</td></tr>"
        for segment in Segment
        if segment in assessment.segments
    ]
    return (
        _render_table("Current segments", ("segment", ">size"), rows)
        if rows
        else ("<p>No sample has been taken yet.</p>")
    )


def render_ledger(entries: Sequence[LedgerEntry]) -> str:
    """Return the engine's ledger as an HTML table."""
    if not entries:
        return "<p>The engine has not reported a ledger yet.</p>"
    rows = [
        f"<tr><th scope=row>{escape(entry.owner)}</th><td>{entry.kind.value}</td>"
        f"<td>{entry.process.value}</td><td class=n>{format_bytes(entry.bytes)}</td>"
        f"<td class=n>{_format_size(entry.bound)}</td></tr>"
        for entry in entries
    ]
    return _render_table("Ledger", ("owner", "kind", "process", ">holds", ">at most"), rows)


def _format_time_left(state: BudgetState | None) -> str:
    if state is None or state.exhaustion_s is None:
        return "-"
    return f"in {format_span(state.exhaustion_s)}"


def _format_size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_bytes(size_bytes)


def _render_table(caption: str, head: Sequence[str], rows: Iterable[str]) -> str:
    # The prefix > in the name of a column right-aligns the column. Rows are HTML.
    cells = "".join(
        f"<th scope=col{' class=n' if name.startswith('>') else ''}>{name.lstrip('>')}</th>"
        for name in head
    )
    return (
        f"<table><caption>{caption}</caption><thead><tr>{cells}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
