"""The whole page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from plimsoll_api.assessment import DEVICE_SEGMENTS, HOST_SEGMENTS
from plimsoll_api.decoding import decode
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.state import View
from plimsoll_sidecar.page import sections
from plimsoll_sidecar.page.chart import Band, growth, svg
from plimsoll_sidecar.page.history import HistoryPoint

RELOAD_S = 5
EMPTY = b"{}"
"""What ``/state`` says before the first sample."""
STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#57606a;--line:#d0d7de;--bad:#b42318;
--good:#1a7f37;--here:#0b5cad}
@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--dim:#9da7b3;--line:#30363d;
--bad:#ff8a80;--good:#56d364;--here:#79b8ff}}
body{background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif;margin:1.5rem auto;
max-width:60rem;padding:0 1rem}
a{color:var(--here)}h1{font-size:1.4rem;margin:0}h2{font-size:1.1rem;margin:1.6rem 0 .4rem}
header p{color:var(--dim);margin:.2rem 0}.bad{color:var(--bad);font-weight:600}
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
.s-torch_allocated{fill:#3b7dd8;background:#3b7dd8}
.s-torch_reserved_unused{fill:#9cc3f0;background:#9cc3f0}
.s-non_torch{fill:#e08e0b;background:#e08e0b}.s-orphan{fill:#c2453b;background:#c2453b}
"""


def page(state: bytes, points: Sequence[HistoryPoint], live: bool = False) -> bytes:
    """HTML, UTF-8, of what ``/state`` says. ``live`` has the browser load it again and again."""
    known = None if state == EMPTY else decode(state, View)
    title = "Plimsoll" if known is None else f"{known.service} - Plimsoll"
    again = f'<meta http-equiv="refresh" content="{RELOAD_S}">' if live else ""
    body = "<main><p>No sample yet.</p></main>" if known is None else _body(known, points)
    follow = '<a href="/">Stop following</a>' if live else '<a href="/live">Follow</a>'
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{again}'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}"
        f'<footer><p>{follow} · <a href="/metrics">metrics</a> · <a href="/state">state</a></p>'
        "</footer></body></html>\n"
    )
    return text.encode()


def _body(known: View, points: Sequence[HistoryPoint]) -> str:
    mode, seen = known.mode, known.assessment
    memory = decode(bytes(known.budgets), MemoryPolicy)
    state = known.engine_state or "does not answer"
    shown = [*known.open, *(one for one in known.recent if one.ended)]
    rows = (("host", memory.host, seen.host), ("device", memory.device, seen.device))
    troubled = [text for text in (known.journal_error, known.config_error) if text]
    if known.set_aside:
        troubled.append(
            "Parts of the journal were damaged. They are kept in the state directory, in"
            f" set-aside: {', '.join(known.set_aside)}. Remediation continues without them; delete"
            " the files when you no longer need them."
        )
    if known.restart_budget_exhausted:
        troubled.append("The restart budget is spent. Find the cause, then run plimsoll resume.")
    troubles = "".join(f"<p class=bad role=alert>{escape(text)}</p>" for text in troubled)
    return (
        f"<header><h1>{escape(known.service)}</h1><p>Engine {escape(state)}, epoch"
        f" <code>{escape(known.epoch or 'unknown')}</code>, mode {mode}, restarts left"
        f" {known.restarts_left}</p>{troubles}</header><main>"
        f"<section aria-labelledby=b><h2 id=b>Budgets</h2>{sections.budgets(rows, seen.warm)}"
        f"{sections.slow_leaks(seen)}"
        f"</section><section aria-labelledby=m><h2 id=m>Memory</h2>{_charts(memory, points)}"
        f"{sections.segment_table(seen)}</section>"
        f"<section aria-labelledby=r><h2 id=r>Remediation ladder</h2>"
        f"{sections.ladder(known.ladder, mode, known.open)}</section>"
        f"<section aria-labelledby=i><h2 id=i>Incidents</h2>{sections.incident_list(shown)}"
        f"</section><section aria-labelledby=l><h2 id=l>Ledger</h2>"
        f"{sections.ledger(known.ledger)}</section></main>"
    )


def _charts(memory: MemoryPolicy, points: Sequence[HistoryPoint]) -> str:
    host, device = memory.host, memory.device
    bands = (
        Band("Host", HOST_SEGMENTS, tuple(p.host_baseline for p in points),
             host.growth_bytes if host else None),
        Band("Device", DEVICE_SEGMENTS, tuple(p.device_baseline for p in points),
             device.growth_bytes if device else None),
    )  # fmt: skip
    grown = {
        "Host": [(p.at, p.host_growth) for p in points],
        "Device": [(p.at, p.device_growth) for p in points],
    }
    made = []
    for band in bands:
        if band.budget and (picture := growth(band.name, grown[band.name], band.budget)):
            made.append(f"<h3>{band.name}: unexplained growth</h3>{picture}")
        if picture := svg(band, points):
            made.append(f"<h3>{band.name}: memory by segment</h3>{picture}")
    return "".join(made)
