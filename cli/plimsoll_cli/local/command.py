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
from plimsoll_cli.local.view import LiveView, Screen, SegmentGrowth

UNLIMITED_DURATION_S = 10 * 365 * 86_400.0
"""Ten years."""


def run_locally(file: Path, run_dir: Path | None, duration_s: float | None, view: bool) -> None:
    """Run the service of a manifest until ``duration_s`` has passed or a signal stops it.

    Raises UsageError and RunError.
    """
    model.require_modules("run --local", "torch")
    service = manifest.read_service(file)
    folder = (run_dir or folders.get_service_dir(service.metadata.name)).absolute()
    console = Console()

    def print_line(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    for line in plan.list_ignored_fields(service):
        print_line(f"{file}: {line}")

    async def main() -> None:
        replica_plan = await runner.prepare_plan(service, folder, print_line)
        print_line(f"starting {service.metadata.name}; logs and journal are in {replica_plan.root}")
        async with runner.run_replica(replica_plan, print_line):
            supervisor = replica_plan.supervisor_url
            print_line(
                f"ready: the OpenAI API is at {replica_plan.serving_url}/v1, and metrics are at"
                f" {supervisor}/metrics"
            )
            print_line(f"web page of the supervisor: {supervisor}/")
            poller = Poller(replica_plan)
            coroutines = [poller.run()]
            if view and console.is_terminal:
                coroutines.append(
                    LiveView(console, make_screen_factory(replica_plan, poller)).run()
                )
            try:
                async with stopping.run_in_background(*coroutines):
                    await asyncio.sleep(UNLIMITED_DURATION_S if duration_s is None else duration_s)
            finally:
                print_line("stopping; press Ctrl-C again to kill all processes")

    stopping.run_until_signal(main())


def make_screen_factory(replica_plan: plan.SupervisorPlan, poller: Poller) -> Callable[[], Screen]:
    """Return a function that makes the current content of the live view."""
    growth = SegmentGrowth()

    def make_screen() -> Screen:
        snapshot = poller.snapshot
        grown = growth.update(snapshot.view.assessment) if snapshot.view else {}
        return Screen(replica_plan.config.service.name, replica_plan.config.memory, snapshot, grown)

    return make_screen
