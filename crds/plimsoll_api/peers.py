"""File with the memory growth of all replicas of a service, while one replica may be leaking.

The operator writes the file into the ConfigMap with the supervisors' configuration. The values come
from pods, so they are limited, and a file that exceeds a limit is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from plimsoll_api import decoding

PEERS_FILE = "peers.json"
MAX_PEERS = 64
"""Maximum number of replicas in a file; more would add little evidence."""
MAX_PEERS_BYTES = 64 << 10
"""Maximum size of a file. A replica takes 200 bytes, or 900 with the longest possible names."""
MAX_PEER_GROWTH_BYTES = 1 << 50
MAX_BASELINE_AGE_S = 1 << 32
MAX_PEER_REQUESTS = 1 << 53
"""Maximum number of requests, the largest exact double. Like the limits of growth (1 PiB) and age
(136 years), it exceeds that of any real replica, and only rejects invalid values."""


class PeerGrowth(msgspec.Struct, frozen=True):
    """Growth of one kind of memory since the warm-up, as the replica's supervisor reports it.

    ``bytes`` is the unexplained growth, measured at comparable load. ``age_s`` is the time since
    the warm-up in seconds. ``requests`` is the number of requests that were completed in this time.
    """

    bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_PEER_GROWTH_BYTES)]
    age_s: Annotated[int, msgspec.Meta(ge=0, le=MAX_BASELINE_AGE_S)]
    requests: Annotated[int, msgspec.Meta(ge=0, le=MAX_PEER_REQUESTS)]


class Peer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Replica of the service. ``workload`` is the owner of the pod if a policy supervises it.

    ``host`` and ``device`` are the growth of host and device memory; None if unknown.
    """

    pod: Annotated[str, msgspec.Meta(max_length=253)]
    revision: Annotated[str, msgspec.Meta(min_length=1, max_length=63)]
    workload: Annotated[str, msgspec.Meta(max_length=317)] = ""
    host: PeerGrowth | None = None
    device: PeerGrowth | None = None


_Peers = Annotated[tuple[Peer, ...], msgspec.Meta(max_length=MAX_PEERS)]


def decode_peers(data: bytes) -> tuple[Peer, ...]:
    """Parse a peers file. Raises :class:`decoding.MalformedError` if it is invalid."""
    if len(data) > MAX_PEERS_BYTES:
        raise decoding.MalformedError(f"the peers file has more than {MAX_PEERS_BYTES >> 10} KiB")
    peers: tuple[Peer, ...] = decoding.decode(data, _Peers)
    return peers


def encode_peers(peers: Sequence[Peer]) -> bytes:
    """Return the content of a peers file, with one replica per line for readability."""
    return b"[" + b",\n".join(msgspec.json.encode(one) for one in peers) + b"]\n"
