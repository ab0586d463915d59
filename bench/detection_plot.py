"""One picture a family of the leak lab: the series, its budget, and who would have acted when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from bench.detection_run import Run
from leaklab.cases import Case

MIB = 1 << 20
INK, OURS, THEIRS, BUDGET = "#4b5563", "#dc2626", "#2563eb", "#111827"
SHOWN = ("slope_10mb_h", "mann_kendall", "page_hinkley", "adwin", "lbr", "usage_buckets")
"""Rules that are drawn; a tick on a line of its own for each time that one would have acted."""


def draw(cases: list[Case], results: list[Any], choice: dict[str, int], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    done: set[str] = set()
    for case, (told, others) in zip(cases, results, strict=True):
        if case.family in done or case.kind == "Stall" or case.trigger is not None:
            continue
        done.add(case.family)
        acted = {n: when for n, c, _, when in others if choice[n] == c and n in SHOWN}
        path = folder / f"detection-{case.family.replace(' ', '-').replace('_', '-')}.png"
        _picture(case, told.times, acted, path)


def _picture(case: Case, times: list[float], acted: dict[str, list[float]], path: Path) -> None:
    run = Run(case)
    every = max(1, len(run.t) // 1500)
    hours, sizes = run.t[::every] / 3600, (run.sizes[::every] - run.sizes[0]) / MIB
    figure, (top, below) = plt.subplots(
        2, 1, figsize=(6, 3), dpi=72, sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    top.plot(hours, sizes, color=INK, linewidth=0.7)
    if case.starts is not None:
        held = run.sizes[run.t < case.starts].mean() - run.sizes[0]
        top.axhline((held + case.budget) / MIB, color=BUDGET, linestyle="--", linewidth=0.8)
        top.axvline(case.starts / 3600, color=BUDGET, linestyle=":", linewidth=0.8)
    for at in times:
        top.axvline(at / 3600, color=OURS, linewidth=1.5)
    top.set_title(f"{case.family}: {case.name}", fontsize=8, loc="left")
    top.set_ylabel("MiB since start", fontsize=7)
    names = list(acted)
    for row, name in enumerate(names):
        below.plot([t / 3600 for t in acted[name]], [row] * len(acted[name]), "|", color=THEIRS)
    below.set_yticks(range(len(names)), names, fontsize=6)
    below.set_ylim(len(names) - 0.5, -0.5)
    below.set_xlabel("hours", fontsize=7)
    for axes in (top, below):
        axes.tick_params(axis="x", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    top.tick_params(axis="y", labelsize=7)
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
