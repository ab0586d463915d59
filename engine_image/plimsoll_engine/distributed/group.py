"""Group of ranks that compute one model together (tensor parallelism), and its collectives."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from plimsoll_engine.distributed.peer_memory import PeerMemory
from plimsoll_engine.kernels.collective_buffer import MAX_RANKS, BufferLayout
from plimsoll_engine.kernels.ops import Ops, decode_argmax_keys

if TYPE_CHECKING:
    from plimsoll_engine.kernels.all_reduce import AllReduce
    from plimsoll_engine.kernels.collectives import Collectives

RANKS_FLAG = "--tensor-parallel-size"
# For forming a group, and for each collective outside of CUDA graphs.
COLLECTIVE_TIMEOUT_S = 60.0
# All ranks run on one host. Values that the user has set take precedence.
LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class Shard(NamedTuple):
    """One of ``size`` equal shares of a model."""

    rank: int = 0
    size: int = 1


WHOLE_MODEL = Shard()


class AllReduceShape(NamedTuple):
    """Largest all-reduce of a model: up to ``rows`` rows of ``columns`` elements."""

    rows: int
    columns: int
    dtype: torch.dtype


class Group:
    """Group of one rank, whose collectives return their input."""

    shard = WHOLE_MODEL

    @property
    def nbytes(self) -> int:
        """Device memory of the group on this rank, in bytes."""
        return 0

    def add_norm(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the sum of all ranks' ``x`` to ``residual`` in place, and return the RMSNorm.

        A rank may update only some rows of ``residual``: read it with :meth:`get_residual_rows`.
        The result is valid until the next call with the same number of rows.
        """
        return ops.add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def get_residual_rows(
        self, ops: Ops, residual: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """Return the rows at ``index`` int [rows] of ``residual``, complete on every rank."""
        return ops.gather_rows(residual, index)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Replace ``x``, of any shape and dtype, by its sum over all ranks, and return it."""
        return x

    def compute_argmax(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """Return the argmax of each row, int64 [rows], over the columns of ``x`` on all ranks."""
        return ops.argmax(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of ``x`` [rows, columns] on all ranks, concatenated in rank order."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Replace ``x``, of any shape and dtype, by the ``x`` of rank 0, and return it."""
        return x

    def close(self, is_rank_lost: bool = False) -> None:
        """Leave the group on every rank. Idempotent.

        Set ``is_rank_lost`` if another rank has exited, to abort running collectives.
        """


SINGLE_RANK_GROUP = Group()


class TorchCollectives:
    """Collectives by ``torch.distributed``, with the interface of :class:`Collectives`."""

    def __init__(self, num_ranks: int, group: dist.ProcessGroup | None = None) -> None:
        self._size, self._group = num_ranks, group

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` of all ranks, as [ranks, *shape of x]."""
        out = x.new_empty(self._size, *x.shape)
        dist.all_gather_into_tensor(out.flatten(0, 1), x, group=self._group)
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Replace ``x`` by its sum over all ranks, and return it."""
        dist.all_reduce(x, group=self._group)
        return x

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Replace each element of ``x`` by its maximum over all ranks, and return ``x``."""
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self._group)
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Replace ``x`` by the ``x`` of rank 0, and return it."""
        dist.broadcast(x, 0, group=self._group)
        return x


class ProcessGroup(Group):
    """Group of several processes.

    On CUDA, it uses memory that all ranks map, or NCCL if the devices cannot map each other's
    memory. On CPUs, it uses gloo. Reset CUDA graphs with its collectives before you close it.
    """

    def __init__(
        self,
        shard: Shard,
        device: torch.device,
        store: Path,
        sum_shape: AllReduceShape | None = None,
    ) -> None:
        """Form the group once all ranks have joined through the new file ``store``.

        Raises RuntimeError on a timeout.
        """
        self.shard = shard
        self._device = device
        self._memory: PeerMemory | None = None
        self._sums: AllReduce | None = None
        self._collectives: Collectives | TorchCollectives = TorchCollectives(shard.size)
        for name, value in LOOPBACK_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), shard.size),  # type: ignore[attr-defined]
            rank=shard.rank,
            world_size=shard.size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        try:
            dist.barrier()
            if device.type == "cuda":
                if sum_shape is not None:
                    self._connect(sum_shape)
                if self._sums is None:
                    self._open_nccl()
        except BaseException:
            self.close(is_rank_lost=True)
            raise

    def _connect(self, sum_shape: AllReduceShape) -> None:
        from plimsoll_engine.kernels.all_reduce import AllReduce, choose_layout
        from plimsoll_engine.kernels.collectives import Collectives

        rank, size = self.shard
        if size > MAX_RANKS or sum_shape.columns * sum_shape.dtype.itemsize % 16:
            return
        sum_layout: BufferLayout = choose_layout(
            size, sum_shape.rows, sum_shape.columns, sum_shape.dtype
        )
        self._memory = PeerMemory.connect(rank, size, sum_layout.nbytes, self._exchange_bytes)
        if self._memory is not None:
            addresses = self._memory.addresses
            self._sums = AllReduce(
                self._memory.as_tensor(), addresses, rank, sum_layout, sum_shape.dtype
            )
            self._collectives = Collectives(self._sums)

    def _open_nccl(self) -> None:
        # With device_id, NCCL creates its communicator now, not in the first collective.
        nccl = dist.new_group(
            backend="nccl",
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            device_id=self._device,
        )
        self._collectives = TorchCollectives(self.shard.size, nccl)
        self.all_reduce(torch.zeros(1, device=self._device))
        torch.cuda.synchronize(self._device)

    def _exchange_bytes(self, data: bytes) -> list[bytes]:
        local = torch.tensor(list(data), dtype=torch.uint8)
        gathered = [torch.empty_like(local) for _ in range(self.shard.size)]
        dist.all_gather(gathered, local)
        return [bytes(part.tolist()) for part in gathered]

    @property
    def nbytes(self) -> int:
        """Device memory of this rank that all ranks map, in bytes."""
        return 0 if self._memory is None else self._memory.nbytes

    def add_norm(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Implement :meth:`Group.add_norm`, in one kernel if the ranks share memory."""
        if self._sums is None or not self._sums.supports(x):
            return super().add_norm(ops, x, residual, weight, eps)
        return self._sums.add_norm(x, residual, weight, eps)

    def get_residual_rows(
        self, ops: Ops, residual: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """Implement :meth:`Group.get_residual_rows`."""
        if self._sums is None or not self._sums.is_split_by_rank(residual):
            return super().get_residual_rows(ops, residual, index)
        return self.all_reduce(self._sums.get_own_rows(residual, index))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Implement :meth:`Group.all_reduce`. All ranks must pass the same shape and dtype."""
        return self._collectives.all_reduce(x)

    def compute_argmax(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """Implement :meth:`Group.compute_argmax`, which prefers the first maximum."""
        keys = ops.compute_argmax_keys(x, self.shard.rank * x.shape[1])
        return decode_argmax_keys(self._collectives.all_reduce_max(keys))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of ``x`` [rows, columns] on all ranks, as [rows, size * columns]."""
        rows, columns = x.shape
        gathered = self._collectives.all_gather(x.contiguous())
        return gathered.transpose(0, 1).reshape(rows, self.shard.size * columns)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Implement :meth:`Group.broadcast`. All ranks must pass the same shape and dtype."""
        return self._collectives.broadcast(x)

    def close(self, is_rank_lost: bool = False) -> None:
        """Destroy the group. If ``is_rank_lost``, do not wait for the other ranks."""
        if not dist.is_initialized():
            return
        if self._memory is not None:
            self._sums, self._collectives = None, TorchCollectives(self.shard.size)
            if not is_rank_lost:
                with contextlib.suppress(RuntimeError):  # raised if the device is lost
                    torch.cuda.synchronize(self._device)
            self._memory.close(None if is_rank_lost else self._exchange_bytes)
        if is_rank_lost:
            # Stop gloo from waiting for the lost rank. NCCL's kernels may continue to run.
            with contextlib.suppress(RuntimeError):
                assert dist.group.WORLD is not None
                dist.group.WORLD.abort()
        with contextlib.suppress(RuntimeError):  # other ranks may have exited already
            dist.destroy_process_group()
