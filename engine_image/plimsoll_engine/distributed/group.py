"""Group of ranks that compute one model together (tensor parallelism), and its collectives.

Rank r has its own process and, on CUDA, device r. A model sees only :class:`Group`. A group of one
rank returns its inputs and calls nothing, so a single process pays no cost.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from plimsoll_engine.distributed.peer_memory import PeerMemory
from plimsoll_engine.kernels.ops import Ops, decode_columns
from plimsoll_engine.kernels.rank_sum_layout import MAX_RANKS, Layout

if TYPE_CHECKING:
    from plimsoll_engine.kernels.rank_sums import RankSums

FLAG = "--tensor-parallel-size"
COLLECTIVE_TIMEOUT_S = 60.0
"""Timeout of forming a group, and of each collective outside a CUDA graph.

Idle ranks do not wait in a collective.
"""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Interface for the bootstrap of ranks, which are all on one host. A user's setting wins."""


class Shard(NamedTuple):
    """Part of a model that a process has: part ``rank`` of ``size`` equal ones."""

    rank: int = 0
    size: int = 1


WHOLE = Shard()


class SumShape(NamedTuple):
    """Shape of a model's all-reduces: at most ``rows`` rows of ``columns`` elements of ``dtype``.

    Other shapes work as well, but more slowly.
    """

    rows: int
    columns: int
    dtype: torch.dtype


class Group:
    """Group of one rank. Every collective returns its input."""

    shard = WHOLE

    @property
    def nbytes(self) -> int:
        """Device memory of this rank that the group holds."""
        return 0

    def add_norm(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Return :meth:`Ops.add_rms_norm` of the sum of ``x`` over all ranks.

        A rank may keep only the part of ``residual`` that it needs for the next such sum of as many
        rows; :meth:`stream_rows` returns it complete. The result is valid until that sum.
        """
        return ops.add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def stream_rows(self, ops: Ops, residual: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the rows ``index`` int [rows] of the sum in ``residual`` after :meth:`add_norm`.

        They are complete on each rank, [rows, columns].
        """
        return ops.gather_rows(residual, index)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over all ranks in place and return it; any shape and dtype."""
        return x

    def best(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """Return the best column of all ranks' concatenated ``x`` [rows, columns], int64 [rows]."""
        return ops.argmax(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the concatenated columns of all ranks' ``x`` [rows, columns], in rank order."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's ``x`` to all ranks in place and return it; any shape and dtype."""
        return x

    def close(self, lost: bool = False) -> None:
        """Leave the group. Every rank must call it. Idempotent.

        ``lost`` means that a rank is gone, so that running collectives are aborted.
        """


ALONE = Group()


class ProcessGroup(Group):
    """Group of several processes, with NCCL between CUDA devices and gloo between CPUs.

    It is the default group of ``torch.distributed``. The ranks meet through ``store``, a file that
    no earlier group has used; no port is opened for it. On CUDA, collectives run in the current
    stream and may be captured in CUDA graphs, which must be reset before the group is closed.
    All-reduces of shape ``sums`` use memory that all ranks map, if their devices support it.
    """

    def __init__(
        self, shard: Shard, device: torch.device, store: Path, sums: SumShape | None = None
    ) -> None:
        """Wait for all ranks. Raises RuntimeError after a timeout."""
        self.shard = shard
        self._device = device
        self._memory: PeerMemory | None = None
        self._sums: RankSums | None = None
        for name, value in LOOPBACK.items():
            os.environ.setdefault(name, value)
        cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.FileStore(str(store), shard.size),  # type: ignore[attr-defined]
            rank=shard.rank,
            world_size=shard.size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            # With device_id, NCCL creates its communicator here, not in the first collective.
            device_id=device if cuda else None,
        )
        try:
            self.all_reduce(torch.zeros(1, device=device))
            if cuda:
                torch.cuda.synchronize(device)
                if sums is not None:
                    self._connect(sums)
        except BaseException:
            self.close(lost=True)
            raise

    def _connect(self, sums: SumShape) -> None:
        from plimsoll_engine.kernels.rank_sums import RankSums, layout

        rank, size = self.shard
        if size > MAX_RANKS or sums.columns * sums.dtype.itemsize % 16:
            return
        made: Layout = layout(size, sums.rows, sums.columns, sums.dtype)
        self._memory = PeerMemory.connect(rank, size, made.nbytes, self._gather)
        if self._memory is not None:
            addresses = self._memory.addresses
            self._sums = RankSums(self._memory.tensor(), addresses, rank, made, sums.dtype)

    def _gather(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of each rank, in rank order."""
        own = torch.tensor(list(data), dtype=torch.uint8, device=self._device)
        found = own.new_empty(self.shard.size, len(data))
        dist.all_gather_into_tensor(found, own)
        return [bytes(row) for row in found.tolist()]

    @property
    def nbytes(self) -> int:
        """Device memory of this rank that all ranks map; 0 on a CPU."""
        return 0 if self._memory is None else self._memory.nbytes

    def add_norm(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Implement :meth:`Group.add_norm`, in one kernel if the ranks share memory."""
        if self._sums is None or not self._sums.supports(x):
            return super().add_norm(ops, x, residual, weight, eps)
        return self._sums.add_norm(x, residual, weight, eps)

    def stream_rows(self, ops: Ops, residual: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Implement :meth:`Group.stream_rows`. Shared rows need an all-reduce."""
        if self._sums is None or not self._sums.is_shared(residual):
            return super().stream_rows(ops, residual, index)
        return self.all_reduce(self._sums.get_own_rows(residual, index))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over all ranks in place and return it.

        All ranks must have the same shape and dtype.
        """
        dist.all_reduce(x)
        return x

    def best(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """Implement :meth:`Group.best` by exchanging a few bytes a row.

        Ties go to the first column.
        """
        keys = ops.find_best_keys(x, self.shard.rank * x.shape[1])
        dist.all_reduce(keys, dist.ReduceOp.MAX)
        return decode_columns(keys)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the concatenated columns of all ranks.

        [rows, columns] becomes [rows, size * columns] of the same dtype.
        """
        rows, columns = x.shape
        size = self.shard.size
        found = x.new_empty(size * rows, columns)
        dist.all_gather_into_tensor(found, x.contiguous())
        return found.view(size, rows, columns).transpose(0, 1).reshape(rows, size * columns)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's ``x`` to all ranks in place. They must have the same shape and dtype."""
        dist.broadcast(x, 0)
        return x

    def close(self, lost: bool = False) -> None:
        """Destroy the group. With ``lost`` it waits for no rank."""
        if not dist.is_initialized():
            return
        if self._memory is not None:
            self._sums = None
            if not lost:
                with contextlib.suppress(RuntimeError):  # a lost device cannot be waited for
                    torch.cuda.synchronize(self._device)
            self._memory.close(None if lost else self._gather)
        if lost:
            # This ends gloo's waits for a lost rank. NCCL's kernels may continue.
            with contextlib.suppress(RuntimeError):
                assert dist.group.WORLD is not None
                dist.group.WORLD.abort()
        with contextlib.suppress(RuntimeError):  # other ranks may have exited
            dist.destroy_process_group()
