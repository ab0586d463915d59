"""The program ``plimsoll``: commands and their flags. Each imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from plimsoll_cli import commands, options, tools
from plimsoll_cli.errors import RunError, UsageError

app = typer.Typer(
    name="plimsoll",
    help="Memory supervision for inference engines.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class Mode(StrEnum):
    OBSERVE = "Observe"
    RECOVER = "Recover"


Duration = Annotated[
    float | None,
    typer.Option(parser=options.duration, metavar="TIME", help="Stop after, for example, 10m."),
]
RunDir = options.RunDir


@app.command()
def run(
    file: Annotated[
        Path, typer.Option("--file", "-f", metavar="FILE", help="The InferenceService.")
    ],
    local: Annotated[
        bool, typer.Option("--local", help="Run it on this machine, without a cluster.")
    ] = False,
    run_dir: RunDir = None,
    duration: Duration = None,
    no_view: Annotated[bool, typer.Option("--no-view", help="No live view.")] = False,
) -> None:
    """Run the service of a manifest: engine and supervisor as child processes."""
    if not local:
        raise UsageError(f"run: give --local; in a cluster it is: kubectl apply -f {file}")
    from plimsoll_cli.local import command

    command.run(file, run_dir, duration, not no_view)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the report goes.")] = Path(
        "demo-report"
    ),
    streams: Annotated[
        int, typer.Option(min=1, max=256, help="Clients that stream at the same time.")
    ] = 8,
    manifest: Annotated[Path, typer.Option(metavar="FILE", help="The leaky service.")] = Path(
        "examples/leaky.yaml"
    ),
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.CPU,
    no_view: Annotated[bool, typer.Option("--no-view", help="No live view.")] = False,
) -> None:
    """Watch a leak, its incident and its cure on this machine, in three minutes."""
    from plimsoll_cli.demo import command

    command.run(out, streams, manifest, device.value, not no_view)


@app.command()
def record(
    out: Annotated[Path, typer.Argument(help="The trace: NAME.jsonl or NAME.jsonl.gz.")],
    service: Annotated[str | None, typer.Argument(help="Name of a service that runs here.")] = None,
    run_dir: RunDir = None,
    duration: Duration = None,
) -> None:
    """Record a trace of a service that runs on this machine."""
    from plimsoll_cli import record as recording

    typer.echo(f"{out}: {recording.run(out, service, run_dir, duration)} samples", err=True)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A recording, .jsonl or .jsonl.gz.")],
    mode: Annotated[
        Mode, typer.Option(help="What the supervisor would have been allowed to do.")
    ] = Mode.OBSERVE,
) -> None:
    """Feed a trace to the supervisor and print what it would have said, as JSON lines."""
    from plimsoll_sidecar import replay as replaying

    raise typer.Exit(replaying.main([str(trace), f"--mode={mode.value}"]))


commands.register(app)
tools.register(app)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as of

    typer.echo(f"plimsoll {of('plimsoll')}")


def main() -> None:
    """The console script. Exit status: 0, 1 for what failed, 2 for what cannot be used."""
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
