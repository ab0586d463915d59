"""Free TCP ports for one replica."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"
RANGE = range(20_000, 32_000)
"""Below Linux's default ephemeral range (32768 to 60999, ip(7)), so that no outgoing connection
takes a port between its choice and its use."""
TRIES = 200


def choose(wanted: Sequence[int | None]) -> list[int]:
    """Return each wanted port that is free on the loopback, and another free one for the rest.

    None stands for any port. All of them differ. Raises OSError if none is free.
    """
    with contextlib.ExitStack() as held:
        return [_hold(port, held) for port in wanted]


def _hold(wanted: int | None, held: contextlib.ExitStack) -> int:
    others = random.sample(RANGE, TRIES)
    for port in others if wanted is None else [wanted, *others]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # As the servers do: connections of an earlier run that linger do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
            listener.listen(1)
        except OSError:
            listener.close()
            continue
        held.enter_context(contextlib.closing(listener))
        return port
    raise OSError(
        f"no free TCP port for {wanted or 'a replica'} on {LOOPBACK}, tried {TRIES} others"
    )
