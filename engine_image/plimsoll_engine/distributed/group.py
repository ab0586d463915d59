"""The ranks that compute one model together (tensor parallelism), and what they do with tensors.

Rank r has its own process and, on CUDA, device r. A model sees :class:`Group` alone; a group of one
is the identity and makes no call, so nothing is paid for what is not used.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

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


class Group:
    """A group of one: every collective returns what it was given."""

    shard = WHOLE

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over all ranks, in place; any shape and dtype."""
        return x

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
    before the group is closed.
    """

    def __init__(self, shard: Shard, device: torch.device, store: Path) -> None:
        """Wait for all ranks. Raises RuntimeError where they do not come in time."""
        self.shard = shard
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
        except BaseException:
            self.close(lost=True)
            raise

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over all ranks, in place.

        Any shape and dtype, equal on all of them.
        """
        dist.all_reduce(x)
        return x

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
        if lost:
            # Who waits on a CPU for a rank that is gone waits no more. NCCL's kernels may go on.
            with contextlib.suppress(RuntimeError):
                assert dist.group.WORLD is not None
                dist.group.WORLD.abort()
        with contextlib.suppress(RuntimeError):  # its peers may be gone already
            dist.destroy_process_group()
