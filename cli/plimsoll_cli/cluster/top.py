"""``plimsoll top``: list services and policies, worst first."""

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

from plimsoll_api.fleet_row import (
    FleetRow,
    make_policy_row,
    make_service_row,
    sort_rows_worst_first,
)
from plimsoll_api.names import POLICY_PLURAL, SERVICE_KIND, SERVICE_PLURAL
from plimsoll_cli.cluster.client import Cluster, NotFoundError
from plimsoll_cli.errors import RunError
from plimsoll_cli.output import (
    Cell,
    Output,
    draw_bar,
    draw_sparkline,
    fit_columns,
    is_ascii_only,
    make_console,
    make_table,
    print_table,
    print_value,
)

NO_ROWS_TEXT = "no InferenceServices or SupervisionPolicies found; to search all namespaces, add -A"
REFRESH_PERIOD_S = 2.0
MAX_HISTORY_VALUES = 60
BAR_WIDTH_COLUMNS = 10
STATE_STYLES = {
    "Ready": "green", "Supervised": "green", "NoPods": "dim", "Unknown": "dim",
    "RestartBudgetExhausted": "bold red",
}  # fmt: skip
MIN_CHART_WIDTH = 110
MIN_TERMINAL_WIDTHS = {"DEVICE%": 50, "INCIDENTS": 56, "PODS": 70, "RESTARTS": 90, "KIND": 140}
"""Minimum terminal width that shows each column."""


@dataclass
class BudgetHistory:
    """Percentages of the leak budget that each row had consumed at the most recent refreshes."""

    values: dict[str, deque[float | None]] = field(default_factory=dict)

    def add(self, rows: Iterable[FleetRow]) -> None:
        """Add the values of a refresh, and drop the history of rows that no longer exist."""
        fresh = {row.key: row for row in rows}
        self.values = {
            key: self.values.get(key) or deque(maxlen=MAX_HISTORY_VALUES) for key in fresh
        }
        for key, row in fresh.items():
            self.values[key].append(row.consumed_percent)


def show_rows(cluster: Cluster, output: Output, once: bool) -> None:
    """Show services and policies; in a terminal, refresh them until Ctrl-C, unless ``once``."""
    out = make_console()
    rows = _read_rows(cluster)
    if not output.is_table:
        print_value([_make_row_object(row) for row in rows], output)
        return
    history = BudgetHistory()
    history.add(rows)
    if once or not out.is_terminal:
        if not rows:
            out.print(NO_ROWS_TEXT)
            return
        wide, width = output is Output.WIDE, out.width if out.is_terminal else 0
        shown = [make_cells(row, None, wide, width, is_ascii_only(out)) for row in rows]
        names = choose_columns(wide, width, trend=False)
        if width and not wide:
            names, shown = fit_columns(names, shown, width, MIN_TERMINAL_WIDTHS)
        print_table(names, shown, out)
        return
    with contextlib.suppress(KeyboardInterrupt):
        _show_live(cluster, rows, history, output is Output.WIDE, out)


def _show_live(
    cluster: Cluster, rows: list[FleetRow], history: BudgetHistory, wide: bool, console: Console
) -> None:
    error_text = ""
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(render_frame(rows, history, wide, console, error_text), refresh=True)
            time.sleep(REFRESH_PERIOD_S)
            try:
                rows, error_text = _read_rows(cluster), ""
                history.add(rows)
            except RunError as error:
                error_text = str(error).splitlines()[0]  # keep the last rows on the screen


def render_frame(
    rows: list[FleetRow], history: BudgetHistory, wide: bool, console: Console, error_text: str = ""
) -> RenderableType:
    """Return one frame of the live view, as wide as the terminal."""
    shown = [make_cells(row, history, wide, console.width, is_ascii_only(console)) for row in rows]
    open_ = sum(row.incidents for row in rows)
    services = sum(row.kind == SERVICE_KIND for row in rows)
    counted = f"services {services}, policies {len(rows) - services}, open incidents {open_}"
    text = f"{counted}, {time.strftime('%H:%M:%S')}, press Ctrl-C to stop"
    head = Text(text, no_wrap=True, overflow="ellipsis")
    note = Text(error_text, style="bold red")
    if not rows:
        return Group(head, note, Text(NO_ROWS_TEXT, style="dim"))
    names: list[str] = choose_columns(wide, console.width)
    if not wide:
        names, shown = fit_columns(names, shown, console.width, MIN_TERMINAL_WIDTHS)
    return Group(head, note, make_table(names, shown, console.width))


def choose_columns(wide: bool, width: int, trend: bool = True) -> list[str]:
    """Return the column names for ``--output wide`` or a terminal of ``width`` characters."""
    names = ["NAME", "KIND", "PODS", "HOST%", "DEVICE%", "RESTARTS", "INCIDENTS", "STATE"]
    if width >= MIN_CHART_WIDTH:
        names[3:3] = ["BUDGET", "TREND"] if trend else ["BUDGET"]
    return [*names, "MODE", "ROLES", "WORST", "URL"] if wide else names


def make_cells(
    row: FleetRow, history: BudgetHistory | None, wide: bool, width: int, ascii_only: bool
) -> list[Cell]:
    """Return the cells of a row, in the order of :func:`choose_columns`.

    Without ``history``, there is no cell for the trend.
    """
    style = _choose_style(row.consumed_percent)
    made: list[Cell] = [
        row.display_name,
        row.kind,
        f"{_format_count(row.ready)}/{_format_count(row.replicas)}",
    ]
    if width >= MIN_CHART_WIDTH:
        share = None if row.consumed_percent is None else row.consumed_percent / 100
        made.append(Text(draw_bar(share, BAR_WIDTH_COLUMNS, ascii_only), style=style))
        if history is not None:
            trend = draw_sparkline(history.values[row.key], 12, ascii_only, low=0.0, high=100.0)
            made.append(Text(trend, style=style))
    made += [
        Text(_format_percent(value), style=_choose_style(value)) for value in (row.host, row.device)
    ]
    incidents = Text(str(row.incidents), style="yellow" if row.incidents else "")
    made += [
        _format_count(row.restarts),
        incidents,
        Text(row.state, style=STATE_STYLES.get(row.state, "yellow")),
    ]
    return [*made, row.mode, row.roles, row.worst, row.url] if wide else made


def _read_rows(cluster: Cluster) -> list[FleetRow]:
    rows = [make_service_row(item) for item in cluster.list_custom_objects(SERVICE_PLURAL)]
    with contextlib.suppress(NotFoundError):  # older installations have no SupervisionPolicy
        rows += [make_policy_row(item) for item in cluster.list_custom_objects(POLICY_PLURAL)]
    return sort_rows_worst_first(rows)


def _make_row_object(row: FleetRow) -> dict[str, Any]:
    return {key: getattr(row, key) for key in FleetRow.__dataclass_fields__}


def _format_count(value: int | None) -> str:
    return "?" if value is None else str(value)


def _format_percent(value: int | None) -> str:
    return "?" if value is None else f"{value}%"


def _choose_style(value: int | None) -> str:
    if value is None:
        return "dim"
    return "red" if value >= 100 else "yellow" if value >= 50 else "green"
