"""What rank 0 tells the other ranks of its group, and what they answer.

Messages are framed as in :mod:`plimsoll_engine.ipc`. A command is carried out by every rank in the
order in which rank 0 gave it and does the same itself, so that all launch the same collectives in
the same order. :class:`Step`, :class:`Graphs` and :class:`Capture` are not answered: their
collectives are what the ranks meet in.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from plimsoll_api.admin import DeviceMemory, OperationStep, ProcessMemory
from plimsoll_engine.core.inputs import Inputs
from plimsoll_engine.ipc import LENGTH

# ---- rank 0 to the others


class Pool(msgspec.Struct, tag="pool"):
    """Make a KV pool of these sizes, in the holder's memory where it is ``lent``; answered by
    :class:`Done`."""

    num_blocks: int
    block_size: int
    lent: bool = False


class Step(msgspec.Struct, tag="step"):
    """Compute these inputs, then take the tokens that rank 0 samples."""

    inputs: Inputs


class Graphs(msgspec.Struct, tag="graphs"):
    """:meth:`plimsoll_engine.core.forward.Forward.capture_graphs`."""

    max_num_seqs: int
    max_blocks: int
    later: bool


class Capture(msgspec.Struct, tag="capture"):
    """Capture the next missing graph."""


class Drop(msgspec.Struct, tag="drop"):
    """Let go of the KV pool and the graphs; answered by :class:`Done`."""


class Measure(msgspec.Struct, tag="measure"):
    """Say how much device memory is free: :class:`Free`."""


class Freeze(msgspec.Struct, tag="freeze"):
    """The start is over: what exists by now lives as long as the process."""


class Account(msgspec.Struct, tag="account"):
    """Say what you hold: :class:`RankReport`."""


class Trim(msgspec.Struct, tag="trim"):
    """Give back what can be given back: :class:`Trimmed`."""


class End(msgspec.Struct, tag="end"):
    """Give everything back, say :class:`Ended`, and exit when the connection closes."""


Command = Pool | Step | Graphs | Capture | Drop | Measure | Freeze | Account | Trim | End


# ---- the others to rank 0


class Joining(msgspec.Struct, tag="joining"):
    """First: the rank's device works, and it waits for the group to form."""

    rank: int
    pid: int


class Loaded(msgspec.Struct, tag="loaded"):
    """Second: its part of the model is there, and commands are taken."""


class Done(msgspec.Struct, tag="done"):
    pass


class Free(msgspec.Struct, tag="free"):
    """``bytes`` free on the device; None on a CPU."""

    bytes: int | None


class RankReport(msgspec.Struct, tag="report"):
    memory: ProcessMemory
    devices: list[DeviceMemory]
    graph_bytes: int


class Trimmed(msgspec.Struct, tag="trimmed"):
    steps: list[OperationStep]


class Ended(msgspec.Struct, tag="ended"):
    """Device bytes as in :class:`plimsoll_engine.ipc.Stopped`."""

    device_allocated: int | None
    device_baseline: int | None


class Failed(msgspec.Struct, tag="failed"):
    """As :class:`plimsoll_engine.ipc.Failed`."""

    message: str
    permanent: bool = False


Reply = Joining | Loaded | Done | Free | RankReport | Trimmed | Ended | Failed


def _pack(array: Any) -> tuple[tuple[int, ...], bytes]:
    return array.shape, array.tobytes()


def _unpack(_: type, packed: Any) -> Any:
    shape, data = packed
    return np.frombuffer(data, np.int32).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
to_rank = msgspec.msgpack.Decoder(Command, dec_hook=_unpack)
from_rank = msgspec.msgpack.Decoder(Reply)


def frame(message: Command | Reply) -> bytes:
    """The bytes that carry ``message``, length first."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
