"""The ranks that compute one model together (tensor parallelism), and what they do with tensors.

Rank r has its own process and, on CUDA, device r. A model sees :class:`Group` alone; a group of one
is the identity and makes no call, so nothing is paid for what is not used.
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
from plimsoll_engine.kernels.ops import Ops, column_of
from plimsoll_engine.kernels.rank_sum_layout import MAX_RANKS, Layout

if TYPE_CHECKING:
    from plimsoll_engine.kernels.rank_sums import RankSums

FLAG = "--tensor-parallel-size"
COLLECTIVE_TIMEOUT_S = 60.0
"""Of the start of a group and of each collective outside a CUDA graph. Idle ranks wait in none."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""All ranks are processes of one host: their bootstrap needs no other interface. What the user has
set holds."""


class Shard(NamedTuple):
    """Which part of a model a process has: part ``rank`` of ``size`` equal ones."""

    rank: int = 0
    size: int = 1


WHOLE = Shard()


class SumShape(NamedTuple):
    """The sums that a model makes: of at most ``rows`` rows of ``columns`` elements of ``dtype``.

    More rows, or others, are summed as well, but not as fast.
    """

    rows: int
    columns: int
    dtype: torch.dtype


class Group:
    """A group of one: every collective returns what it was given."""

    shard = WHOLE

    @property
    def nbytes(self) -> int:
        """Device memory of this rank that the group holds."""
        return 0

    def add_norm(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Return :meth:`Ops.add_rms_norm` of the sum of ``x`` over all ranks.

        Of ``residual`` a rank may keep only what it needs for the next such sum of as many rows
        (:meth:`stream_rows` has it whole); what is returned is good until then.
        """
        return ops.add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def stream_rows(self, ops: Ops, residual: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the rows ``index`` int [rows] of what :meth:`add_norm` made of ``residual``.

        They are whole on each rank, [rows, columns].
        """
        return ops.rows(residual, index)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over all ranks, in place; any shape and dtype."""
        return x

    def best(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """int64 [rows]: the best column of all ranks' ``x`` [rows, columns] beside each other."""
        return ops.argmax(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, columns of all ranks in their order] of each rank's ``x`` [rows, columns]."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return what rank 0 has in ``x``, in place; any shape and dtype."""
        return x

    def close(self, lost: bool = False) -> None:
        """Leave the group; every rank does.

        ``lost``: some rank does not, and what is still under way is given up. Again does nothing
        more.
        """


ALONE = Group()


class ProcessGroup(Group):
    """Several processes: NCCL between CUDA devices, gloo between CPUs.

    The process's default group of ``torch.distributed``. They meet at ``store``, a file that none
    of an earlier group has used; no port is opened for it. On CUDA the collectives are launched
    into the current stream like kernels, and CUDA graphs may hold them: such graphs are reset
    before the group is closed. The sums of ``sums`` then go through memory that all ranks map,
    where their devices can.
    """

    def __init__(
        self, shard: Shard, device: torch.device, store: Path, sums: SumShape | None = None
    ) -> None:
        """Wait for all ranks. Raises RuntimeError where they do not come in time."""
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
            # With the device NCCL makes its communicator here, not in the first collective.
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
        """Return what each rank gives, once all have given it."""
        own = torch.tensor(list(data), dtype=torch.uint8, device=self._device)
        found = own.new_empty(self.shard.size, len(data))
        dist.all_gather_into_tensor(found, own)
        return [bytes(row) for row in found.tolist()]

    @property
    def nbytes(self) -> int:
        """Device memory of this rank that all ranks map. Zero on a CPU."""
        return 0 if self._memory is None else self._memory.nbytes

    def add_norm(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Return :meth:`Ops.add_rms_norm` of the sum of ``x`` over all ranks.

        One kernel where the ranks share memory. Of ``residual`` a rank may keep only what it needs
        for the next such sum of as many rows; what is returned is good until then.
        """
        if self._sums is None or not self._sums.takes(x):
            return super().add_norm(ops, x, residual, weight, eps)
        return self._sums.add_norm(x, residual, weight, eps)

    def stream_rows(self, ops: Ops, residual: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the rows ``index`` int [rows] of what :meth:`add_norm` made of ``residual``.

        They are whole on each rank, [rows, columns]: where ranks keep a share each, one exchange of
        these rows.
        """
        if self._sums is None or not self._sums.shares(residual):
            return super().stream_rows(ops, residual, index)
        return self.all_reduce(self._sums.kept(residual, index))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over all ranks, in place.

        Any shape and dtype, equal on all of them.
        """
        dist.all_reduce(x)
        return x

    def best(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """int64 [rows]: the best column of all ranks' ``x`` [rows, columns] beside each other.

        Of equal ones it is the first. A few bytes a row are exchanged, where :meth:`all_gather`
        exchanges the whole row.
        """
        keys = ops.best_keys(x, self.shard.rank * x.shape[1])
        dist.all_reduce(keys, dist.ReduceOp.MAX)
        return column_of(keys)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks beside each other.

        [rows, columns] becomes [rows, size * columns] of the same dtype.
        """
        rows, columns = x.shape
        size = self.shard.size
        found = x.new_empty(size * rows, columns)
        dist.all_gather_into_tensor(found, x.contiguous())
        return found.view(size, rows, columns).transpose(0, 1).reshape(rows, size * columns)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of rank 0 on every rank, in place; any shape and dtype, equal on all of them."""
        dist.broadcast(x, 0)
        return x

    def close(self, lost: bool = False) -> None:
        """End the group. With ``lost``, a rank is gone: nothing is waited for."""
        if not dist.is_initialized():
            return
        if self._memory is not None:
            self._sums = None
            if not lost:
                with contextlib.suppress(RuntimeError):  # a lost device cannot be waited for
                    torch.cuda.synchronize(self._device)
            self._memory.close(None if lost else self._gather)
        if lost:
            # Who waits on a CPU for a rank that is gone waits no more. NCCL's kernels may go on.
            with contextlib.suppress(RuntimeError):
                assert dist.group.WORLD is not None
                dist.group.WORLD.abort()
        with contextlib.suppress(RuntimeError):  # its peers may be gone already
            dist.destroy_process_group()
