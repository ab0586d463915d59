"""``plimsoll run --local``: one replica on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from plimsoll_cli import manifest, stopping
from plimsoll_cli.local import model, plan, runner
from plimsoll_cli.local import run_dir as folders
from plimsoll_cli.local.status import Poller
from plimsoll_cli.local.view import Growth, LiveView, Screen

FOR_EVER_S = 10 * 365 * 86_400.0


def run(file: Path, run_dir: Path | None, duration_s: float | None, view: bool) -> None:
    """Run the service of a manifest here, until ``duration_s`` or a signal ends it.

    Raises UsageError and RunError.
    """
    model.need("run --local", "torch")
    service = manifest.read(file)
    folder = (run_dir or folders.of(service.metadata.name)).absolute()
    console = Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    for line in plan.notices(service):
        say(f"{file}: {line}")

    async def main() -> None:
        its_plan = await runner.prepare(service, folder, say)
        say(f"starting {service.metadata.name}; logs and journal in {its_plan.root}")
        async with runner.running(its_plan, say):
            say(f"ready: OpenAI API {its_plan.serving_url}/v1, {its_plan.supervisor_url}/metrics")
            say(f"the page: {its_plan.supervisor_url}/")
            poller = Poller(its_plan)
            coroutines = [poller.run()]
            if view and console.is_terminal:
                coroutines.append(LiveView(console, screens(its_plan, poller)).run())
            try:
                async with stopping.background(*coroutines):
                    await asyncio.sleep(FOR_EVER_S if duration_s is None else duration_s)
            finally:
                say("stopping; press Ctrl-C again to kill all processes")

    stopping.run(main())


def screens(its_plan: plan.Watch, poller: Poller) -> Callable[[], Screen]:
    """Return the function that makes what the live view of a replica draws."""
    growth = Growth()

    def screen() -> Screen:
        snapshot = poller.snapshot
        grown = growth.since(snapshot.view.assessment) if snapshot.view else {}
        return Screen(its_plan.config.service.name, its_plan.config.memory, snapshot, grown)

    return screen
