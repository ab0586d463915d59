"""Flags and settings of HTTP connections."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import msgspec

from plimsoll_engine.http.limits import HttpLimits


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of HTTP connections. If a limit is None, ``--max-queued`` or the model sets it."""

    max_connections: int | None = None
    max_body_bytes: int | None = None
    body_buffer_bytes: int | None = None
    idle_timeout_s: float = 5.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    prepare_timeout_s: float = 15.0

    def make_limits(self, max_connections: int) -> HttpLimits:
        """Return the limits of a server with at most ``max_connections`` connections."""
        return HttpLimits(
            max_connections=max_connections,
            idle_timeout_s=self.idle_timeout_s,
            header_timeout_s=self.header_timeout_s,
            body_timeout_s=self.body_timeout_s,
            write_timeout_s=self.write_timeout_s,
        )


ArgumentType = Callable[[str], object]


def add_flags(
    parser: argparse.ArgumentParser,
    parse_count: ArgumentType,
    parse_size: ArgumentType,
    parse_seconds: ArgumentType,
) -> None:
    """Add the flags of :class:`HttpSettings` to ``parser``."""
    add, default = parser.add_argument, HttpSettings()
    add("--max-connections", type=parse_count, metavar="N",
        help="maximum number of connections; further connections get status 503; default: "
        "twice --max-queued")  # fmt: skip
    add("--max-body-bytes", type=parse_size, metavar="SIZE",
        help="maximum size of a request body, such as 8Mi; default: derived from the "
        "model")  # fmt: skip
    add("--body-buffer-bytes", type=parse_size, metavar="SIZE",
        help="memory for all request bodies, beyond which requests get status 503; a client may "
        "use half, and then gets 429; default: derived from the model")  # fmt: skip
    add("--idle-timeout", default=default.idle_timeout_s, type=parse_seconds, metavar="S",
        help="maximum time in seconds between two requests on a connection")  # fmt: skip
    add("--header-timeout", default=default.header_timeout_s, type=parse_seconds, metavar="S",
        help="time in seconds to receive a request's header; then status 408")  # fmt: skip
    add("--body-timeout", default=default.body_timeout_s, type=parse_seconds, metavar="S",
        help="time in seconds to receive a body, plus 1 s per 16 KiB received; then status "
        "408")  # fmt: skip
    add("--write-timeout", default=default.write_timeout_s, type=parse_seconds, metavar="S",
        help="time in seconds after which a client that reads nothing is disconnected")  # fmt: skip
    add("--prepare-timeout", default=default.prepare_timeout_s, type=parse_seconds, metavar="S",
        help="time in seconds to parse, template and tokenize a body above 4 KiB; then status "
        "413")  # fmt: skip


def create_settings(flags: argparse.Namespace) -> HttpSettings:
    """Return the HTTP settings of the parsed command line."""
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
