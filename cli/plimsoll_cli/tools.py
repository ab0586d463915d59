"""Commands that write or measure and need no cluster: inject, init, bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from plimsoll_cli.errors import UsageError
from plimsoll_cli.output import Output

Budget = Annotated[str, typer.Option(metavar="SIZE", help="Growth allowed within the window.")]


def inject(
    file: Annotated[Path, typer.Argument(help="A manifest, or - for the standard input.")],
    supervisor_image: Annotated[str, typer.Option(help="Image of the supervisor.")],
    mode: Annotated[str, typer.Option(help="Observe or Recover.")] = "Observe",
    host_budget: Budget = "2Gi",
    device_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="As --host-budget. Default: none.")
    ] = None,
    window: Annotated[str, typer.Option(metavar="TIME", help="Of the budgets.")] = "24h",
    warmup: Annotated[str, typer.Option(metavar="TIME", help="After a start.")] = "5m",
    container: Annotated[
        str | None, typer.Option(help="The engine's, where it is not clear.")
    ] = None,
    run_as_user: Annotated[
        int | None, typer.Option(help="The engine's user, where no runAsUser says it.")
    ] = None,
    dcgm_exporter_port: Annotated[
        int | None, typer.Option(help="Of each node's DCGM exporter, for device memory.")
    ] = None,
) -> None:
    """Add a supervisor to a Deployment, Pod or KServe service: YAML in, YAML out."""
    from plimsoll_cli.inject import command
    from plimsoll_cli.inject.sidecar import Wish

    wish = Wish(
        supervisor_image, mode, host_budget, device_budget, window, warmup, container, run_as_user,
        dcgm_exporter_port,
    )  # fmt: skip
    text, notes = command.run(file, wish)
    for note in notes:
        typer.echo(note, err=True)
    typer.echo(text, nl=False)


def init(
    name: Annotated[str | None, typer.Argument(help="Name of the service.")] = None,
    model: Annotated[str | None, typer.Option(help="pvc://CLAIM/PATH or file:///PATH.")] = None,
    replicas: Annotated[int | None, typer.Option(min=0)] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="A replica. 0: on the CPU.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Host limit.")] = None,
    host_budget: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    device_budget: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    window: Annotated[str | None, typer.Option(metavar="TIME")] = None,
    mode: Annotated[str | None, typer.Option(help="Observe or Recover.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Defaults for what is left.")] = False,
) -> None:
    """Write an InferenceService: asks for what no flag says."""
    import sys

    from plimsoll_cli import starter

    given = {key: value for key, value in locals().items() if key in starter.QUESTIONS}

    def ask(question: str, default: str) -> str:
        if yes and default:
            return default
        if not sys.stdin.isatty():
            raise UsageError(f"{question}: give the flag, nobody is there to answer")
        return str(typer.prompt(question, default=default or None, err=True))

    typer.echo(starter.manifest(starter.ask_all(given, ask)), nl=False)


def bench(
    url: Annotated[str, typer.Argument(help="An OpenAI API, for example http://HOST:8000.")],
    model: Annotated[str, typer.Option(help="The served model.")],
    requests: Annotated[int, typer.Option(min=1, max=1_000_000)] = 64,
    concurrency: Annotated[int, typer.Option(min=1, max=4096)] = 8,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True)] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Form.")] = Output.TABLE,
) -> None:
    """Measure an endpoint: throughput, time to first token, inter-token latency."""
    import asyncio
    import sys

    from rich.progress import Progress

    from plimsoll_cli import bench as measuring
    from plimsoll_cli.figures import result
    from plimsoll_cli.output import console, show, write

    load = measuring.Load(
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
        typer.echo(f"{values['failed_count']} requests failed, the first: {first}", err=True)
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Adds these commands to the program."""
    for command in (inject, init, bench):
        app.command()(command)
