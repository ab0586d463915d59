"""``plimsoll tune``: show a service's normal growth, and recommend a leak budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from plimsoll_api.manifest import SIZE_FORM
from plimsoll_api.memory_contract import format_quantity
from plimsoll_api.units import DAY_S, format_bytes, format_duration, format_span
from plimsoll_cli import yaml_text
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.local import traces
from plimsoll_cli.output import Output, make_console, print_table, print_value

if TYPE_CHECKING:
    from plimsoll_cli.local.traces import DayGrowth, Tuning

MIB = 1 << 20


def print_tuning(source: str, run_dir: Path | None, limit: str | None, output: Output) -> None:
    """Print the observed growth, the recommended budget and its effect on past days.

    ``limit`` is the memory limit of a series. Raises UsageError and RunError.
    """
    try:
        size = SIZE_FORM.read(limit) if limit is not None else None
    except ValueError as error:
        raise UsageError(f"--limit {limit}: {error}") from None
    found = traces.compute_tunings(source, run_dir, size)
    if not found:
        raise RunError(
            f"{source} contains no growth data yet: try again after the engine's warm-up"
        )
    if not output.is_table:
        print_value(msgspec.to_builtins(found), output)
        return
    out = make_console()
    for tuning in found:
        for line in format_summary(tuning):
            out.print(line, soft_wrap=True)
        rows = [
            (
                day.date,
                format_span(day.observed_s),
                format_bytes(day.gain),
                describe_budget_effect(day),
            )
            for day in tuning.days
        ]
        print_table(["DAY", "OBSERVED", "GAIN", "EFFECT OF THE RECOMMENDATION"], rows, out)
    if made := make_manifest(found):
        out.print(yaml_text.dump(made), end="")


def format_summary(tuning: Tuning) -> list[str]:
    """Return lines about the observed growth and the recommendation."""
    limit = "unknown" if tuning.limit is None else format_bytes(tuning.limit)
    lines = [
        (
            f"{tuning.memory} memory was observed for {format_span(tuning.observed_s)}; its limit"
            f" is {limit}"
        )
    ]
    if tuning.starts:
        lines.append(f"after a start, a replica uses up to {format_bytes(max(tuning.starts))}")
    if tuning.level:
        gains = ", ".join(f"{format_bytes(size)} in {span}" for span, size in tuning.level.items())
        lines.append(f"a healthy replica gains {gains}")
    if tuning.recommendation is not None:
        lines.append(tuning.recommendation)
    return [*lines, *_format_recommended_budget(tuning)]


def _format_recommended_budget(tuning: Tuning) -> Iterator[str]:
    if tuning.in_force is not None:
        yield f"the current learned budget is {format_bytes(tuning.in_force)}"
    if tuning.proposal is None:
        reason = (
            "every observed hour is within a day of an incident"
            if tuning.observed_s or any(day.incident for day in tuning.days)
            else "growth counts only between samples that are at most three minutes apart"
        )
        yield f"there is no recommendation, because {reason}"
        return
    if tuning.observed_s < DAY_S:
        yield (
            f"{format_span(tuning.observed_s)} is less than a day: observe a day of normal traffic"
            " before you set these values"
        )
    window = format_duration(tuning.window_s)
    yield f"the recommended budget is {format_bytes(tuning.proposal)} within {window}"
    if (
        tuning.limit is not None
        and tuning.starts
        and tuning.proposal > tuning.limit - max(tuning.starts)
    ):
        yield (
            "the recommended budget exceeds the memory that remains below the limit after a start:"
            " raise the limit"
        )


def describe_budget_effect(day: DayGrowth) -> str:
    """Return the effect that the recommended budget would have had on a past day."""
    if day.incident:
        return "none: an incident was open, so nothing was learned from this day"
    if day.spends:
        return (
            "budget exhausted: opens an incident, and restarts the engine only if memory would"
            " soon reach the limit"
        )
    return "nothing"


def make_manifest(tunings: list[Tuning]) -> dict[str, object]:
    """Return the recommended budgets in the form of a manifest, in whole MiB."""
    budgets = {
        tuning.memory: {
            "growthBudget": f"{-(-tuning.proposal // MIB)}Mi",
            "window": format_duration(tuning.window_s),
        }
        for tuning in tunings
        if tuning.proposal is not None
    }
    made: dict[str, object] = {}
    host = next((tuning for tuning in tunings if tuning.memory == "host"), None)
    if host is not None and host.request is not None and host.memory_limit is not None:
        made["engine"] = {
            "resources": {
                "requests": {"memory": format_quantity(host.request)},
                "limits": {"memory": format_quantity(host.memory_limit)},
            }
        }
    return made | ({"memory": budgets} if budgets else {})
