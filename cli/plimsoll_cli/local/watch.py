"""``plimsoll watch``: a supervisor beside an engine of this machine, without a manifest."""

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
from plimsoll_api.incident_story import story_of_record
from plimsoll_api.manifest import POSITIVE_DURATION
from plimsoll_api.memory_policy import MemoryPolicy, budget_of
from plimsoll_api.state import SignalReason, View
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.supervisor_config import ServiceRef, SupervisorConfig
from plimsoll_api.units import format_bytes
from plimsoll_cli import stopping
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.local import endpoint, plan, runner
from plimsoll_cli.local import run_dir as folders
from plimsoll_cli.local.command import FOR_EVER_S, screens
from plimsoll_cli.local.endpoint import Found
from plimsoll_cli.local.runner import Say
from plimsoll_cli.local.status import PERIOD_S, Poller
from plimsoll_cli.local.view import LiveView
from plimsoll_cli.starter import Answers

T = TypeVar("T")

HOST_BUDGET, DEVICE_BUDGET = "2Gi", "1Gi"
"""Default budgets: a budget that sets itself would only report for its first day."""
LOOK_S = 2.0
"""Between two looks for the process of a container or unit that was started again."""


@dataclass(frozen=True)
class Wish:
    """What a person asked for. Sizes are bytes, times seconds."""

    target: str | None
    command: tuple[str, ...]
    port: int | None
    memory: MemoryPolicy
    run_dir: Path | None = None
    duration_s: float | None = None
    view: bool = True


def budgets(host: str | None, device: str | None, window: str | None, warmup: str) -> MemoryPolicy:
    """Return the policy of these options; None stands for the default of an option.

    Raises UsageError, which names the option.
    """
    sizes = {"host-budget": host or HOST_BUDGET}
    sizes["device-budget"] = device or DEVICE_BUDGET
    window_s = _option("window", POSITIVE_DURATION.read, window or Answers.window)
    made = {
        option: _option(option, lambda given: budget_of(given, window_s), text)
        for option, text in sizes.items()
    }
    return MemoryPolicy(
        host=made["host-budget"],
        device=made["device-budget"],
        warmup_s=_option("warmup", POSITIVE_DURATION.read, warmup),
    )


def _option(name: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"--{name} {text}: {error}") from None


def run(wish: Wish) -> None:
    """Watch until ``duration_s``, a signal, or the end of the process that was named.

    Raises UsageError and RunError.
    """
    found = _found(wish)
    root = (wish.run_dir or folders.of(found.name)).absolute()
    console = Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    config = SupervisorConfig(
        service=ServiceRef(found.name),
        engine=found.endpoint,
        memory=wish.memory,
        supervision=Supervision(mode=Mode.RECOVER if wish.command else Mode.OBSERVE),
    )
    ports = runner.free_ports([None, None])
    its_plan = plan.beside(config, root, ports, os.environ, _argv(wish.command))

    async def main() -> None:
        say(f"{_what(found)}; logs and journal in {root}")
        async with runner.running(its_plan, say):
            say(f"the page: {its_plan.supervisor_url}/")
            if its_plan.engine is not None:
                say(f"the output of the engine: {its_plan.engine.log}")
            poller = Poller(its_plan)
            live = wish.view and console.is_terminal
            shown = LiveView(console, screens(its_plan, poller)) if live else Lines(poller, say)
            try:
                async with stopping.background(poller.run(), shown.run()):
                    await _until_end(wish, its_plan, poller, say)
            finally:
                say(f"stopping; its incidents: plimsoll incidents {found.name} --local")

    stopping.run(main())


def _found(wish: Wish) -> Found:
    if wish.command:
        return endpoint.command_endpoint(wish.command, wish.port)
    if wish.target is None:
        raise UsageError("watch: name a URL, a PID, a container or a systemd unit (NAME.service)")
    return endpoint.find(wish.target, wish.port)


def _argv(command: Sequence[str]) -> list[str]:
    return [shutil.which(command[0]) or command[0], *command[1:]] if command else []


def _what(found: Found) -> str:
    one = found.endpoint
    pieces = [f"process {one.pid}"] if one.pid else []
    pieces.append(f"engine type {one.type.value}")
    pieces.append(f"API at {one.serving_url}" if one.serves else "no API that answers")
    return f"watching {found.name}: {', '.join(pieces)}"


async def _until_end(wish: Wish, its_plan: plan.Watch, poller: Poller, say: Say) -> None:
    """Wait for the end, and follow a container or a unit to its next process."""
    loop, pid = asyncio.get_running_loop(), its_plan.config.engine.pid
    deadline = loop.time() + (FOR_EVER_S if wish.duration_s is None else wish.duration_s)
    told = False
    while (left := deadline - loop.time()) > 0:
        await asyncio.sleep(min(LOOK_S, left))
        if pid is None or not _lost(poller.snapshot.view):
            told = False
            continue
        assert wish.target is not None
        if wish.target.isdigit():
            say(f"process {wish.target} has ended")
            return
        if not told:
            say(f"{wish.target} has ended; waiting for its next start")
            told = True
        try:
            again = await asyncio.to_thread(endpoint.find, wish.target, wish.port)
        except (UsageError, RunError):
            continue
        if again.endpoint.pid != pid:
            pid = again.endpoint.pid
            _write(its_plan, replace(its_plan.config, engine=again.endpoint))
            say(f"{wish.target} runs again, as process {pid}")


def _write(its_plan: plan.Watch, config: SupervisorConfig) -> None:
    """Replace the configuration as a whole; the supervisor reads it again by itself."""
    file = Path(its_plan.places.config_file)
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_bytes(supervisor_config.encode(config))
    fresh.replace(file)


def _lost(view: View | None) -> bool:
    engine = view.signals.get("engine") if view is not None else None
    return engine is not None and engine.reason == SignalReason.ENGINE_NOT_FOUND


class Lines:
    """Prints a line for each news where there is no terminal to draw on."""

    def __init__(self, poller: Poller, say: Say) -> None:
        self._poller, self._say = poller, say
        self._sized = self._warm = False
        self._phases: dict[str, str] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            if (view := self._poller.snapshot.view) is not None:
                self._tell(view)
            await asyncio.sleep(PERIOD_S)

    def _tell(self, view: View) -> None:
        seen = view.assessment
        if seen.segments and not self._sized:
            sizes = ", ".join(f"{s.value} {format_bytes(n)}" for s, n in seen.segments.items())
            self._say(f"memory by segment: {sizes}")
            self._sized = True
        if seen.warm and not self._warm:
            self._say("warm: from now on growth counts against the leak budget")
        self._warm = seen.warm
        for incident in [*view.open, *view.recent]:
            story = story_of_record(incident)
            if self._phases.get(incident.name) != story.phase:
                self._phases[incident.name] = story.phase
                self._say(f"incident {incident.name} {story.state}: {story.headline}")
