"""Panels of a dashboard as one picture, drawn from what Prometheus answers to their queries."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import Locator, MaxNLocator

from docs.tools.scene import ROOT, SCRAPE_S, Scene
from plimsoll_api.units import format_bytes

COLUMNS = 2
TICKS = 7
LEVELS = re.compile("^(budget|baseline)")


def draw(board: str, titles: Sequence[str], seen: Scene, file: Path) -> None:
    """Writes the panels of ``dashboards/BOARD.json`` that are named, in that order.

    LookupError for a panel that is not there or that shows nothing.
    """
    listed = json.loads((ROOT / "dashboards" / f"{board}.json").read_text())["panels"]
    panels = {panel["title"]: panel for panel in listed}
    rows = -(-len(titles) // COLUMNS)
    figure, axes = pyplot.subplots(
        rows, COLUMNS, figsize=(15, 3.6 * rows), layout="constrained", squeeze=False
    )
    try:
        for place, title in zip(axes.flat, titles, strict=False):
            _panel(place, panels[title], seen)
        for place in list(axes.flat)[len(titles) :]:
            place.axis("off")
        figure.savefig(file, dpi=90)
    finally:
        pyplot.close(figure)


def filled(expression: str) -> str:
    """A query with the dashboard's variables as they are for this one service."""
    text = expression.replace("$__rate_interval", "15s").replace("$__range", "5m")
    return re.sub(r"\$(namespace|service|pod)\b", ".*", text)


def _panel(axes: Axes, panel: dict[str, Any], seen: Scene) -> None:
    end = seen.ended - seen.began
    drawn: list[tuple[str, list[float], list[float]]] = []
    for target in panel["targets"]:
        for one in seen.prometheus.query_range(filled(target["expr"]), seen.began, seen.ended):
            times, values = _points(one["values"], seen.began)
            drawn.append((_legend(target.get("legendFormat", ""), one["metric"]), times, values))
    # Counters are there from 0 on: what never happened says nothing in a picture.
    drawn = [one for one in drawn if any(value > 0 for value in one[2])] or drawn
    if not drawn:
        raise LookupError(f"panel {panel['title']!r} shows nothing")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    stacked = "stacking" in panel["fieldConfig"]["defaults"].get("custom", {})
    parts = [one for one in drawn if stacked and not LEVELS.match(one[0])]
    if parts:
        grid = sorted({at for _, times, _ in parts for at in times})
        rows = [[dict(zip(times, values, strict=True)).get(at, math.nan) for at in grid]
                for _, times, values in parts]  # fmt: skip
        axes.stackplot(grid, rows, labels=[name for name, _, _ in parts], alpha=0.75)
    for name, times, values in drawn:
        if LEVELS.match(name):
            colour = "tab:red" if name == "budget" else "tab:green"
            axes.plot(times, values, "--", color=colour, label=name, linewidth=2)
        elif not stacked:
            axes.plot(times, values, label=name, linewidth=1.6)
            if "budget" in {other for other, _, _ in drawn}:
                axes.fill_between(times, values, alpha=0.2)
    axes.set_title(panel["title"], fontsize=11, loc="left", fontweight="bold")
    axes.set_xlabel("seconds", fontsize=8)
    if unit == "bytes":
        axes.yaxis.set_major_locator(_Binary())
        axes.yaxis.set_major_formatter(lambda value, _: format_bytes(value))
    elif unit == "percentunit":
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    elif unit == "short":
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, end)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="lower right" if parts else "best", framealpha=0.7)
    axes.tick_params(labelsize=8)


def _points(found: list[list[Any]], began: float) -> tuple[list[float], list[float]]:
    """Seconds and values; where a scrape has none the line is broken: unknown is not drawn."""
    times: list[float] = []
    values: list[float] = []
    for at, value in found:
        after = float(at) - began
        if times and after - times[-1] > 1.5 * SCRAPE_S:
            times.append(times[-1] + SCRAPE_S)
            values.append(math.nan)
        times.append(after)
        values.append(float(value))
    return times, values


class _Binary(Locator):
    """Ticks at round numbers of binary units, where round decimal ones read as 954 MiB."""

    def __call__(self) -> list[float]:
        low, high = self.axis.get_view_interval()  # type: ignore[union-attr]
        step = 2.0 ** math.ceil(math.log2(max(high - low, 1.0) / TICKS))
        return [step * index for index in range(math.ceil(low / step), int(high / step) + 1)]


def _legend(form: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), form).strip()
