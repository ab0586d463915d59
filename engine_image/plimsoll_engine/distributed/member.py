"""Membership of a process in its group, from joining to leaving; free for a single process."""

from __future__ import annotations

import torch

from plimsoll_api.admin import MemoryKind
from plimsoll_engine.distributed.group import (
    ALONE,
    FLAG,
    WHOLE,
    Group,
    ProcessGroup,
    Shard,
    SumShape,
)
from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.distributed.link import Link
from plimsoll_engine.errors import SettingsError
from plimsoll_engine.messages import rank_ipc
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.process.owners import Owner


class Member:
    """One rank's place in its group, a part of its worker.

    ``end`` is this rank's side of the connections between the ranks, None without other ranks.
    ``leader`` is None except in rank 0 of several.
    """

    name = "ranks"

    def __init__(self, end: Leader | Link | None) -> None:
        self._end = end
        self.leader = end if isinstance(end, Leader) else None
        self.group: Group = ALONE
        self._kept = 0
        self._left: list[rank_ipc.RankShutdownReport] | None = []

    @property
    def shard(self) -> Shard:
        """Part of the model that this process has."""
        return WHOLE if self._end is None else self._end.shard

    @property
    def is_single_process(self) -> bool:
        """Report whether the worker is a single process."""
        return self._end is None

    @property
    def follows(self) -> bool:
        """Whether this is a rank above 0, which executes rank 0's commands."""
        return isinstance(self._end, Link)

    def check(self, config: WorkerConfig) -> None:
        """Raise SettingsError for settings that several ranks do not support."""
        size = config.tensor_parallel_size
        if size != self.shard.size:
            raise SettingsError(f"{FLAG} {size}, but {self.shard.size} ranks were started")
        if size > 1 and config.kv_offload_bytes:
            raise SettingsError(
                f"--kv-offload-bytes: not with {FLAG} {size}: host memory would have only the"
                " blocks of one rank; use only one of the two flags"
            )

    def meet(self) -> None:
        """Wait until each rank of the group has initialised its device."""
        if self._end is not None:
            self._end.join()

    def form(self, device: torch.device, sums: SumShape) -> None:
        """Form the process group for all-reduces of shape ``sums``, after :meth:`meet`."""
        if self._end is not None:
            self.group = ProcessGroup(self.shard, device, self._end.store, sums)

    @property
    def nbytes(self) -> int:
        """Device memory of this rank that its group holds or has not released."""
        return self._kept + self.group.nbytes

    def min_free_bytes(self, free: int | None) -> int | None:
        """Return the minimum of the free bytes of all ranks' devices, ``free`` on this one.

        All KV pools have the same size. None on a CPU.
        """
        values = [free]
        if self.leader is not None:
            values += [
                rank.bytes
                for rank in self.leader.ask(rank_ipc.MeasureFreeMemory(), rank_ipc.FreeMemory)
            ]
        return min((value for value in values if value is not None), default=None)

    def frozen(self) -> None:
        """Report to the other ranks that the start is complete."""
        if self.leader is not None:
            self.leader.tell(rank_ipc.Freeze())

    @property
    def lost(self) -> bool:
        """Whether another rank has failed."""
        return self.leader is not None and self.leader.lost

    def give_up(self) -> None:
        """Abort what waits for a lost rank. It affects only gloo; NCCL waits on the device."""
        self.group.close(lost=True)

    def owners(self) -> list[Owner]:
        """Return the device memory through which the ranks sum; none on a CPU or alone."""
        size, nbytes = self.shard.size, self.group.nbytes
        if not nbytes:
            return []
        return [
            Owner(
                name="rank_sums", kind=MemoryKind.DEVICE,
                nbytes=lambda: self.nbytes * size, bound=nbytes * size,
            )
        ]  # fmt: skip

    def close(self) -> None:
        """Leave the group; rank 0 has the others shut down. A second call does nothing.

        Call it after the CUDA graphs are closed, which hold collectives.
        """
        group, self.group = self.group, ALONE
        if self.leader is not None and group is not ALONE:
            self.leader.end()
            group.close()
            self._left = self.leader.ended()
        else:
            group.close()
        self._kept += group.nbytes

    @property
    def fenced(self) -> bool:
        """Whether no other rank can write to its KV pool any more. Asked after :meth:`close`."""
        return self._left is not None and all(rank.fenced for rank in self._left)

    def get_allocated_after_shutdown(
        self, allocated: int | None, baseline: int | None
    ) -> tuple[int | None, int | None]:
        """Return allocated device bytes and baselines of all ranks after shutdown.

        The arguments are those of this rank. None on a CPU, or if a rank did not report.
        """
        if self._left is None:
            return None, None
        return (
            _sum([allocated, *(rank.device_allocated for rank in self._left)]),
            _sum([baseline, *(rank.device_baseline for rank in self._left)]),
        )


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
