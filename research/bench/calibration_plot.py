"""The reliability plot: how often it was a leak, against the confidence that was stated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from bench.calibration import BINS, Claim, Stated, bins, expected_error, last, opened

INK, DOTS, IDEAL = "#4b5563", "#2563eb", "#111827"
NAME = "detection-calibration.png"


def draw(stated: Sequence[Stated], folder: Path) -> None:
    """Write the picture: on the left what was stated at the opening, on the right at last."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, columns = plt.subplots(
        2, 2, figsize=(7, 4.5), dpi=72, sharex=True, sharey="row", height_ratios=(3, 1),
        layout="constrained",
    )  # fmt: skip
    for place, (title, claims) in enumerate(
        (("when the incident opened", opened(stated)), ("at last", last(stated)))
    ):
        _panel(columns[0][place], columns[1][place], title, claims)
    columns[0][0].set_ylabel("share that was a leak", fontsize=8)
    columns[1][0].set_ylabel("suspicions", fontsize=8)
    figure.savefig(folder / NAME, metadata={"Software": None})
    plt.close(figure)


def _panel(top: plt.Axes, below: plt.Axes, title: str, claims: Sequence[Claim]) -> None:
    filled = bins(claims)
    means, shares = [one.mean for one in filled], [one.share for one in filled]
    lows = [one.share - one.interval[0] for one in filled]
    highs = [one.interval[1] - one.share for one in filled]
    top.plot((0, 1), (0, 1), linestyle="--", color=IDEAL, linewidth=0.8)
    top.errorbar(means, shares, yerr=(lows, highs), fmt="o", color=DOTS, markersize=4, capsize=2)
    error = expected_error(claims)
    told = "" if error is None else f", error {error:.3f}"
    top.set_title(f"{title}: {len(claims)} suspicions{told}", fontsize=8, loc="left")
    below.bar(
        [one.low for one in filled], [one.count for one in filled],
        width=1 / BINS, align="edge", color=INK, edgecolor="white",
    )  # fmt: skip
    for one in filled:
        below.annotate(f"{one.count}", (one.low + 0.5 / BINS, one.count), ha="center", fontsize=6)
    below.set_xlabel("confidence that was stated", fontsize=8)
    for axes in (top, below):
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
