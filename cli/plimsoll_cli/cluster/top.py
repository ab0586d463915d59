"""``plimsoll top``: services and policies by the consumed share of their leak budgets."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from plimsoll_api.fleet_row import FleetRow, row_of, row_of_policy, worst_first
from plimsoll_api.names import POLICY_PLURAL, SERVICE_KIND, SERVICE_PLURAL
from plimsoll_cli.cluster.client import AbsentError, Cluster
from plimsoll_cli.errors import RunError
from plimsoll_cli.output import (
    Cell,
    Output,
    bar,
    console,
    fit_columns,
    plain,
    show,
    sparkline,
    table,
    write,
)

EMPTY_TEXT = "no services and no policies"
PERIOD_S = 2.0
KEPT = 60
BAR = 10
STATES = {
    "Ready": "green", "Supervised": "green", "NoPods": "dim", "Unknown": "dim",
    "RestartBudgetExhausted": "bold red",
}  # fmt: skip
MIN_CHART_WIDTH = 110
"""Terminal width from which bars and sparklines are shown."""
MIN_WIDTH = {"DEVICE%": 50, "INCIDENTS": 56, "PODS": 70, "RESTARTS": 90, "KIND": 140}
"""Terminal width from which each column is shown."""


@dataclass
class History:
    """Consumed budgets of each row, refresh by refresh."""

    values: dict[str, deque[float | None]] = field(default_factory=dict)

    def add(self, rows: Iterable[FleetRow]) -> None:
        """Add a refresh, and drop the rows that no longer exist."""
        fresh = {row.key: row for row in rows}
        self.values = {key: self.values.get(key) or deque(maxlen=KEPT) for key in fresh}
        for key, row in fresh.items():
            self.values[key].append(row.spent)


def run(cluster: Cluster, output: Output, once: bool) -> None:
    """Show the rows: live in a terminal, otherwise once."""
    out = console()
    rows = _read(cluster)
    if not output.for_people:
        write([_object(row) for row in rows], output)
        return
    history = History()
    history.add(rows)
    if once or not out.is_terminal:
        if not rows:
            out.print(EMPTY_TEXT)
            return
        wide, width = output is Output.WIDE, out.width if out.is_terminal else 0
        shown = [cells(row, None, wide, width, plain(out)) for row in rows]
        names = columns(wide, width, trend=False)
        if width and not wide:
            names, shown = fit_columns(names, shown, width, MIN_WIDTH)
        show(names, shown, out)
        return
    with contextlib.suppress(KeyboardInterrupt):
        _show_live(cluster, rows, history, output is Output.WIDE, out)


def _show_live(
    cluster: Cluster, rows: list[FleetRow], history: History, wide: bool, out: Console
) -> None:
    error_text = ""
    with Live(console=out, auto_refresh=False, screen=True) as live:
        while True:
            live.update(frame(rows, history, wide, out, error_text), refresh=True)
            time.sleep(PERIOD_S)
            try:
                rows, error_text = _read(cluster), ""
                history.add(rows)
            except RunError as error:
                error_text = str(error).splitlines()[0]  # the screen keeps the last rows


def frame(
    rows: list[FleetRow], history: History, wide: bool, out: Console, error_text: str = ""
) -> RenderableType:
    """Return a frame of the live view, as wide as the terminal."""
    shown = [cells(row, history, wide, out.width, plain(out)) for row in rows]
    open_ = sum(row.incidents for row in rows)
    services = sum(row.kind == SERVICE_KIND for row in rows)
    counted = f"services {services}, policies {len(rows) - services}, open incidents {open_}"
    text = f"{counted}, {time.strftime('%H:%M:%S')}, Ctrl-C ends this"
    head = Text(text, no_wrap=True, overflow="ellipsis")
    note = Text(error_text, style="bold red")
    if not rows:
        return Group(head, note, Text(EMPTY_TEXT, style="dim"))
    names: list[str] = columns(wide, out.width)
    if not wide:
        names, shown = fit_columns(names, shown, out.width, MIN_WIDTH)
    return Group(head, note, table(names, shown, out.width))


def columns(wide: bool, width: int, trend: bool = True) -> list[str]:
    """Return the columns that fit into ``width``."""
    names = ["NAME", "KIND", "PODS", "HOST%", "DEVICE%", "RESTARTS", "INCIDENTS", "STATE"]
    if width >= MIN_CHART_WIDTH:
        names[3:3] = ["BUDGET", "TREND"] if trend else ["BUDGET"]
    return [*names, "MODE", "ROLES", "WORST", "URL"] if wide else names


def cells(
    row: FleetRow, history: History | None, wide: bool, width: int, ascii_only: bool
) -> list[Cell]:
    """Return the cells of a row. Without ``history`` there is no trend."""
    style = _style(row.spent)
    made: list[Cell] = [row.shown, row.kind, f"{_count(row.ready)}/{_count(row.replicas)}"]
    if width >= MIN_CHART_WIDTH:
        share = None if row.spent is None else row.spent / 100
        made.append(Text(bar(share, BAR, ascii_only), style=style))
        if history is not None:
            trend = sparkline(history.values[row.key], 12, ascii_only, low=0.0, high=100.0)
            made.append(Text(trend, style=style))
    made += [Text(_percent(value), style=_style(value)) for value in (row.host, row.device)]
    incidents = Text(str(row.incidents), style="yellow" if row.incidents else "")
    made += [
        _count(row.restarts),
        incidents,
        Text(row.state, style=STATES.get(row.state, "yellow")),
    ]
    return [*made, row.mode, row.roles, row.worst, row.url] if wide else made


def _read(cluster: Cluster) -> list[FleetRow]:
    rows = [row_of(item) for item in cluster.list_own(SERVICE_PLURAL)]
    with contextlib.suppress(AbsentError):  # older installations have no policies
        rows += [row_of_policy(item) for item in cluster.list_own(POLICY_PLURAL)]
    return worst_first(rows)


def _object(row: FleetRow) -> dict[str, Any]:
    return {key: getattr(row, key) for key in FleetRow.__dataclass_fields__}


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)


def _percent(value: int | None) -> str:
    return "?" if value is None else f"{value}%"


def _style(value: int | None) -> str:
    if value is None:
        return "dim"
    return "red" if value >= 100 else "yellow" if value >= 50 else "green"
