"""``plimsoll demo``: the order of events."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from plimsoll_cli import manifest, stopping
from plimsoll_cli.demo import report, services
from plimsoll_cli.demo.evidence import Observed, figures, missing
from plimsoll_cli.demo.scene import Scene
from plimsoll_cli.demo.streams import references
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.local import model, runner
from plimsoll_cli.local.plan import Plan

DEADLINE_S = 180.0
"""From the start of this program to the end of the traffic."""
LEAKY = "leaky"
TRACE = "trace.jsonl.gz"


def run(out: Path, streams: int, file: Path, device: str, view: bool) -> None:
    """Run the demo and write its report to ``out``.

    Raises RunError, after the report is written, if something is missing from it.
    """
    service = services.on_device(manifest.read(file), device)
    services.check(file, service)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}: give a directory") from None
    console = Console()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    # A directory of its own, short enough for the names of Unix sockets.
    with tempfile.TemporaryDirectory(prefix="plimsoll-demo-", ignore_cleanup_errors=True) as name:
        work = Path(name)

        async def main() -> None:
            deadline = asyncio.get_running_loop().time() + DEADLINE_S
            folder, absent = model.resolve(service, work)
            if absent:
                say("making the tiny checkpoint")
                await model.make_tiny(folder)
            leaky = services.with_model(service, folder)
            say("running the same prompts without the leak, for reference texts")
            clean = await runner.prepare(services.without_fault(leaky), work / "clean", say)
            async with runner.running(clean, say):
                texts = await references(clean.serving_url, leaky.served_name)
            say(f"the leaky service, with {streams} streams")
            plan = await runner.prepare(leaky, work / LEAKY, say)
            scene = Scene(leaky, plan, texts, streams)
            seen = await scene.play(out / TRACE, deadline, console if view else None, say)
            _conclude(out, plan, seen, scene.troubles, say)

        try:
            if not stopping.run(main()):
                raise RunError("the demo was stopped before it ended")
        finally:
            for log in (work / LEAKY).glob("*.log"):
                shutil.copy(log, out)


def _conclude(out: Path, plan: Plan, seen: Observed, troubles: list[str], say: runner.Say) -> None:
    """Write the report and print the story; raise RunError if something is missing."""
    host = plan.config.memory.host
    budget = host.growth_bytes if host else None
    values = figures(replace(seen, budget_bytes=budget))
    lacks = [*troubles, *missing(values)]
    command = ["plimsoll", *sys.argv[1:]]
    try:
        story = report.write(out, seen, values, lacks, plan.config.service.name, budget, command)
    except OSError as error:
        raise RunError(f"{error.filename or out}: the report: {error.strerror}") from None
    say(f"\n{story}\nThe report is in {out}")
    if lacks:
        raise RunError("the demo did not succeed: " + "; ".join(lacks))
