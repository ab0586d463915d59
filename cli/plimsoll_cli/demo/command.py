"""``plimsoll demo``: run a service without and with a leak, and write a report."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.supervision import Action, Mode
from plimsoll_cli import manifest, stopping
from plimsoll_cli.demo import story
from plimsoll_cli.demo.evidence import Observations, compute_results, find_failures
from plimsoll_cli.demo.scene import DemoRun
from plimsoll_cli.demo.streams import collect_reference_texts
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.local import model, runner
from plimsoll_cli.local.plan import Plan

TRAFFIC_DEADLINE_S = 300.0
"""Latest end of the traffic, in seconds since the start of the program."""
INJECT_ENV = "PLIMSOLL_INJECT"
LEAKY_RUN_FOLDER = "leaky"
TRACE_FILE = "trace.jsonl.gz"


DEMO_MANIFEST = Path(__file__).with_name("leaky.yaml")


def run_demo(out: Path, streams: int, file: Path | None, device: str, view: bool) -> None:
    """Run the demo and write its report to the directory ``out``.

    Raises RunError if the demo failed; the report is still written.
    """
    model.require_modules("demo", "torch", "plimsoll_faults", "matplotlib")
    file = file or DEMO_MANIFEST
    service = set_device(manifest.read_service(file), device)
    check_manifest(file, service)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}: choose a writable directory") from None
    console = Console()

    def print_line(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    # A short path, because the path of a Unix socket has a maximum length.
    with tempfile.TemporaryDirectory(prefix="plimsoll-demo-", ignore_cleanup_errors=True) as name:
        work = Path(name)

        async def main() -> None:
            deadline = asyncio.get_running_loop().time() + TRAFFIC_DEADLINE_S
            folder, absent = model.locate_checkpoint(service, work)
            if absent:
                print_line("generating the tiny checkpoint")
                await model.generate_tiny_checkpoint(folder)
            leaky = set_model(service, folder)
            print_line("running the same prompts without the leak, for reference texts")
            clean = await runner.prepare_plan(remove_fault(leaky), work / "clean", print_line)
            async with runner.run_replica(clean, print_line):
                texts = await collect_reference_texts(clean.serving_url, leaky.served_name)
            print_line(f"running the leaky service with {streams} streams")
            plan = await runner.prepare_plan(leaky, work / LEAKY_RUN_FOLDER, print_line)
            scene = DemoRun(leaky, plan, texts, streams)
            seen = await scene.run(
                out / TRACE_FILE, deadline, console if view else None, print_line
            )
            _write_report(out, plan, seen, scene.problems, print_line)

        try:
            if not stopping.run_until_signal(main()):
                raise RunError("the demo was interrupted before it finished")
        finally:
            for log in (work / LEAKY_RUN_FOLDER).glob("*.log"):
                shutil.copy(log, out)


def _write_report(
    out: Path,
    plan: Plan,
    observations: Observations,
    problems: list[str],
    print_line: runner.PrintLine,
) -> None:
    host = plan.config.memory.host
    budget = host.growth_bytes if host else None
    values = compute_results(replace(observations, budget_bytes=budget))
    problems = [*problems, *find_failures(values)]
    command = ["plimsoll", *sys.argv[1:]]
    try:
        text = story.write_report(
            out, observations, values, problems, plan.config.service.name, budget, command
        )
    except OSError as error:
        raise RunError(
            f"{error.filename or out}: cannot write the report: {error.strerror}"
        ) from None
    print_line(f"\n{text}\nThe report is in {out}")
    if problems:
        raise RunError("the demo failed: " + "; ".join(problems))


def check_manifest(file: Path, service: InferenceService) -> None:
    """Raise UsageError if ``service`` lacks settings that the demo needs."""
    spec = service.spec
    if not any(variable.name == INJECT_ENV for variable in spec.engine.env):
        raise UsageError(
            f"{file}: spec.engine.env: add {INJECT_ENV}, because the engine does not leak without"
            " it"
        )
    if spec.memory.host is None and spec.memory.device is None:
        raise UsageError(f"{file}: spec.memory: set a growthBudget for host or device memory")
    if spec.supervision.mode is not Mode.RECOVER:
        raise UsageError(
            f"{file}: spec.supervision.mode: set Recover, because the demo shows a restart"
        )
    if Action.WORKER_RESTART not in spec.supervision.ladder:
        raise UsageError(
            f"{file}: spec.supervision.ladder: add WorkerRestart, because the demo shows a restart"
        )


def set_device(service: InferenceService, device: str) -> InferenceService:
    """Return a copy of ``service`` that runs on ``cpu`` or ``cuda``.

    It uses float32, so that texts can be compared between runs.
    """
    args = [*service.spec.engine.args, f"--device={device}", "--dtype=float32"]
    return _update_engine(service, {"args": args})


def set_model(service: InferenceService, folder: Path) -> InferenceService:
    """Return a copy of ``service`` that uses the checkpoint in ``folder``."""
    model = service.spec.model.model_copy(update={"uri": f"file://{folder}"})
    return service.model_copy(update={"spec": service.spec.model_copy(update={"model": model})})


def remove_fault(service: InferenceService) -> InferenceService:
    """Return a copy of ``service`` without the injected fault."""
    env = [variable for variable in service.spec.engine.env if variable.name != INJECT_ENV]
    return _update_engine(service, {"env": env})


def _update_engine(service: InferenceService, update: dict[str, object]) -> InferenceService:
    engine = service.spec.engine.model_copy(update=update)
    return service.model_copy(update={"spec": service.spec.model_copy(update={"engine": engine})})
