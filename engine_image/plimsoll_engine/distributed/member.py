"""Membership of a worker process in its group of ranks; a single process is its own group."""

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
    """Membership of this worker in a group of ranks.

    ``end`` is this rank's connection to the others; None in a single process. ``leader`` is set
    only on rank 0 of several.
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
        """Whether no other rank belongs to the worker."""
        return self._end is None

    @property
    def is_follower(self) -> bool:
        """Whether this rank executes the commands of rank 0."""
        return isinstance(self._end, Link)

    def check_settings(self, config: WorkerConfig) -> None:
        """Raise SettingsError for a setting that several ranks do not support."""
        size = config.tensor_parallel_size
        if size != self.shard.size:
            raise SettingsError(
                f"{FLAG} {size}: {self.shard.size} ranks were started; start {size}"
            )
        if size > 1 and config.kv_offload_bytes:
            raise SettingsError(
                f"--kv-offload-bytes is not supported with {FLAG} {size}, because host memory "
                "would only have the blocks of one rank; remove one of the two flags"
            )

    def join_group(self) -> None:
        """Wait until every rank has initialised its device."""
        if self._end is not None:
            self._end.join_group()

    def form_group(self, device: torch.device, sums: SumShape) -> None:
        """Form the process group, optimised for all-reduces of shape ``sums``.

        Call :meth:`join_group` first.
        """
        if self._end is not None:
            self.group = ProcessGroup(self.shard, device, self._end.store, sums)

    @property
    def nbytes(self) -> int:
        """Device memory that the group holds on this rank or has not released, in bytes."""
        return self._kept + self.group.nbytes

    def find_min_free_bytes(self, free: int | None) -> int | None:
        """Return the minimum of all ranks' free device bytes; None on a CPU.

        ``free`` is this rank's value.

        It limits the KV pool, which has the same size on each rank.
        """
        values = [free]
        if self.leader is not None:
            values += [
                rank.bytes
                for rank in self.leader.request(rank_ipc.MeasureFreeMemory(), rank_ipc.FreeMemory)
            ]
        return min((value for value in values if value is not None), default=None)

    def report_started(self) -> None:
        """Report to the other ranks that the start is complete."""
        if self.leader is not None:
            self.leader.send(rank_ipc.Freeze())

    @property
    def lost(self) -> bool:
        """Whether another rank has failed."""
        return self.leader is not None and self.leader.lost

    def abort_collectives(self) -> None:
        """Abort gloo's collectives, which may wait for a lost rank. NCCL waits on the device."""
        self.group.close(lost=True)

    def list_owners(self) -> list[Owner]:
        """Return the device memory for all-reduces; empty on a CPU or with one rank."""
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
        """Leave the group, and shut down the other ranks if this is rank 0. Idempotent.

        Close the CUDA graphs first, because they contain collectives.
        """
        group, self.group = self.group, ALONE
        if self.leader is not None and group is not ALONE:
            self.leader.start_shutdown()
            group.close()
            self._left = self.leader.wait_until_shut_down()
        else:
            group.close()
        self._kept += group.nbytes

    @property
    def fenced(self) -> bool:
        """Whether no other rank can still write to its KV pool. Valid after :meth:`close`."""
        return self._left is not None and all(rank.fenced for rank in self._left)

    def get_allocated_after_shutdown(
        self, allocated: int | None, baseline: int | None
    ) -> tuple[int | None, int | None]:
        """Return device bytes of all ranks after shutdown: still allocated, and the baseline.

        The arguments are those of this rank. None on a CPU, or if a rank sent no report.
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
