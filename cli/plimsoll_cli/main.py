"""The program ``plimsoll``: commands and their options. Each imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from plimsoll_api.supervision import Mode
from plimsoll_cli import commands, inject_command, options, tools
from plimsoll_cli.errors import RunError, UsageError

app = typer.Typer(
    name="plimsoll",
    help="Memory supervision for inference engines.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class DeviceKind(StrEnum):
    """Where the demo runs its model."""

    CPU = "cpu"
    CUDA = "cuda"


Duration = Annotated[
    float | None,
    typer.Option(
        parser=options.duration, metavar="TIME", help="Stop after this time, for example 10m."
    ),
]
RunDir = options.RunDir


@app.command()
def run(
    file: Annotated[
        Path,
        typer.Option("--file", "-f", metavar="FILE", help="Manifest with the InferenceService."),
    ],
    local: Annotated[
        bool, typer.Option("--local", help="Run on this machine, without a cluster.")
    ] = False,
    run_dir: RunDir = None,
    duration: Duration = None,
    no_view: Annotated[bool, typer.Option("--no-view", help="Do not show the live view.")] = False,
) -> None:
    """Run the engine and the supervisor of a manifest as child processes."""
    if not local:
        raise UsageError(f"run: add --local; to run in a cluster, use: kubectl apply -f {file}")
    from plimsoll_cli.local import command

    command.run(file, run_dir, duration, not no_view)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for the report.")] = Path(
        "demo-report"
    ),
    streams: Annotated[int, typer.Option(min=1, max=256, help="Number of concurrent streams.")] = 8,
    manifest: Annotated[
        Path, typer.Option(metavar="FILE", help="Manifest of the leaky service.")
    ] = Path("examples/leaky.yaml"),
    device: Annotated[
        DeviceKind, typer.Option(help="Device that runs the model.")
    ] = DeviceKind.CPU,
    no_view: Annotated[bool, typer.Option("--no-view", help="Do not show the live view.")] = False,
) -> None:
    """Watch a leak, its incident and its cure on this machine, in about two minutes."""
    from plimsoll_cli.demo import command

    command.run(out, streams, manifest, device.value, not no_view)


@app.command()
def record(
    out: Annotated[Path, typer.Argument(help="Trace to write: NAME.jsonl or NAME.jsonl.gz.")],
    service: Annotated[
        str | None, typer.Argument(help="Name of a service on this machine.")
    ] = None,
    run_dir: RunDir = None,
    duration: Duration = None,
) -> None:
    """Record a trace of a service that runs on this machine."""
    from plimsoll_cli.local import traces

    typer.echo(f"{out}: {traces.record(out, service, run_dir, duration)} samples", err=True)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="Trace to read: .jsonl or .jsonl.gz.")],
    mode: Annotated[
        Mode, typer.Option(help="Mode of the supervisor: whether it may act.")
    ] = Mode.OBSERVE,
) -> None:
    """Feed a trace to the supervisor and print its output as JSON lines."""
    from plimsoll_cli.local import traces

    raise typer.Exit(traces.replay(trace, mode))


commands.register(app)
inject_command.register(app)
tools.register(app)


@app.command()
def version() -> None:
    """Print the version."""
    from plimsoll_api.version import version as installed

    typer.echo(f"plimsoll {installed()}")


def main() -> None:
    """Run the console script. Exit status: 0, 1 for a failure, 2 for what cannot be used."""
    try:
        app()
    except UsageError as error:
        _fail(error, 2)
    except RunError as error:
        _fail(error, 1)
    except BrokenPipeError:
        # The reader of our output has enough, as with `| head`; nothing is left to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _fail(error: Exception, status: int) -> None:
    sys.stderr.write(f"plimsoll: {error}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
