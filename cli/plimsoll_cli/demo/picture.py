"""``memory.png``: memory over time against baseline and budget, and the streams below it."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from plimsoll_cli.demo.evidence import Observed, restarts
from plimsoll_cli.demo.streams import Reply
from plimsoll_sidecar.govern.incident import Incident, StepOutcome

MIB = 1 << 20
SHOWN_GAP_S = 0.5
"""Shorter gaps are the engine's normal steps on a slow machine."""
MARKED = {"Trim": "tab:olive", "WorkerRestart": "tab:red", "EngineRestart": "tab:red"}


def draw(file: Path, title: str, seen: Observed, budget_bytes: int | None) -> None:
    """Writes the picture. Times are seconds since the first request."""
    start = seen.times.traffic_from
    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(11, 7), height_ratios=(3, 1.4), layout="constrained"
    )
    try:
        _memory(top, seen, start, budget_bytes)
        _streams(bottom, seen, start)
        top.set_title(title)
        figure.savefig(file, dpi=110)
    finally:
        pyplot.close(figure)


def _memory(axes: Axes, seen: Observed, start: float, budget_bytes: int | None) -> None:
    times = [point.at - start for point in seen.memory]
    sizes = [point.bytes / MIB for point in seen.memory]
    axes.plot(times, sizes, color="tab:blue", linewidth=1.8, label="memory of the replica")
    baseline = next((i.baseline_bytes for i in seen.incidents if i.baseline_bytes), None)
    if baseline is not None:
        axes.axhline(baseline / MIB, color="tab:green", linestyle="--", label="baseline")
        if budget_bytes is not None:
            line = (baseline + budget_bytes) / MIB
            axes.axhline(line, color="tab:red", linestyle="--", label="baseline + leak budget")
    axes.margins(y=0.18)
    for incident in seen.incidents:
        _steps(axes, incident, start)
    axes.set_ylabel("host memory [MiB]")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", framealpha=0.9)


def _steps(axes: Axes, incident: Incident, start: float) -> None:
    marks = [(incident.opened_at, "incident opened", "tab:orange")]
    marks += [
        (step.time, step.step, MARKED[step.step])
        for step in incident.timeline
        if step.step in MARKED and step.outcome is not StepOutcome.SKIPPED
    ]
    if incident.confirmed_at is not None:
        marks.append((incident.confirmed_at, "confirmed", "tab:purple"))
    if incident.ended_at is not None:
        marks.append((incident.ended_at, incident.phase.value.lower(), "tab:green"))
    for at, name, colour in marks:
        axes.axvline(at - start, color=colour, linewidth=1.2)
        axes.annotate(
            name, (at - start, 1.0), xycoords=("data", "axes fraction"), xytext=(-3, -4),
            textcoords="offset points", rotation=90, ha="right", va="top", fontsize=9, color=colour,
        )  # fmt: skip


def _streams(axes: Axes, seen: Observed, start: float) -> None:
    for number in range(seen.streams):
        mine = [reply for reply in seen.replies if reply.stream == number and reply.chunks]
        spans = [(r.chunks[0] - start, r.chunks[-1] - r.chunks[0]) for r in mine]
        axes.broken_barh(spans, (number - 0.3, 0.6), color="tab:blue", alpha=0.35)
        gaps = [gap for reply in mine for gap in _gaps(reply, start)]
        axes.broken_barh(gaps, (number - 0.3, 0.6), color="tab:red")
    for begin, end in restarts(seen.incidents):
        axes.axvspan(begin - start, end - start, color="tab:red", alpha=0.12)
    axes.set_ylabel("stream")
    axes.set_yticks(range(seen.streams))
    axes.set_ylim(-0.6, seen.streams - 0.4)
    axes.set_xlabel(
        f"seconds since the first request (below: streams; red: gaps above {SHOWN_GAP_S:g} s)"
    )
    axes.grid(axis="x", alpha=0.3)


def _gaps(reply: Reply, start: float) -> list[tuple[float, float]]:
    pairs = zip(reply.chunks, reply.chunks[1:], strict=False)
    return [(a - start, b - a) for a, b in pairs if b - a >= SHOWN_GAP_S]
