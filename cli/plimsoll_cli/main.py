"""The program ``plimsoll`` with its commands and options.

Each command imports its modules only when it runs, so that the program starts quickly.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from plimsoll_api.supervision import Mode
from plimsoll_cli import commands, inject_command, options, tools
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.output import Output, escape_control_characters

app = typer.Typer(
    name="plimsoll",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class DeviceKind(StrEnum):
    """Device that runs the demo's model."""

    CPU = "cpu"
    CUDA = "cuda"


Duration = Annotated[
    float | None,
    typer.Option(
        parser=options.parse_duration_option,
        metavar="TIME",
        help="Stop after this time, for example 10m.",
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
        raise UsageError(
            "run: add --local to run on this machine; to run in a cluster, use: kubectl apply -f"
            f" {file}"
        )
    from plimsoll_cli.local import command

    command.run_locally(file, run_dir, duration, not no_view)


@app.command()
def watch(
    target_or_command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL|PID|CONTAINER",
            help=(
                "Engine on this machine: its URL, PID, container, or systemd unit (NAME.service)."
                " With --recover, write -- and the command that starts the engine."
            ),
            show_default=False,
        ),
    ] = None,
    recover: Annotated[
        bool, typer.Option("--recover", help="Start the engine, and restart it if it leaks.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port of the engine's API, if the engine has several ports."
        ),
    ] = None,
    host_budget: options.HostBudget = None,
    device_budget: options.DeviceBudget = None,
    window: options.Window = None,
    warmup: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Time after the start during which growth does not count against the budgets.",
        ),
    ] = "30s",
    run_dir: RunDir = None,
    duration: Duration = None,
    no_view: Annotated[bool, typer.Option("--no-view", help="Do not show the live view.")] = False,
) -> None:
    """Supervise an engine on this machine, without a manifest or a cluster."""
    from plimsoll_cli.local import watch as watching

    arguments = target_or_command or []
    if recover and not arguments:
        raise UsageError(
            "watch: --recover needs the command that starts the engine: write --recover -- COMMAND"
        )
    if not recover and len(arguments) != 1:
        raise UsageError(
            "watch: specify one URL, PID, container or systemd unit; to start an engine, write"
            " --recover -- COMMAND"
        )
    memory = watching.make_memory_policy(host_budget, device_budget, window, warmup)
    command = tuple(arguments) if recover else ()
    target = None if recover else arguments[0]
    watching.run(
        watching.WatchOptions(target, command, port, memory, run_dir, duration, not no_view)
    )


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for the report.")] = Path(
        "demo-report"
    ),
    streams: Annotated[int, typer.Option(min=1, max=256, help="Number of concurrent streams.")] = 8,
    manifest: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Manifest of the leaky service. Default: the demo's manifest."
        ),
    ] = None,
    device: Annotated[
        DeviceKind, typer.Option(help="Device that runs the model.")
    ] = DeviceKind.CPU,
    no_view: Annotated[bool, typer.Option("--no-view", help="Do not show the live view.")] = False,
) -> None:
    """Show a leak, its incident and its cure on this machine, in about two minutes."""
    from plimsoll_cli.demo import command

    command.run_demo(out, streams, manifest, device.value, not no_view)


@app.command()
def record(
    out: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Trace to write: NAME.jsonl or NAME.jsonl.gz.")
    ],
    service: Annotated[
        str | None, typer.Argument(metavar="SERVICE", help="Name of a service on this machine.")
    ] = None,
    run_dir: RunDir = None,
    duration: Duration = None,
) -> None:
    """Record a trace of a service that runs on this machine."""
    from plimsoll_cli.local import traces

    count = traces.record_trace(out, service, run_dir, duration)
    typer.echo(f"recorded {count} samples in {out}", err=True)


@app.command()
def replay(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Trace to read: .jsonl or .jsonl.gz.")
    ],
    mode: Annotated[
        Mode, typer.Option(help="Mode of the supervisor: Observe or Recover.")
    ] = Mode.OBSERVE,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BUDGET",
            help="Budget for host memory instead of the recorded one: Auto, 2Gi or 2Gi/6h.",
        ),
    ] = None,
) -> None:
    """Replay a trace in the supervisor, and print its output as JSON lines."""
    from plimsoll_cli.local import traces

    traces.replay_trace(trace, mode, budget)


@app.command()
def tune(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SERVICE|FILE",
            help=(
                "Service on this machine, a supervisor's journal.sqlite, a trace, or a series"
                " (.csv with Unix seconds and bytes)."
            ),
        ),
    ],
    limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory limit that applied to the series.")
    ] = None,
    run_dir: RunDir = None,
    output: options.OutputOption = Output.TABLE,
) -> None:
    """Show a service's normal growth, a leak budget to set, and its effect on each past day."""
    from plimsoll_cli.local import tuning

    tuning.print_tuning(source, run_dir, limit, output)


commands.add_commands(app)
inject_command.add_commands(app)
tools.add_commands(app)


@app.command()
def version() -> None:
    """Print the version."""
    from plimsoll_api.version import get_version as installed

    typer.echo(f"plimsoll {installed()}")


def _print_version(requested: bool) -> None:
    if requested:
        version()
        raise typer.Exit


@app.callback()
def show_help(
    requested: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Memory supervision for inference engines."""


def main() -> None:
    """Run the program; the exit status is 0, 1 after a failure, or 2 after a usage error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Standard error does so by itself: the locale may lack characters, such as latin1.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except UsageError as error:
        _exit_with_error(error, 2)
    except RunError as error:
        _exit_with_error(error, 1)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has exited
        _drop_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_output()
        _exit_with_error(error, 1)


def _drop_output() -> None:
    # Otherwise, the final flush would fail, too.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_with_error(error: Exception, status: int) -> None:
    sys.stderr.write(f"plimsoll: {escape_control_characters(str(error))}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
