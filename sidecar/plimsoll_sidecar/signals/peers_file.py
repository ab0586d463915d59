"""What the operator published of the other replicas, as long as it is known to be recent.

A kubelet writes the file some time after the operator did, and leaves it as it is when the operator
is away. Clocks of two machines are never compared: a file is recent while it changes. One that is
there at the start may be of any age, so it counts from its first change on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from plimsoll_api.decoding import Malformed
from plimsoll_api.peers import MAX_PEERS_BYTES, Peer, decode

FRESH_S = 300.0
"""The operator writes once a minute, and a kubelet takes up to a minute and a half to follow."""


class PeersFile:
    """The file at ``path``, and the peers that it tells of."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._data = self._read()
        self._until = float("-inf")
        self._peers: tuple[Peer, ...] = ()

    def peers(self) -> tuple[Peer, ...]:
        """Look at the file again; empty while nothing recent is known. Never raises."""
        now, data = self._clock(), self._read()
        if data != self._data:
            self._data, self._until = data, now + FRESH_S
            try:
                self._peers = decode(data)
            except Malformed:
                self._peers = ()
        return self._peers if now < self._until else ()

    def _read(self) -> bytes:
        """Return the file's content, one byte beyond the bound at most; empty without a file."""
        try:
            with self._path.open("rb") as file:
                return file.read(MAX_PEERS_BYTES + 1)
        except OSError:
            return b""
