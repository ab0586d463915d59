"""The parts of the page: budgets, ladder, incidents, ledger. Every text from outside is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from plimsoll_api.admin import LedgerEntry
from plimsoll_api.assessment import Assessment, BudgetState, Segment, slow_leak_texts
from plimsoll_api.incident_record import IncidentRecord
from plimsoll_api.incidents import IncidentPhase
from plimsoll_api.memory_policy import MemoryBudget
from plimsoll_api.supervision import Action
from plimsoll_api.times import clock_time
from plimsoll_api.units import format_bytes

PRESENT = {
    IncidentPhase.TRIMMING: Action.TRIM.value,
    IncidentPhase.CONFIRMED: Action.TRIM.value,
}
"""Phases that stand on a rung which the incident itself does not name."""
OBSERVE = "Observe"


def budgets(rows: Iterable[tuple[str, MemoryBudget | None, BudgetState | None]], warm: bool) -> str:
    """Return a meter for each budget."""
    made = []
    for name, budget, state in rows:
        if budget is None:
            continue
        share = state.consumed_ratio if state else None
        used = state.unexplained if state else None
        text = ("unknown" if warm else "warming up") if share is None else f"{share:.0%}"
        grown = "?" if used is None else format_bytes(used)
        left = _left(state)
        made.append(
            f"<tr><th scope=row>{name}</th><td><meter min=0 max=1 low=.5 high=.99 optimum=0"
            f' value="{min(share or 0.0, 1.0):.3f}" aria-label="{name} leak budget">{text}</meter>'
            f"</td><td class=n>{text}</td>"
            f"<td class=n>{grown} of {format_bytes(budget.growth_bytes)}</td>"
            f"<td class=n>{left}</td></tr>"
        )
    if not made:
        return "<p>No leak budget is set: the supervisor only watches memory.</p>"
    head = ("budget", "", ">spent", ">unexplained", ">exhausted")
    return _table("Leak budgets", head, made)


def slow_leaks(seen: Assessment) -> str:
    """Return a line for each memory that keeps growing."""
    return "".join(f"<p>Slow leak: {escape(text)}.</p>" for text in slow_leak_texts(seen.slow))


def ladder(rungs: Sequence[Action], mode: str, incidents: Sequence[IncidentRecord]) -> str:
    """Return the rungs, lightest first, and on which one the replica stands."""
    here = present_rung(incidents)
    items = []
    for rung in (OBSERVE, *(action.value for action in rungs)):
        current = ' aria-current="step"' if rung == here else ""
        items.append(f"<li{current}>{rung}</li>")
    note = (
        ""
        if mode == "Recover"
        else " <p>Mode Observe: it only records what it would have done.</p>"
    )
    return f"<ol class=ladder>{''.join(items)}</ol>{note}"


def present_rung(incidents: Sequence[IncidentRecord]) -> str:
    """Return the heaviest action that an open incident is at; Observe where there is none."""
    order = [OBSERVE, *(action.value for action in Action)]
    at = [one.rung.value if one.rung else PRESENT.get(one.phase, OBSERVE) for one in incidents]
    return max(at, key=order.index, default=OBSERVE)


def incident_list(found: Sequence[IncidentRecord]) -> str:
    """One line an incident, its steps below it."""
    if not found:
        return "<p>No incidents.</p>"
    return "".join(_incident(one) for one in found)


def _incident(one: IncidentRecord) -> str:
    seen = one.attribution
    what = one.kind.value + (f" in {seen.segment}" if seen.segment else "")
    grew = f", {format_bytes(seen.bytes)}" if seen.bytes else ""
    ended = f" ({one.reason.value})" if one.reason else ""
    back = "" if one.returned_bytes is None else f", {format_bytes(one.returned_bytes)} came back"
    steps = [
        f"<tr><td>{clock_time(step.time)}</td><td>{escape(step.step)}</td><td>{step.outcome.value}</td>"
        f"<td class=n>{_size(step.before_bytes)}</td><td class=n>{_size(step.after_bytes)}</td>"
        f"<td>{escape(step.message)}</td></tr>"
        for step in one.timeline
    ]
    head = ("time", "step", "outcome", ">before", ">after", "said")
    evidence = "".join(f"<li>{escape(text)}</li>" for text in seen.evidence)
    return (
        f"<details{'' if one.ended else ' open'}><summary><span class='p p-{one.phase.value}'>"
        f"{one.phase.value}{ended}</span> {clock_time(one.opened_at)} {escape(what)}{grew}{back}"
        f"</summary><p><code>{escape(one.name)}</code></p><ul>{evidence}</ul>"
        f"{_table('Steps', head, steps) if steps else ''}</details>"
    )


def segment_table(seen: Assessment) -> str:
    """Return the newest sizes, for whoever does not see the chart."""
    rows = [
        f"<tr><th scope=row><i class='s-{segment.value}'></i>{segment.value}</th>"
        f"<td class=n>{format_bytes(seen.segments[segment])}</td></tr>"
        for segment in Segment
        if segment in seen.segments
    ]
    return _table("Segments now", ("segment", ">size"), rows) if rows else "<p>No data yet.</p>"


def ledger(entries: Sequence[LedgerEntry]) -> str:
    """Every owner of memory and its bound."""
    if not entries:
        return "<p>The engine has not reported a ledger.</p>"
    rows = [
        f"<tr><th scope=row>{escape(entry.owner)}</th><td>{entry.kind.value}</td>"
        f"<td>{entry.process.value}</td><td class=n>{format_bytes(entry.bytes)}</td>"
        f"<td class=n>{_size(entry.bound)}</td></tr>"
        for entry in entries
    ]
    return _table("Ledger", ("owner", "kind", "process", ">holds", ">at most"), rows)


def _left(state: BudgetState | None) -> str:
    if state is None or state.exhaustion_s is None:
        return "-"
    seconds = state.exhaustion_s
    return f"in {seconds:.0f} s" if seconds < 120 else f"in {seconds / 60:.0f} min"


def _size(value: int | None) -> str:
    return "" if value is None else format_bytes(value)


def _table(caption: str, head: Sequence[str], rows: Iterable[str]) -> str:
    """``>`` before a column's name says that it holds numbers."""
    cells = "".join(
        f"<th scope=col{' class=n' if name.startswith('>') else ''}>{name.lstrip('>')}</th>"
        for name in head
    )
    return (
        f"<table><caption>{caption}</caption><thead><tr>{cells}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
