"""``plimsoll tune``: how much a healthy service gains, and the leak budget that follows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from plimsoll_api.manifest import POSITIVE_BYTES
from plimsoll_api.memory_contract import quantity_text
from plimsoll_api.units import format_bytes, format_duration, format_span
from plimsoll_cli import yaml_text
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.local import traces
from plimsoll_cli.output import Output, console, show, write

if TYPE_CHECKING:
    from plimsoll_cli.local.traces import Day, Tuning

MIB = 1 << 20


def run(source: str, run_dir: Path | None, limit: str | None, output: Output) -> None:
    """Print levels, proposals and past days. Raises UsageError and RunError."""
    try:
        size = POSITIVE_BYTES.read(limit) if limit is not None else None
    except ValueError as error:
        raise UsageError(f"--limit {limit}: {error}") from None
    found = traces.tunings(source, run_dir, size)
    if not found:
        raise RunError(f"{source}: nothing was learned yet: the engine must have been warm once")
    if not output.for_people:
        write(msgspec.to_builtins(found), output)
        return
    out = console()
    for one in found:
        for line in summary(one):
            out.print(line, soft_wrap=True)
        rows = [
            (day.date, format_span(day.observed_s), format_bytes(day.gain), effect(day))
            for day in one.days
        ]
        show(["DAY", "OBSERVED", "GAIN", "UNDER THE PROPOSAL"], rows, out)
    if made := manifest(found):
        out.print(yaml_text.dump(made), end="")


def summary(one: Tuning) -> list[str]:
    """Return what was learned of a memory, and the proposal, a line each."""
    limit = "unknown" if one.limit is None else format_bytes(one.limit)
    said = [f"{one.memory} memory: observed for {format_span(one.observed_s)}, limit {limit}"]
    if one.starts:
        said.append(f"after a start it needs up to {format_bytes(max(one.starts))}")
    if one.level:
        gains = ", ".join(f"{format_bytes(size)} in {span}" for span, size in one.level.items())
        said.append(f"a healthy replica gains {gains}")
    if one.recommendation is not None:
        said.append(one.recommendation)
    return [*said, *_proposed(one)]


def _proposed(one: Tuning) -> Iterator[str]:
    if one.in_force is not None:
        yield f"the budget learned so far is {format_bytes(one.in_force)}"
    if one.proposal is None:
        yield "every hour is within a day of an incident, so there is no proposal"
        return
    yield f"the proposal is {format_bytes(one.proposal)} within {format_duration(one.window_s)}"
    if one.limit is not None and one.starts and one.proposal > one.limit - max(one.starts):
        yield "that is more than the room below the limit: raise the limit first"


def effect(day: Day) -> str:
    """Return what a day would have caused under the proposal."""
    if day.incident:
        return "an incident was open: the day teaches nothing"
    if day.spends:
        return "budget spent: a notice; a restart if a leak reaches the limit soon"
    return "nothing"


def manifest(found: list[Tuning]) -> dict[str, object]:
    """Return the proposals as parts of a manifest's ``spec``, rounded up to MiB."""
    budgets = {
        one.memory: {
            "growthBudget": f"{-(-one.proposal // MIB)}Mi",
            "window": format_duration(one.window_s),
        }
        for one in found
        if one.proposal is not None
    }
    made: dict[str, object] = {}
    host = next((one for one in found if one.memory == "host"), None)
    if host is not None and host.request is not None and host.memory_limit is not None:
        made["engine"] = {
            "resources": {
                "requests": {"memory": quantity_text(host.request)},
                "limits": {"memory": quantity_text(host.memory_limit)},
            }
        }
    return made | ({"memory": budgets} if budgets else {})
