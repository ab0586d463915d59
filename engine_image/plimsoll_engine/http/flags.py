"""What the flags say of clients: how many, how much, how long."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import msgspec

from plimsoll_engine.http.limits import HttpLimits


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All times are seconds.

    ``max_connections`` null is twice ``--max-queued``; ``max_body_bytes`` and ``body_buffer_bytes``
    null follow from the model (api/body_sizes.py).
    """

    max_connections: int | None = None
    max_body_bytes: int | None = None
    body_buffer_bytes: int | None = None
    idle_timeout_s: float = 5.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    prepare_timeout_s: float = 15.0

    def limits(self, max_connections: int) -> HttpLimits:
        """Return the limits of one server with so many connections."""
        return HttpLimits(
            max_connections=max_connections,
            idle_timeout_s=self.idle_timeout_s,
            header_timeout_s=self.header_timeout_s,
            body_timeout_s=self.body_timeout_s,
            write_timeout_s=self.write_timeout_s,
        )


Type = Callable[[str], object]


def add_flags(parser: argparse.ArgumentParser, count: Type, size: Type, seconds: Type) -> None:
    """``count``, ``size`` and ``seconds`` are argparse types."""
    add, default = parser.add_argument, HttpSettings()
    add("--max-connections", type=count, metavar="N",
        help="to the serving API, then 503; default: twice --max-queued")  # fmt: skip
    add("--max-body-bytes", type=size, metavar="SIZE",
        help="of one request, such as 8Mi; default: by the model's context and media")  # fmt: skip
    add("--body-buffer-bytes", type=size, metavar="SIZE",
        help="of all bodies read at once, half for one client; then 503 and 429")  # fmt: skip
    add("--idle-timeout", default=default.idle_timeout_s, type=seconds, metavar="S",
        help="of a connection between two requests")  # fmt: skip
    add("--header-timeout", default=default.header_timeout_s, type=seconds, metavar="S",
        help="for a request's header, then 408")  # fmt: skip
    add("--body-timeout", default=default.body_timeout_s, type=seconds, metavar="S",
        help="for a body, and longer at 16 KiB/s or more; then 408")  # fmt: skip
    add("--write-timeout", default=default.write_timeout_s, type=seconds, metavar="S",
        help="for a client that takes nothing of its answer")  # fmt: skip
    add("--prepare-timeout", default=default.prepare_timeout_s, type=seconds, metavar="S",
        help="to read, template and tokenize a body above 4 KiB, then 413")  # fmt: skip


def from_flags(flags: argparse.Namespace) -> HttpSettings:
    """Return the settings of the parsed command line."""
    return HttpSettings(
        max_connections=flags.max_connections,
        max_body_bytes=flags.max_body_bytes,
        body_buffer_bytes=flags.body_buffer_bytes,
        idle_timeout_s=flags.idle_timeout,
        header_timeout_s=flags.header_timeout,
        body_timeout_s=flags.body_timeout,
        write_timeout_s=flags.write_timeout,
        prepare_timeout_s=flags.prepare_timeout,
    )
