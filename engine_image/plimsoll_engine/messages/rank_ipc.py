"""What rank 0 tells the other ranks of its group, and what they answer.

Messages are framed as in :mod:`plimsoll_engine.messages.framing`. Every rank carries out commands
in the order in which rank 0 gives them, and rank 0 does the same itself, so that all launch the
same collectives in the same order. :class:`Step`, :class:`Graphs` and :class:`Capture` get no
answer: the ranks meet in their collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from plimsoll_api.admin import DeviceMemory, OperationStep, ProcessMemory
from plimsoll_engine.messages.framing import framed

Array = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(slots=True)
class Inputs:
    """The integers of a step on the host, all that a rank needs to compute it.

    ``sources`` says where a token's id is: negative for ``ids``, else a row of the tokens that the
    step before sampled. ``last`` are the rows that get a token, ``scored`` those whose logits say
    how likely the prompt's next token was, which ``targets`` has; ``decodes``, ``longest`` and
    ``fresh`` are those of :class:`plimsoll_engine.kernels.step_plan.StepPlan`.
    """

    ids: Array
    sources: Array
    positions: Array
    slots: Array
    contexts: Array
    starts: Array
    tables: Array
    last: Array
    decodes: int
    longest: int
    fresh: tuple[int, ...]
    scored: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    targets: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    most: int = 0
    """How many of the likeliest tokens a scored row names."""
    greedy: bool = False
    """Every row that gets a token gets the best one, and nobody asks for its logits."""

    @property
    def decoding(self) -> bool:
        """Each sequence has one row, and none is scored."""
        return len(self.ids) == len(self.contexts) and not len(self.scored)


# ---- rank 0 to the others


class Pool(msgspec.Struct, tag="pool"):
    """Make a KV pool of these sizes, in the weight server's memory where it is ``shared``.

    For the first ``layers`` of the model, which alone are computed over it. Answered by
    :class:`PoolMade`.
    """

    num_blocks: int
    block_size: int
    layers: int
    shared: bool = False


class SumBlocks(msgspec.Struct, tag="sum_blocks"):
    """Sum up what these blocks hold: :class:`BlockSums`."""

    blocks: list[int]


class Step(msgspec.Struct, tag="step"):
    """Compute these inputs, then take the tokens that rank 0 samples."""

    inputs: Inputs


class Graphs(msgspec.Struct, tag="graphs"):
    """:meth:`plimsoll_engine.core.forward.Forward.capture_graphs`."""

    max_num_seqs: int
    max_blocks: int
    later: bool
    longest: int


class Capture(msgspec.Struct, tag="capture"):
    """Capture the next missing graph."""


class Drop(msgspec.Struct, tag="drop"):
    """Let go of the KV pool and the graphs; answered by :class:`Acknowledged`."""


class Measure(msgspec.Struct, tag="measure"):
    """Say how much device memory is free: :class:`Free`."""


class Freeze(msgspec.Struct, tag="freeze"):
    """The start is over: what exists by now lives as long as the process."""


class Account(msgspec.Struct, tag="account"):
    """Say what you hold: :class:`RankReport`."""


class TrimRank(msgspec.Struct, tag="trim"):
    """Give back what can be given back: :class:`RankTrimmed`."""


class End(msgspec.Struct, tag="end"):
    """Give everything back, say :class:`Ended`, and exit when the connection closes."""


Command = (
    Pool | SumBlocks | Step | Graphs | Capture | Drop | Measure | Freeze | Account | TrimRank | End
)


# ---- the others to rank 0


class Joining(msgspec.Struct, tag="joining"):
    """First: the rank's device works, and it waits for the group to form."""

    rank: int
    pid: int


class Loaded(msgspec.Struct, tag="loaded"):
    """Second: its part of the model is there, and commands are taken."""


class Acknowledged(msgspec.Struct, tag="done"):
    """The rank has done what it was told; there is nothing to report."""


class PoolMade(msgspec.Struct, tag="pool_made"):
    """The rank has its KV pool.

    ``weights`` and ``memory`` are the weight server's identities of what the rank has mapped, empty
    where it maps nothing; ``alone`` is of :class:`plimsoll_engine.messages.weight_ipc.PoolClaimed`.
    """

    weights: bytes = b""
    memory: bytes = b""
    alone: bool = False


class BlockSums(msgspec.Struct, tag="block_sums"):
    """One sum for each block."""

    sums: list[int]


class Free(msgspec.Struct, tag="free"):
    """``bytes`` free on the device; None on a CPU."""

    bytes: int | None


class RankReport(msgspec.Struct, tag="report"):
    """A rank's memory, in bytes, of which rank 0 knows nothing."""

    memory: ProcessMemory
    devices: list[DeviceMemory]
    graph_bytes: int


class RankTrimmed(msgspec.Struct, tag="trimmed"):
    """What a rank gave back, by step."""

    steps: list[OperationStep]


class Ended(msgspec.Struct, tag="ended"):
    """Device bytes as in :class:`plimsoll_engine.messages.worker_ipc.Stopped`.

    ``fenced``: nothing of the rank can write to its KV pool any more.
    """

    device_allocated: int | None
    device_baseline: int | None
    fenced: bool = False


class RankFailed(msgspec.Struct, tag="failed"):
    """As :class:`plimsoll_engine.messages.worker_ipc.Failed`."""

    message: str
    permanent: bool = False


Reply = (
    Joining | Loaded | Acknowledged | PoolMade | BlockSums | Free | RankReport | RankTrimmed | Ended
    | RankFailed
)  # fmt: skip


def _pack(array: Any) -> tuple[tuple[int, ...], bytes]:
    return array.shape, array.tobytes()


def _unpack(_: type, packed: Any) -> Any:
    shape, data = packed
    return np.frombuffer(data, np.int32).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
to_rank = msgspec.msgpack.Decoder(Command, dec_hook=_unpack)
from_rank = msgspec.msgpack.Decoder(Reply)


def frame(message: Command | Reply) -> bytes:
    """Return the bytes that carry ``message``, length first."""
    return framed(_encoder.encode(message))
