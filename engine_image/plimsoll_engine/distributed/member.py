"""Membership of a process in the group of its worker's ranks."""

from __future__ import annotations

import torch

from plimsoll_api.admin import MemoryKind
from plimsoll_engine.distributed.group import (
    RANKS_FLAG,
    SINGLE_RANK_GROUP,
    WHOLE_MODEL,
    AllReduceShape,
    Group,
    ProcessGroup,
    Shard,
)
from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.distributed.link import LeaderConnection
from plimsoll_engine.errors import SettingsError
from plimsoll_engine.messages import rank_ipc
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.process.owners import Owner


class Member:
    """Membership of this process in the group of its worker's ranks.

    ``connection`` is None for a single rank. ``leader`` is None on ranks above 0.
    """

    name = "ranks"

    def __init__(self, connection: Leader | LeaderConnection | None) -> None:
        self._connection = connection
        self.leader = connection if isinstance(connection, Leader) else None
        self.group: Group = SINGLE_RANK_GROUP
        self._unreleased = 0
        self._reports: list[rank_ipc.RankShutdownReport] | None = []

    @property
    def shard(self) -> Shard:
        """Share of the model that this process computes."""
        return WHOLE_MODEL if self._connection is None else self._connection.shard

    @property
    def is_single_process(self) -> bool:
        """Whether the worker has only one rank."""
        return self._connection is None

    @property
    def is_follower(self) -> bool:
        """Whether this rank executes the commands of rank 0."""
        return isinstance(self._connection, LeaderConnection)

    def check_settings(self, config: WorkerConfig) -> None:
        """Raise SettingsError if several ranks do not support a setting in ``config``."""
        size = config.tensor_parallel_size
        if size != self.shard.size:
            raise SettingsError(
                f"{RANKS_FLAG} is {size}, but {self.shard.size} ranks were started: start "
                f"{size} ranks"
            )
        if size > 1 and config.kv_offload_bytes:
            raise SettingsError(
                f"--kv-offload-bytes is not supported with {RANKS_FLAG} {size}, because host "
                "memory would contain only the blocks of one rank: remove one of the two "
                "flags"
            )

    def join_group(self) -> None:
        """Join the group once this rank has initialised its device. Rank 0 waits for all ranks."""
        if self._connection is not None:
            self._connection.join_group()

    def form_group(self, device: torch.device, sum_shape: AllReduceShape) -> None:
        """Form the process group, optimised for all-reduces of ``sum_shape``."""
        if self._connection is not None:
            self.group = ProcessGroup(self.shard, device, self._connection.store, sum_shape)

    @property
    def nbytes(self) -> int:
        """Device memory of the group on this rank, in bytes."""
        return self._unreleased + self.group.nbytes

    def find_min_free_bytes(self, free_bytes: int | None) -> int | None:
        """Return the minimum of ``free_bytes`` over all ranks; None on a CPU."""
        values = [free_bytes]
        if self.leader is not None:
            values += [
                rank.bytes
                for rank in self.leader.request_replies(
                    rank_ipc.MeasureFreeMemory(), rank_ipc.FreeMemory
                )
            ]
        return min((value for value in values if value is not None), default=None)

    def report_started(self) -> None:
        """Send the other ranks the message that the worker has started."""
        if self.leader is not None:
            self.leader.send(rank_ipc.Freeze())

    @property
    def lost(self) -> bool:
        """Whether another rank has failed."""
        return self.leader is not None and self.leader.lost

    def abort_collectives(self) -> None:
        """Abort gloo's collectives, in which this process may wait for a lost rank."""
        self.group.close(is_rank_lost=True)

    def list_owners(self) -> list[Owner]:
        """Return the owner of the device memory for collectives, or an empty list."""
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

        Reset the CUDA graphs first, because they contain collectives.
        """
        group, self.group = self.group, SINGLE_RANK_GROUP
        if self.leader is not None and group is not SINGLE_RANK_GROUP:
            self.leader.start_shutdown()
            group.close()
            self._reports = self.leader.wait_until_shut_down()
        else:
            group.close()
        self._unreleased += group.nbytes

    @property
    def is_fenced(self) -> bool:
        """Whether no other rank can write to its KV pool. Valid after :meth:`close`."""
        return self._reports is not None and all(rank.fenced for rank in self._reports)

    def get_allocated_after_shutdown(
        self, allocated: int | None, baseline: int | None
    ) -> tuple[int | None, int | None]:
        """Return ``allocated`` and ``baseline`` device bytes, each summed over all ranks.

        A sum is None on a CPU, or if a rank sent no report.
        """
        if self._reports is None:
            return None, None
        return (
            _sum_if_all_known([allocated, *(rank.device_allocated for rank in self._reports)]),
            _sum_if_all_known([baseline, *(rank.device_baseline for rank in self._reports)]),
        )


def _sum_if_all_known(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
