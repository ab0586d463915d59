"""Commands that need no cluster: ``init`` and ``bench``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from plimsoll_cli import options
from plimsoll_cli.errors import UsageError
from plimsoll_cli.output import Output


def init(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the service.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Location of the model, for example pvc://CLAIM/PATH or hf://ORG/NAME."),
    ] = None,
    replicas: Annotated[int | None, typer.Option(min=0, help="Number of replicas.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs per replica. 0 uses the CPU.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Limit for the engine's host memory.")
    ] = None,
    host_budget: options.HostBudget = None,
    device_budget: options.DeviceBudget = None,
    window: options.Window = None,
    mode: Annotated[str | None, typer.Option(help="Mode: Observe or Recover.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Use defaults instead of asking.")
    ] = False,
) -> None:
    """Write an InferenceService; ask for the values that no option sets."""
    import sys

    from plimsoll_cli import starter

    given = {key: value for key, value in locals().items() if key in starter.QUESTIONS}

    def ask(field: str, default: str) -> str:
        if yes and default:
            return default
        if not sys.stdin.isatty():
            missing = "argument NAME" if field == "name" else f"option --{field.replace('_', '-')}"
            raise UsageError(
                f"init: add the {missing}, because plimsoll cannot ask for its value without a"
                " terminal"
            )
        return str(typer.prompt(starter.QUESTIONS[field], default=default or None, err=True))

    typer.echo(starter.format_manifest(starter.ask_missing_fields(given, ask)), nl=False)


def bench(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="URL of an OpenAI API, for example http://HOST:8000."),
    ],
    model: Annotated[str, typer.Option(help="Name of the served model.")],
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of requests.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Concurrent requests.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per request.")] = 128,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="API key.")
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format.")] = Output.TABLE,
) -> None:
    """Measure throughput, time to first token and inter-token latency of an endpoint."""
    import asyncio
    import sys

    from rich.progress import Progress

    from plimsoll_cli import bench as measuring
    from plimsoll_cli.figures import make_result
    from plimsoll_cli.output import make_console, print_table, print_value

    load = measuring.LoadProfile(
        url.rstrip("/").removesuffix("/v1"), model, requests, concurrency, max_tokens, api_key
    )
    out = make_console()
    with Progress(console=out, transient=True, disable=not out.is_terminal) as progress:
        task = progress.add_task("requests", total=requests)
        found, took = asyncio.run(measuring.run_load(load, lambda: progress.advance(task)))
    values = measuring.summarize_timings(found, took)
    if output.is_table:
        rows = [
            (key, f"{value:.4g}" if isinstance(value, float) else str(value))
            for key, value in values.items()
            if value is not None
        ]
        print_table(["FIGURE", "VALUE"], rows, out)
    else:
        # The result must not contain the API key.
        arguments = [one for one in sys.argv[1:] if load.api_key is None or load.api_key not in one]
        whole: dict[str, Any] = make_result("bench", values, ["plimsoll", *arguments])
        print_value(whole, output)
    if any(seen.error for seen in found):
        first = next(seen.error for seen in found if seen.error)
        typer.echo(f"{values['failed_count']} requests failed; the first error: {first}", err=True)
        raise typer.Exit(1)


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    for command in (init, bench):
        app.command()(command)
