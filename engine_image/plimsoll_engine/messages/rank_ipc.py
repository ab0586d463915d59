"""Messages between rank 0 of a worker and its other ranks: commands and replies.

Every rank runs the commands in the same order. Commands that launch collectives get no reply,
because the collectives synchronise the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from plimsoll_api.admin import DeviceMemory, OperationStep, ProcessMemory
from plimsoll_engine.messages.framing import add_length_prefix

Array = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(slots=True)
class Inputs:
    """Input arrays of a step, with one row per token, on the host.

    The other arrays are those of :class:`~plimsoll_engine.kernels.step_plan.StepPlan`, whose
    ``write_slots`` are ``slots`` here.

    Attributes:
        ids: Token ID of each row that has no source.
        sources: Row of the previous step that sampled this row's token; -1 if there is none.
        positions: Position of each row's token in its sequence.
        last: Rows that sample a token.
        scored: Rows whose logits score the next prompt token.
        targets: ID of that prompt token for each row in ``scored``.

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
    # Number of top log probabilities to return for each scored row.
    most: int = 0
    # Whether sampling is greedy in every row and no request needs logits.
    greedy: bool = False

    @property
    def is_decode_only(self) -> bool:
        """Whether each sequence has one row and no row is scored."""
        return len(self.ids) == len(self.contexts) and not len(self.scored)


# ---- from rank 0 to the other ranks


class CreatePool(msgspec.Struct, tag="pool"):
    """Command: allocate a KV pool, or map the weight server's pool if ``shared``."""

    num_blocks: int
    block_size: int
    layers: int
    shared: bool = False


class ChecksumBlocks(msgspec.Struct, tag="sum_blocks"):
    """Command: compute a checksum of each block. The reply is :class:`BlockChecksums`."""

    blocks: list[int]


class Step(msgspec.Struct, tag="step"):
    """Command: run a step with ``inputs``, then receive the sampled tokens from rank 0."""

    inputs: Inputs


class PrepareGraphs(msgspec.Struct, tag="graphs"):
    """Command: call ``Forward.capture_graphs`` with these fields."""

    max_rows: int
    max_blocks: int
    later: bool
    longest: int


class CaptureGraph(msgspec.Struct, tag="capture"):
    """Command: capture the next missing CUDA graph."""


class ReleasePool(msgspec.Struct, tag="drop"):
    """Command: release the KV pool and the CUDA graphs."""


class MeasureFreeMemory(msgspec.Struct, tag="measure"):
    """Command: measure the free device memory."""


class Freeze(msgspec.Struct, tag="freeze"):
    """Command: exempt all existing objects from garbage collection (``gc.freeze``)."""


class ReportMemory(msgspec.Struct, tag="account"):
    """Command: report the memory of this rank."""


class TrimRank(msgspec.Struct, tag="trim"):
    """Command: free cached memory."""


class Shutdown(msgspec.Struct, tag="end"):
    """Command: release all memory, reply, and exit when the connection closes."""


Command = (
    CreatePool | ChecksumBlocks | Step | PrepareGraphs | CaptureGraph | ReleasePool
    | MeasureFreeMemory | Freeze | ReportMemory | TrimRank | Shutdown
)  # fmt: skip


# ---- from the other ranks to rank 0


class RankHello(msgspec.Struct, tag="joining"):
    """First message of a rank: the device works."""

    rank: int
    pid: int


class RankReady(msgspec.Struct, tag="loaded"):
    """Second message of a rank: its shard of the model is loaded."""


class Acknowledgement(msgspec.Struct, tag="done"):
    """Reply: the command succeeded and has no result."""


class PoolReply(msgspec.Struct, tag="pool_made"):
    """Reply: the rank has its KV pool.

    The weight server assigns ``weights`` and ``memory``, the identities of mapped weights and pool.
    """

    weights: bytes = b""
    memory: bytes = b""
    is_sole_writer: bool = False


class BlockChecksums(msgspec.Struct, tag="block_sums"):
    """Reply: one checksum per block, in the order of the command."""

    sums: list[int]


class FreeMemory(msgspec.Struct, tag="free"):
    """Reply: free bytes on the device; None on a CPU."""

    bytes: int | None


class RankReport(msgspec.Struct, tag="report"):
    """Reply: memory of a rank, in bytes."""

    memory: ProcessMemory
    devices: list[DeviceMemory]
    graph_bytes: int


class RankTrimReport(msgspec.Struct, tag="trimmed"):
    """Reply: the steps of the trim, with the bytes that each step freed."""

    steps: list[OperationStep]


class RankShutdownReport(msgspec.Struct, tag="ended"):
    """Reply: the rank has released its memory.

    ``fenced`` means that this rank can no longer write to the KV pool.
    """

    device_allocated: int | None
    device_baseline: int | None
    fenced: bool = False


class RankError(msgspec.Struct, tag="failed"):
    """Reply: the command failed. If ``permanent``, a retry would also fail."""

    message: str
    permanent: bool = False


Reply = (
    RankHello | RankReady | Acknowledgement | PoolReply | BlockChecksums | FreeMemory
    | RankReport | RankTrimReport | RankShutdownReport | RankError
)  # fmt: skip


def _pack_array(array: Any) -> tuple[tuple[int, ...], bytes]:
    return array.shape, array.tobytes()


def _unpack_array(_: type, packed: Any) -> Any:
    shape, data = packed
    return np.frombuffer(data, np.int32).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_array)
to_rank_decoder = msgspec.msgpack.Decoder(Command, dec_hook=_unpack_array)
from_rank_decoder = msgspec.msgpack.Decoder(Reply)


def encode_frame(message: Command | Reply) -> bytes:
    """Return ``message`` as an encoded frame."""
    return add_length_prefix(_encoder.encode(message))
