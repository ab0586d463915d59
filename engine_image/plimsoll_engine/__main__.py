"""Command line: ``python -m plimsoll_engine serve|drain``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from plimsoll_api.names import ADMIN_PORT
from plimsoll_engine import settings


class _Parser(argparse.ArgumentParser):
    # Flags cannot be abbreviated, so that the operator finds the flags that it reserves by name.
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="plimsoll_engine",
        description="Inference engine of Plimsoll: serves a model with OpenAI's API.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve|drain")
    serve = commands.add_parser("serve", help="serve the model in a checkpoint directory")
    settings.add_flags(serve)
    drain = commands.add_parser("drain", help="drain the engine of this pod (preStop hook)")
    drain.add_argument(
        "--admin-port",
        type=settings.parse_port,
        default=ADMIN_PORT,
        help="TCP port of the engine's admin API on 127.0.0.1",
    )
    drain.add_argument(
        "--run-dir", type=Path, required=True, metavar="DIR", help="run directory of the engine"
    )
    drain.add_argument(
        "--deadline",
        type=settings.parse_positive_seconds,
        default=30.0,
        metavar="S",
        help="maximum time in seconds for running requests to finish; default: 30",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status: 0 on success, 1 on failure, 2 for wrong usage."""
    flags = _build_parser().parse_args(arguments)
    if flags.command == "drain":
        from plimsoll_engine import prestop

        return prestop.drain(flags.admin_port, flags.run_dir, flags.deadline)
    from plimsoll_api import logs
    from plimsoll_engine import server
    from plimsoll_engine.errors import UsageError

    # A line for each request would hide the lines about states (/metrics counts requests).
    # uvicorn's warnings are about requests as well, so a client could cause any number of them.
    logs.configure_logging(libraries={"uvicorn.access": "WARNING", "uvicorn.error": "ERROR"})
    try:
        return server.run(settings.create_settings(flags))
    except UsageError as error:
        print(f"plimsoll_engine serve: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
