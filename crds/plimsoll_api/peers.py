"""What the operator publishes of a service's replicas while one of them may leak: how each grew.

It is a file beside the supervisor's configuration, from the same ConfigMap. The figures come from
the pods, so they are bounded here, and a file that breaks a bound says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from plimsoll_api import decoding

PEERS_FILE = "peers.json"
MAX_PEERS = 64
"""Replicas in a file: beyond these, more siblings are hardly more evidence."""
MAX_PEERS_BYTES = 64 << 10
"""A replica takes 200 bytes, and 900 with the longest names that Kubernetes has."""
MAX_GROWTH_BYTES = 1 << 50
MAX_AGE_S = 1 << 32
MAX_REQUESTS = 1 << 53
"""Larger ones no replica has: a pebibyte, a century, and what a double counts exactly."""


class Grown(msgspec.Struct, frozen=True):
    """What one memory grew by since its warm-up, as the replica's own supervisor says.

    ``bytes`` is the growth at comparable load that no ledger explains, ``age_s`` the time since the
    warm-up in whole seconds, and ``requests`` what the engine answered in that time.
    """

    bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_GROWTH_BYTES)]
    age_s: Annotated[int, msgspec.Meta(ge=0, le=MAX_AGE_S)]
    requests: Annotated[int, msgspec.Meta(ge=0, le=MAX_REQUESTS)]


class Peer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One replica. ``workload`` owns a policy's pod; a memory of which not all is known is null."""

    pod: Annotated[str, msgspec.Meta(max_length=253)]
    revision: Annotated[str, msgspec.Meta(min_length=1, max_length=63)]
    workload: Annotated[str, msgspec.Meta(max_length=317)] = ""
    host: Grown | None = None
    device: Grown | None = None


_Peers = Annotated[tuple[Peer, ...], msgspec.Meta(max_length=MAX_PEERS)]


def decode(data: bytes) -> tuple[Peer, ...]:
    """Read a file; :class:`~plimsoll_api.decoding.Malformed` for any other."""
    if len(data) > MAX_PEERS_BYTES:
        raise decoding.Malformed(f"it has more than {MAX_PEERS_BYTES >> 10} KiB")
    found: tuple[Peer, ...] = decoding.decode(data, _Peers)
    return found


def encode(peers: Sequence[Peer]) -> bytes:
    """Write a file: one replica a line, so that people can read it."""
    return b"[" + b",\n".join(msgspec.json.encode(one) for one in peers) + b"]\n"
