"""``plimsoll watch``: supervise an engine on this machine without a manifest."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace
from rich.console import Console

from plimsoll_api import supervisor_config
from plimsoll_api.files import replace_file
from plimsoll_api.incident_story import make_record_story
from plimsoll_api.manifest import POSITIVE_DURATION_FORM
from plimsoll_api.memory_policy import MemoryPolicy, parse_growth_budget
from plimsoll_api.state import SignalReason, View
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.supervisor_config import ServiceRef, SupervisorConfig
from plimsoll_api.units import format_bytes
from plimsoll_cli import stopping
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.local import endpoint, plan, runner
from plimsoll_cli.local import run_dir as folders
from plimsoll_cli.local.command import UNLIMITED_DURATION_S, make_screen_factory
from plimsoll_cli.local.endpoint import SupervisedEngine
from plimsoll_cli.local.runner import PrintLine
from plimsoll_cli.local.status import POLL_PERIOD_S, Poller
from plimsoll_cli.local.view import LiveView
from plimsoll_cli.starter import ManifestFields

T = TypeVar("T")

DEFAULT_HOST_BUDGET, DEFAULT_DEVICE_BUDGET = "2Gi", "1Gi"
"""Default budgets, not ``Auto``, which has no effect on the first day."""
PROCESS_POLL_PERIOD_S = 2.0


@dataclass(frozen=True)
class WatchOptions:
    """Options of ``plimsoll watch``.

    ``command`` starts the engine; if it is empty, ``target`` names a running engine.
    """

    target: str | None
    command: tuple[str, ...]
    port: int | None
    memory: MemoryPolicy
    run_dir: Path | None = None
    duration_s: float | None = None
    view: bool = True


def make_memory_policy(
    host: str | None, device: str | None, window: str | None, warmup: str
) -> MemoryPolicy:
    """Return the memory policy of the options; None means a default. Raises UsageError."""
    sizes = {"host-budget": host or DEFAULT_HOST_BUDGET}
    sizes["device-budget"] = device or DEFAULT_DEVICE_BUDGET
    window_s = _parse_option("window", POSITIVE_DURATION_FORM.read, window or ManifestFields.window)
    made = {
        option: _parse_option(option, lambda given: parse_growth_budget(given, window_s), text)
        for option, text in sizes.items()
    }
    return MemoryPolicy(
        host=made["host-budget"],
        device=made["device-budget"],
        warmup_s=_parse_option("warmup", POSITIVE_DURATION_FORM.read, warmup),
    )


def _parse_option(name: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"--{name} {text}: {error}") from None


def run(options: WatchOptions) -> None:
    """Supervise an engine until the duration has passed, a signal arrives, or its process ends.

    Raises UsageError and RunError.
    """
    found = _find_engine(options)
    root = (options.run_dir or folders.get_service_dir(found.name)).absolute()
    console = Console()

    def print_line(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    config = SupervisorConfig(
        service=ServiceRef(found.name),
        engine=found.endpoint,
        memory=options.memory,
        supervision=Supervision(mode=Mode.RECOVER if options.command else Mode.OBSERVE),
    )
    ports = runner.choose_free_ports([None, None])
    watch_plan = plan.plan_supervisor(
        config, root, ports, os.environ, _resolve_command(options.command)
    )

    async def main() -> None:
        print_line(f"{_describe_engine(found)}; logs and journal are in {root}")
        async with runner.run_replica(watch_plan, print_line):
            print_line(f"web page of the supervisor: {watch_plan.supervisor_url}/")
            if watch_plan.engine is not None:
                print_line(f"log of the engine: {watch_plan.engine.log}")
            poller = Poller(watch_plan)
            live = options.view and console.is_terminal
            shown = (
                LiveView(console, make_screen_factory(watch_plan, poller))
                if live
                else EventPrinter(poller, print_line)
            )
            try:
                async with stopping.run_in_background(poller.run(), shown.run()):
                    await _wait_until_finished(options, watch_plan, poller, print_line)
            finally:
                print_line(
                    f"stopping; to list its incidents, run: plimsoll incidents {found.name} --local"
                )

    stopping.run_until_signal(main())


def _find_engine(options: WatchOptions) -> SupervisedEngine:
    if options.command:
        return endpoint.find_engine_of_command(options.command, options.port)
    if options.target is None:
        raise UsageError(
            "watch: specify a URL, a PID, a container or a systemd unit (NAME.service)"
        )
    return endpoint.find_engine(options.target, options.port)


def _resolve_command(command: Sequence[str]) -> list[str]:
    return [shutil.which(command[0]) or command[0], *command[1:]] if command else []


def _describe_engine(engine: SupervisedEngine) -> str:
    one = engine.endpoint
    pieces = [f"process {one.pid}"] if one.pid else []
    pieces.append(f"engine type {one.type.value}")
    pieces.append(f"API at {one.serving_url}" if one.serves else "its API does not answer")
    return f"watching {engine.name}: {', '.join(pieces)}"


# If the engine is a container or systemd unit, its next process is supervised instead.
async def _wait_until_finished(
    options: WatchOptions, watch_plan: plan.SupervisorPlan, poller: Poller, print_line: PrintLine
) -> None:
    loop, pid = asyncio.get_running_loop(), watch_plan.config.engine.pid
    deadline = loop.time() + (
        UNLIMITED_DURATION_S if options.duration_s is None else options.duration_s
    )
    told = False
    while (left := deadline - loop.time()) > 0:
        await asyncio.sleep(min(PROCESS_POLL_PERIOD_S, left))
        if pid is None or not _is_engine_lost(poller.snapshot.view):
            told = False
            continue
        assert options.target is not None
        if options.target.isdigit():
            print_line(f"process {options.target} has ended")
            return
        if not told:
            print_line(f"{options.target} has ended; waiting until it runs again")
            told = True
        try:
            again = await asyncio.to_thread(endpoint.find_engine, options.target, options.port)
        except (UsageError, RunError):
            continue
        if again.endpoint.pid != pid:
            pid = again.endpoint.pid
            _write_config(watch_plan, replace(watch_plan.config, engine=again.endpoint))
            print_line(f"{options.target} runs again as process {pid}")


# The file is replaced atomically. The supervisor then reloads it.
def _write_config(watch_plan: plan.SupervisorPlan, config: SupervisorConfig) -> None:
    replace_file(Path(watch_plan.layout.config_file), supervisor_config.encode_config(config))


def _is_engine_lost(view: View | None) -> bool:
    engine = view.signals.get("engine") if view is not None else None
    return engine is not None and engine.reason == SignalReason.ENGINE_NOT_FOUND


class EventPrinter:
    """Printer of one line for each event, if the output is not a terminal."""

    def __init__(self, poller: Poller, print_line: PrintLine) -> None:
        self._poller, self._print_line = poller, print_line
        self._sized = self._warm = False
        self._phases: dict[str, str] = {}

    async def run(self) -> None:
        """Print until cancelled."""
        while True:
            if (view := self._poller.snapshot.view) is not None:
                self._print_changes(view)
            await asyncio.sleep(POLL_PERIOD_S)

    def _print_changes(self, view: View) -> None:
        seen = view.assessment
        if seen.segments and not self._sized:
            sizes = ", ".join(f"{s.value} {format_bytes(n)}" for s, n in seen.segments.items())
            self._print_line(f"memory by segment: {sizes}")
            self._sized = True
        if seen.warm and not self._warm:
            self._print_line("the warm-up has ended: growth now counts against the leak budget")
        self._warm = seen.warm
        for incident in [*view.open, *view.recent]:
            story = make_record_story(incident)
            if self._phases.get(incident.name) != story.phase:
                self._phases[incident.name] = story.phase
                self._print_line(f"incident {incident.name} {story.state}: {story.headline}")
