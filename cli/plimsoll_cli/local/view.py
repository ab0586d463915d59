"""Render the status of one replica as a live terminal view, without I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from plimsoll_api.assessment import (
    HOST_SEGMENTS,
    Assessment,
    BudgetState,
    Segment,
    format_slow_leaks,
    format_suspicions,
)
from plimsoll_api.incident_story import make_record_story
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.state import View
from plimsoll_api.units import format_bytes, format_span
from plimsoll_cli.incident_view import format_incident
from plimsoll_cli.local.status import Snapshot

REDRAW_PERIOD_S = 0.4
MEDIUM_WIDTH_COLUMNS, WIDE_WIDTH_COLUMNS = 72, 90
"""Minimum terminal widths at which the view shows more columns, and all columns."""
MAX_SHOWN_INCIDENTS = 3
SEGMENT_NAME_CHARS = max(len(segment.value) for segment in Segment)


@dataclass(frozen=True)
class TrafficTotals:
    """Totals of the demo's clients; ``longest_gap_s`` is the longest time between two chunks."""

    streams: int
    answered: int = 0
    broken: int = 0
    failed: int = 0
    different: int = 0
    longest_gap_s: float | None = None


@dataclass(frozen=True)
class Screen:
    """Content of the view at one time.

    ``growth`` is that of each segment in bytes; empty during the warm-up.
    """

    service: str
    memory: MemoryPolicy
    snapshot: Snapshot = field(default_factory=Snapshot)
    growth: dict[Segment, int] = field(default_factory=dict)
    traffic: TrafficTotals | None = None
    note: str = ""


def render_screen(screen: Screen, width: int, ascii_only: bool = False) -> RenderableType:
    """Return ``screen`` drawn in ``width`` columns; if ``ascii_only``, only ASCII is used."""
    view = screen.snapshot.view
    parts: list[RenderableType] = [_render_header(screen, ascii_only)]
    if view is None:
        parts.append(Text("waiting for the first answer of the supervisor", style="dim"))
    else:
        parts.append(_render_budgets(screen.memory, view.assessment, width, ascii_only))
        parts.extend(_render_slow_leaks(view.assessment))
        parts.append(_render_segments(screen, view.assessment, width, ascii_only))
        parts.extend(
            Text(f"suspected: {text}", style="yellow")
            for text in format_suspicions(view.assessment.suspicions)
        )
        parts.extend(_render_load(screen, view))
    if screen.traffic is not None:
        parts.append(_render_traffic(screen.traffic))
    if view is not None:
        parts.extend(_render_messages(view.journal_error, view.config_error))
        for incident in [*view.open, *(i for i in view.recent if i.ended)][:MAX_SHOWN_INCIDENTS]:
            parts.append(Text())
            parts.extend(format_incident(make_record_story(incident), width, ascii_only))
        if not view.open and not view.recent:
            parts.append(Text("no incidents", style="dim"))
    return Group(*parts)


def _render_header(screen: Screen, ascii_only: bool) -> Text:
    view, status = screen.snapshot.view, screen.snapshot.status
    known = status.state.value if status else view.engine_state if view else "?"
    state = known or "not answering"
    epoch = status.epoch if status else (view.epoch if view else None)
    pieces = [
        Text(screen.service, style="bold"),
        Text(state, style="green" if state == "serving" else "yellow"),
        Text(f"epoch {epoch or '?'}"),
        Text(f"mode {view.mode if view else '?'}"),
    ]
    if view is not None:
        left = f"restarts left {view.restarts_left}"
        pieces.append(Text(left, style="red" if view.restart_budget_exhausted else ""))
    if view is not None and view.out_of_service:
        out = f"out of service: {', '.join(sorted(view.out_of_service))}"
        pieces.append(Text(out, style="yellow"))
    unseen = [one.reason for one in view.signals.values() if not one.ok] if view else []
    if unseen:
        pieces.append(Text(f"not observed: {', '.join(unseen)}", style="yellow"))
    if status is not None and status.injections:
        pieces.append(Text(f"injected faults: {', '.join(status.injections)}", style="magenta"))
    if screen.note:
        pieces.append(Text(screen.note, style="cyan"))
    return Text(" | " if ascii_only else " · ").join(pieces)


def _render_budgets(
    memory: MemoryPolicy, assessment: Assessment, width: int, ascii_only: bool
) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, expand=False)
    table.add_column(
        "leak budget",
        no_wrap=True,
        min_width=SEGMENT_NAME_CHARS if width >= WIDE_WIDTH_COLUMNS else None,
    )
    table.add_column("", no_wrap=True)
    table.add_column("used", justify="right", no_wrap=True)
    table.add_column("unexplained / budget", justify="right", no_wrap=True)
    if width >= WIDE_WIDTH_COLUMNS:
        table.add_column("growth", justify="right", no_wrap=True)
    if width >= MEDIUM_WIDTH_COLUMNS:
        table.add_column("spent", justify="right", no_wrap=True)
    for name, budget, state in (
        ("host", memory.host, assessment.host), ("device", memory.device, assessment.device)
    ):  # fmt: skip
        if budget is not None:
            row = _render_budget(
                name, budget, state or BudgetState(), assessment.warm, width, ascii_only
            )
            table.add_row(*row)
    return table


def _render_budget(
    name: str, budget: MemoryBudget, state: BudgetState, warm: bool, width: int, ascii_only: bool
) -> list[RenderableType]:
    share = state.consumed_ratio
    unknown = "unknown" if warm else "warming up"
    used = unknown if state.unexplained is None else format_bytes(state.unexplained)
    row: list[RenderableType] = [
        name,
        _render_bar(share, _compute_bar_width(width), ascii_only),
        Text("?" if share is None else f"{share:.0%}", style=_choose_colour(share)),
        f"{used} / {format_bytes(budget.growth_bytes)}",
    ]
    if width >= WIDE_WIDTH_COLUMNS:
        row.append("?" if state.unexplained is None else _format_rate(state.bytes_per_s))
    if width >= MEDIUM_WIDTH_COLUMNS:
        row.append("?" if state.unexplained is None else _format_time(state.exhaustion_s))
    return row


def _render_slow_leaks(assessment: Assessment) -> list[Text]:
    return [
        Text(f"slow leak: {text}", style="yellow") for text in format_slow_leaks(assessment.slow)
    ]


def _render_segments(screen: Screen, assessment: Assessment, width: int, ascii_only: bool) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, expand=False)
    table.add_column(
        "segment",
        no_wrap=True,
        min_width=SEGMENT_NAME_CHARS if width >= WIDE_WIDTH_COLUMNS else None,
    )
    table.add_column("of the budget", no_wrap=True)
    table.add_column("grown", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for segment in Segment:
        size = assessment.segments.get(segment)
        if size is None:
            continue
        kind = screen.memory.host if segment in HOST_SEGMENTS else screen.memory.device
        grown = screen.growth.get(segment)
        share = None if grown is None or kind is None else max(grown, 0) / kind.growth_bytes
        table.add_row(
            segment.value,
            _render_bar(share, _compute_bar_width(width), ascii_only),
            "?" if grown is None else format_bytes(grown),
            format_bytes(size),
        )
    return table


def _render_load(screen: Screen, view: View) -> list[Text]:
    status, rate = screen.snapshot.status, screen.snapshot.tokens_per_s
    if status is None:
        if view.engine_state is not None:
            return []
        return [Text("load: the engine does not answer", style="yellow")]
    load = status.load
    numbers = [
        f"{name} {'?' if value is None else value}"
        for name, value in (
            ("running", load.running), ("waiting", load.waiting), ("in flight", load.inflight)
        )
    ]  # fmt: skip
    tokens = "?" if rate is None else f"{rate:.0f}"
    return [Text(f"load: {', '.join(numbers)}, {tokens} tokens/s")]


def _render_traffic(traffic: TrafficTotals) -> Text:
    bad = traffic.broken or traffic.failed or traffic.different
    gap = "?" if traffic.longest_gap_s is None else f"{traffic.longest_gap_s:.2f} s"
    return Text(
        (
            f"{traffic.streams} concurrent streams: {traffic.answered} answered, {traffic.broken}"
            f" broken, {traffic.failed} failed, {traffic.different} with different text, longest"
            f" pause {gap}"
        ),
        style="bold red" if bad else "",
    )


def _render_messages(*messages: str | None) -> list[Text]:
    return [Text(message, style="bold red") for message in messages if message]


def _render_bar(share: float | None, width: int, ascii_only: bool) -> Text:
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    filled = round(min(max(share or 0.0, 0.0), 1.0) * width)
    return Text(full * filled, style=_choose_colour(share)) + Text(
        empty * (width - filled), style="dim"
    )


def _compute_bar_width(width: int) -> int:
    return 10 if width < WIDE_WIDTH_COLUMNS else min(40, width - 74)


def _choose_colour(share: float | None) -> str:
    if share is None:
        return "dim"
    return "red" if share >= 1 else "yellow" if share >= 0.5 else "green"


def _format_rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"


def _format_time(seconds: float | None) -> str:
    return "-" if seconds is None else f"in {format_span(seconds)}"


class SegmentGrowth:
    """Growth of each segment since the end of the epoch's warm-up."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._first: dict[Segment, int] = {}

    def update(self, assessment: Assessment) -> dict[Segment, int]:
        """Return the growth of each segment until ``assessment`` in bytes; empty in the warm-up."""
        if not assessment.warm:
            return {}
        if assessment.epoch != self._epoch:
            self._epoch, self._first = assessment.epoch, dict(assessment.segments)
        for segment, size in assessment.segments.items():
            self._first.setdefault(segment, size)
        return {
            segment: size - self._first[segment] for segment, size in assessment.segments.items()
        }


class LiveView:
    """Terminal view that redraws the screen several times per second."""

    def __init__(self, console: Console, make_screen: Callable[[], Screen]) -> None:
        self._console, self._make_screen = console, make_screen

    async def run(self) -> None:
        """Draw until cancelled; the last frame stays on the terminal."""
        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            while True:
                live.update(self._render_frame(), refresh=True)
                await asyncio.sleep(REDRAW_PERIOD_S)

    def _render_frame(self) -> RenderableType:
        ascii_only = not self._console.encoding.lower().startswith("utf")
        return render_screen(self._make_screen(), self._console.width, ascii_only)
