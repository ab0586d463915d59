"""Draw ``memory.png``: memory, leak budget, leak probability and streams over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from plimsoll_api.incident_record import IncidentRecord, StepOutcome
from plimsoll_cli.demo.evidence import Observations, find_overlapping_gaps, find_restarts
from plimsoll_cli.demo.streams import Reply

MIB = 1 << 20
MIN_DRAWN_GAP_S = 0.5
"""Minimum length of a gap that is drawn; shorter gaps are normal on a slow machine."""
WORKER_OVERLAP_S = 1.5
"""Time after a restart for which a sample may include the memory of both workers."""
TEXT_COLOUR, PAUSE_COLOUR, GAP_COLOUR = "#b5cde3", "tab:red", "#f0b56a"
LEGEND_POSITION: dict[str, Any] = {"bbox_to_anchor": (1.01, 1), "loc": "upper left"}
STEP_COLOURS = {"Trim": "tab:olive", "WorkerRestart": "tab:red", "EngineRestart": "tab:red"}


def draw_chart(file: Path, title: str, observed: Observations, budget_bytes: int | None) -> None:
    """Draw the chart, and save it to ``file``; its time axis starts at the first request."""
    start = observed.times.traffic_from
    figure, (top, middle, bottom) = pyplot.subplots(
        3, 1, sharex=True, figsize=(13, 8), height_ratios=(3, 1, 1.4), layout="constrained"
    )
    try:
        _draw_memory(top, observed, start, budget_bytes)
        _draw_probability(middle, observed, start)
        _draw_streams(bottom, observed, start)
        top.set_title(title)
        figure.savefig(file, dpi=110)
    finally:
        pyplot.close(figure)


def _draw_memory(
    axes: Axes, observed: Observations, start: float, budget_bytes: int | None
) -> None:
    times = [point.at - start for point in observed.memory]
    sizes = [point.bytes / MIB for point in observed.memory]
    axes.plot(times, sizes, color="tab:blue", linewidth=1.8, label="memory of the replica")
    baseline = next((i.baseline_bytes for i in observed.incidents if i.baseline_bytes), None)
    if baseline is not None:
        axes.axhline(
            baseline / MIB,
            color="tab:green",
            linestyle="--",
            label="baseline (after warm-up and new load)",
        )
        if budget_bytes is not None:
            line = (baseline + budget_bytes) / MIB
            axes.axhline(line, color="tab:red", linestyle="--", label="baseline + leak budget")
    # During a restart, pages that both workers share count twice: a short peak.
    windows = find_restarts(observed.incidents)
    steady = [
        point.bytes / MIB
        for point in observed.memory
        if not any(begin <= point.at <= end + WORKER_OVERLAP_S for begin, end in windows)
    ]
    # Leave room for the names of the steps above the curve.
    low, high = min(steady, default=0.0), max(steady, default=1.0)
    room = max(high - low, 1.0)
    top = high + 0.45 * room
    axes.set_ylim(low - 0.12 * room, top)
    if sizes and max(sizes) > top:
        label = f"up to {max(sizes):,.0f} MiB for about a second:\nold and new worker together"
        axes.plot([], [], color="tab:blue", linewidth=1.8, linestyle=":", label=label)
    for incident in observed.incidents:
        _draw_steps(axes, incident, start)
    axes.set_ylabel("host memory [MiB]")
    axes.grid(alpha=0.3)
    axes.legend(**LEGEND_POSITION)


def _draw_probability(axes: Axes, observed: Observations, start: float) -> None:
    times, chances = (
        [one.at - start for one in observed.probabilities],
        [one.probability for one in observed.probabilities],
    )
    axes.step(times, chances, where="post", color="tab:purple", label="leak probability")
    for incident in observed.incidents:
        if incident.confirmed_at is not None:
            axes.axvline(incident.confirmed_at - start, color="tab:purple", linewidth=1.2)
    axes.set_ylim(-0.05, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3)
    axes.legend(**LEGEND_POSITION)


def _draw_steps(axes: Axes, incident: IncidentRecord, start: float) -> None:
    marks = [(incident.opened_at, "incident opened", "tab:orange")]
    marks += [
        (step.time, step.step, STEP_COLOURS[step.step])
        for step in incident.timeline
        if step.step in STEP_COLOURS and step.outcome is not StepOutcome.SKIPPED
    ]
    if incident.confirmed_at is not None:
        marks.append((incident.confirmed_at, "confirmed", "tab:purple"))
    if incident.ended_at is not None:
        marks.append((incident.ended_at, incident.phase.value.lower(), "tab:green"))
    for at, name, colour in marks:
        axes.axvline(at - start, color=colour, linewidth=1.2)
        axes.annotate(
            name, (at - start, 1.0), xycoords=("data", "axes fraction"), xytext=(-3, -4),
            textcoords="offset points", rotation=90, ha="right", va="top", color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )  # fmt: skip


def _draw_streams(axes: Axes, observed: Observations, start: float) -> None:
    windows = find_restarts(observed.incidents)
    for number in range(observed.streams):
        mine = [reply for reply in observed.replies if reply.stream == number and reply.chunks]
        row = (number - 0.3, 0.6)
        axes.broken_barh(
            _make_bar_spans([(r.chunks[0], r.chunks[-1]) for r in mine], start),
            row,
            color=TEXT_COLOUR,
        )
        axes.broken_barh(
            _make_bar_spans([gap for r in mine for gap in _find_gaps(r)], start),
            row,
            color=GAP_COLOUR,
        )
        met = [
            gaps for r in mine for window in windows if (gaps := find_overlapping_gaps(r, window))
        ]
        longest = [max(gaps, key=lambda gap: gap[1] - gap[0]) for gaps in met]
        axes.broken_barh(_make_bar_spans(longest, start), row, color=PAUSE_COLOUR)
    for begin, end in windows:
        axes.axvspan(begin - start, end - start, color=PAUSE_COLOUR, alpha=0.12)
    axes.set_ylabel("stream")
    axes.set_yticks(range(observed.streams))
    axes.set_ylim(-0.6, observed.streams - 0.4)
    axes.set_xlabel("seconds since the first request")
    axes.grid(axis="x", alpha=0.3)
    named = (
        (TEXT_COLOUR, "text streams"),
        (PAUSE_COLOUR, "pause at the restart"),
        (GAP_COLOUR, "other gap of 0.5 s or more"),
    )
    handles = [Patch(color=colour, label=name) for colour, name in named]
    axes.legend(handles=handles, **LEGEND_POSITION)


def _make_bar_spans(times: list[tuple[float, float]], start: float) -> list[tuple[float, float]]:
    return [(begin - start, end - begin) for begin, end in times]


def _find_gaps(reply: Reply) -> list[tuple[float, float]]:
    pairs = zip(reply.chunks, reply.chunks[1:], strict=False)
    return [(a, b) for a, b in pairs if b - a >= MIN_DRAWN_GAP_S]
