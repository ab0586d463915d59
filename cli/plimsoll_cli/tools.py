"""Commands that write or measure and need no cluster: inject, init, bench."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from plimsoll_cli.errors import UsageError
from plimsoll_cli.output import Output

if TYPE_CHECKING:
    from plimsoll_api.supervision import Mode

T = TypeVar("T")
Budget = Annotated[str, typer.Option(metavar="SIZE", help="Growth budget for host memory.")]
Port = Annotated[
    int | None,
    typer.Option(
        min=1, max=65_535, metavar="PORT", help="Port of the DCGM exporter on every node."
    ),
]


def inject(
    file: Annotated[Path, typer.Argument(help="Manifest to read, or - for standard input.")],
    supervisor_image: Annotated[str, typer.Option(help="Container image of the supervisor.")],
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Change only objects with this name. Repeatable."),
    ] = None,
    selector: Annotated[
        str | None,
        typer.Option(
            "--selector", "-l", metavar="LABELS", help="Change only objects with these labels."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also supervise what is neither vLLM nor SGLang.")
    ] = False,
    mode: Annotated[str, typer.Option(metavar="MODE", help="Observe or Recover.")] = "Observe",
    host_budget: Budget = "2Gi",
    device_budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Growth budget for device memory. Default: none."),
    ] = None,
    window: Annotated[
        str, typer.Option(metavar="TIME", help="Period that the budgets apply to.")
    ] = "24h",
    warmup: Annotated[
        str, typer.Option(metavar="TIME", help="Time to ignore growth after an engine start.")
    ] = "5m",
    container: Annotated[
        str | None, typer.Option(help="Container of the engine, if ambiguous.")
    ] = None,
    run_as_user: Annotated[
        int | None,
        typer.Option(min=0, metavar="UID", help="User ID of the engine, if runAsUser is not set."),
    ] = None,
    dcgm_exporter_port: Port = None,
    amd_exporter_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_535,
            metavar="PORT",
            help="Port of AMD's device-metrics-exporter on every node.",
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Load the probe into the engine's Python processes.")
    ] = False,
    allow_group_restarts: Annotated[
        bool,
        typer.Option(
            "--allow-group-restarts",
            help="Supervise a LeaderWorkerSet whose group restarts with any of its containers.",
        ),
    ] = False,
) -> None:
    """Add a supervisor to the workloads in a manifest: YAML in, YAML out."""
    from plimsoll_api.manifest import DURATION, POSITIVE_BYTES, POSITIVE_DURATION
    from plimsoll_cli.inject import command, selection
    from plimsoll_operator.injection.sidecar import Options

    options = Options(
        image=supervisor_image,
        mode=_value("--mode", _mode, mode),
        host_budget_bytes=_value("--host-budget", POSITIVE_BYTES.read, host_budget),
        device_budget_bytes=(
            None
            if device_budget is None
            else _value("--device-budget", POSITIVE_BYTES.read, device_budget)
        ),
        window_s=_value("--window", POSITIVE_DURATION.read, window),
        warmup_s=_value("--warmup", DURATION.read, warmup),
        container=container,
        run_as_user=run_as_user,
        dcgm_exporter_port=dcgm_exporter_port,
        amd_exporter_port=amd_exporter_port,
        probe=probe,
        unrecognized=everything,
        group_restarts=allow_group_restarts,
    )
    wanted = selection.Selection(
        frozenset(name or ()), selection.parse(selector) if selector is not None else ()
    )
    text, notes = command.run(file, options, wanted)
    for note in notes:
        typer.echo(note, err=True)
    typer.echo(text, nl=False)


def _mode(text: str) -> Mode:
    from plimsoll_api.supervision import Mode

    if text not in list(Mode):
        raise ValueError(f"{text!r} is not a mode: use {' or '.join(Mode)}")
    return Mode(text)


def _value(flag: str, read: Callable[[Any], T], text: str) -> T:
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def init(
    name: Annotated[str | None, typer.Argument(help="Name of the service.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model: pvc://CLAIM/PATH or file:///PATH.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(min=0, help="Number of replicas.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs per replica. 0 uses the CPU.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Limit for host memory.")
    ] = None,
    host_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Growth budget for host memory.")
    ] = None,
    device_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Growth budget for device memory.")
    ] = None,
    window: Annotated[
        str | None, typer.Option(metavar="TIME", help="Period that the budgets apply to.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="Mode: Observe or Recover.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Use defaults instead of asking.")
    ] = False,
) -> None:
    """Write an InferenceService. Asks for values that no flag gives."""
    import sys

    from plimsoll_cli import starter

    given = {key: value for key, value in locals().items() if key in starter.QUESTIONS}

    def ask(question: str, default: str) -> str:
        if yes and default:
            return default
        if not sys.stdin.isatty():
            raise UsageError(f"{question}: pass the flag, because standard input is not a terminal")
        return str(typer.prompt(question, default=default or None, err=True))

    typer.echo(starter.manifest(starter.ask_all(given, ask)), nl=False)


def bench(
    url: Annotated[str, typer.Argument(help="URL of an OpenAI API, for example http://HOST:8000.")],
    model: Annotated[str, typer.Option(help="Name of the served model.")],
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of requests.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Concurrent requests.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per request.")] = 128,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="API key.")
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format.")] = Output.TABLE,
) -> None:
    """Measure an endpoint: throughput, time to first token, inter-token latency."""
    import asyncio
    import sys

    from rich.progress import Progress

    from plimsoll_cli import bench as measuring
    from plimsoll_cli.figures import result
    from plimsoll_cli.output import console, show, write

    load = measuring.LoadProfile(
        url.rstrip("/").removesuffix("/v1"), model, requests, concurrency, max_tokens, api_key
    )
    out = console()
    with Progress(console=out, transient=True, disable=not out.is_terminal) as progress:
        task = progress.add_task("requests", total=requests)
        found, took = asyncio.run(measuring.run(load, lambda: progress.advance(task)))
    values = measuring.figures(found, took)
    if output.for_people:
        rows = [
            (key, f"{value:.4g}" if isinstance(value, float) else str(value))
            for key, value in values.items()
            if value is not None
        ]
        show(["FIGURE", "VALUE"], rows, out)
    else:
        # A key on a command line is nobody else's business.
        arguments = [one for one in sys.argv[1:] if load.api_key is None or load.api_key not in one]
        whole: dict[str, Any] = result("bench", values, ["plimsoll", *arguments])
        write(whole, output)
    if any(seen.error for seen in found):
        first = next(seen.error for seen in found if seen.error)
        typer.echo(f"{values['failed_count']} requests failed. First error: {first}", err=True)
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Adds these commands to the program."""
    for command in (inject, init, bench):
        app.command()(command)
