"""Two sheets of small pictures, one run a family: the series, its budget, and who acted when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.detection_run import Run
from leaklab.cases import WARMUP_S, Case

MIB = 1 << 20
INK, OURS, THEIRS, BUDGET = "#4b5563", "#dc2626", "#2563eb", "#111827"
THEIR_RULE = "page_hinkley"
"""Of the other rules, the one that is drawn: the only one that finds about as many leaks as ours.
A tick below the series for each time that it would have acted."""
COLUMNS = 6
POINTS = 600
"""Of a series that are drawn: more than its picture has pixels."""


@dataclass
class Panel:
    """One run, the times in seconds of what we confirmed, and those at which the rule acted."""

    case: Case
    confirmed: list[float]
    acted: list[float]


def draw(cases: list[Case], results: list[Any], choice: dict[str, int], folder: Path) -> None:
    """Write ``detection-healthy.png`` and ``detection-leaks.png``.

    Of a family in which a healthy run was confirmed, that run is drawn; of others the first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    panels: dict[str, Panel] = {}
    for case, (told, others) in zip(cases, results, strict=True):
        if case.kind == "Stall" or case.trigger is not None:
            continue
        wrong = case.starts is None and bool(told.times)
        if case.family in panels and (not wrong or panels[case.family].confirmed):
            continue
        acted = [when for n, c, _, when in others if (n, c) == (THEIR_RULE, choice[THEIR_RULE])]
        panels[case.family] = Panel(case, told.times, acted[0] if acted else [])
    for name, leaking in (("healthy", False), ("leaks", True)):
        shown = [panel for panel in panels.values() if (panel.case.starts is not None) is leaking]
        _sheet(sorted(shown, key=lambda panel: panel.case.family), folder / f"detection-{name}.png")


def _sheet(panels: list[Panel], path: Path) -> None:
    rows = -(-len(panels) // COLUMNS)
    figure, grid = plt.subplots(
        rows, COLUMNS, figsize=(COLUMNS * 2.2, rows * 1.5), dpi=84, layout="constrained"
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw(axes, panel)
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def _draw(axes: Axes, panel: Panel) -> None:
    case, run = panel.case, Run(panel.case)
    every = max(1, len(run.t) // POINTS)
    begins = case.starts if case.starts is not None else min(WARMUP_S, run.t[-1] / 2)
    held = run.sizes[run.t <= begins].min()
    axes.plot(run.t[::every] / 3600, (run.sizes[::every] - held) / MIB, color=INK, linewidth=0.6)
    axes.axhline(case.budget / MIB, color=BUDGET, linestyle="--", linewidth=0.7)
    if case.starts is not None:
        axes.axvline(case.starts / 3600, color=BUDGET, linestyle=":", linewidth=0.8)
    for at in panel.confirmed:
        axes.axvline(at / 3600, color=OURS, linewidth=1.2)
    axes.plot(
        [t / 3600 for t in panel.acted], [0.03] * len(panel.acted), "|",
        color=THEIRS, markersize=5, transform=axes.get_xaxis_transform(),
    )  # fmt: skip
    axes.set_title(case.family.removeprefix("leak "), fontsize=7, loc="left", pad=2)
    axes.tick_params(labelsize=6, length=2, pad=1)
    axes.spines[["top", "right"]].set_visible(False)
