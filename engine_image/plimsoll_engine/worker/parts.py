"""Parts of a worker that its lifecycle opens and closes, except the engine core."""

from __future__ import annotations

import gc
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from plimsoll_api.admin import MemoryKind, Role
from plimsoll_engine.device.buffer import retain_primary_context
from plimsoll_engine.distributed.member import Member
from plimsoll_engine.messages import rank_ipc
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import draft as draft_models
from plimsoll_engine.models import loader
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.models.loader import NativeModel
from plimsoll_engine.models.model import Model
from plimsoll_engine.process.collector import FullCollectionCounter
from plimsoll_engine.process.owners import Owner
from plimsoll_engine.process.rules import freeze_counter
from plimsoll_engine.weights.mapping import WeightMapping

# Full collections are rare, because they pause all streams.
GC_THRESHOLDS = (20_000, 50, 1_000)
# Number of hardware queues that the driver creates for each context.
QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


class DeviceContext:
    """CUDA context or CPU of this worker, and its baseline of allocated device bytes."""

    name = "device"

    def __init__(self) -> None:
        self.device: torch.device | None = None
        # Device bytes allocated before the worker allocates any itself; None on a CPU.
        self.baseline: int | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device is not None and self.device.type == "cuda"

    def open(self, dtype: torch.dtype) -> None:
        """Make the device current in this thread, and measure its baseline with ``dtype``."""
        assert self.device is not None
        if self.is_cuda:
            torch.cuda.set_device(self.device)
        torch.set_float32_matmul_precision("highest")
        self.baseline = measure_baseline_bytes(self.device, dtype)

    def list_owners(self) -> list[Owner]:
        """Return an empty list, because the context belongs to the driver."""
        return []

    def measure_free_bytes(self) -> int | None:
        """Return the free device memory in bytes; None on a CPU."""
        return int(torch.cuda.mem_get_info(self.device)[0]) if self.is_cuda else None

    def read_allocated_bytes(self) -> int | None:
        """Return the device memory that torch has allocated, in bytes; None on a CPU."""
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else None

    def close(self) -> None:
        """Release the device memory in torch's caches. Idempotent."""
        if has_used_torch_compile():
            torch.compiler.reset()
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):  # the interpreter's own references to a traceback
                delattr(sys, name)
        if self.is_cuda:
            release_device_caches()


class Weights:
    """Weights of the model and of the draft model, loaded or mapped from a weight server."""

    name = "weights"

    def __init__(self, config: WorkerConfig, member: Member) -> None:
        self._config = config
        self._member = member
        self.model: Model | None = None
        self._unbound: NativeModel | None = None
        self.draft: Decoder | None = None
        # As uint8 [bytes].
        self.pool: torch.Tensor | None = None
        # True once this process can no longer write to the KV pool of the weight server.
        self.is_fenced = False
        self._mapping: WeightMapping | None = None
        self._sizes: dict[str, int] = {}

    def request_weights(self, model_config: Any, dtype: torch.dtype) -> None:
        """Request the weights from the weight server, if it serves this model."""
        if not self._config.weights:
            return
        shard = self._member.shard
        self._unbound = loader.build_model(Path(self._config.model), model_config, dtype, shard)
        if self._unbound is not None:
            self._mapping = WeightMapping(self._config.weights, shard.rank)

    @property
    def is_mapped(self) -> bool:
        """Whether the weight server owns the weights."""
        return self._mapping is not None

    def map_weights(self) -> dict[str, torch.Tensor]:
        """Map the weights and the KV pool of the weight server, and return the weights by name."""
        assert self._mapping is not None
        tensors = self._mapping.map_weights()
        self.map_pool()
        return tensors

    def open(
        self,
        mapped: dict[str, torch.Tensor] | None,
        model_config: Any,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Model:
        """Return the model with the ``mapped`` weights; if None, load them from files."""
        draft = None if self._config.draft_model is None else Path(self._config.draft_model)
        if mapped is not None and self._unbound is not None:
            own, drafts = draft_models.split_tensors(mapped)
            loader.bind_tensors(self._unbound, own)
            self.model = self._unbound
            if draft is not None:
                self.draft = draft_models.build_draft_model(draft, dtype)
                loader.bind_tensors(self.draft, drafts)
        else:
            folder = Path(self._config.model)
            self.model = loader.load_model(folder, model_config, dtype, device, self._member.shard)
            if draft is not None:
                self.draft = draft_models.load_draft_model(draft, dtype, device)
        if isinstance(self.model, Decoder):
            self.model.group = self._member.group
        of_rank = _count_bytes(self.model) if self._mapping is None else self._mapping.nbytes
        self._sizes = {"weights": of_rank * self._member.shard.size}
        if self.draft is not None:
            self._sizes["draft_weights"] = drafted = _count_bytes(self.draft)
            self._sizes["weights"] -= drafted if self.is_mapped else 0  # they are mapped together
        return self.model

    def map_pool(self, nbytes: int = 0) -> torch.Tensor | None:
        """Return this rank's KV pool on the weight server as uint8 [bytes].

        If there is none, create one of ``nbytes`` bytes. Return None without a weight server, or if
        there is no pool and ``nbytes`` is 0.
        """
        if self._mapping is not None and self.pool is None:
            self.pool = self._mapping.map_pool(nbytes)
        return self.pool

    def claim_pool(self) -> rank_ipc.PoolReply:
        """Claim the weight server's KV pool for this process, and return the server's reply."""
        if self._mapping is None or self.pool is None:
            return rank_ipc.PoolReply()
        alone = self._mapping.claim_pool()
        return rank_ipc.PoolReply(self._mapping.identity, self._mapping.pool_identity, alone)

    @property
    def mapped_bytes(self) -> int:
        """Memory of the weight server that this process maps, in bytes."""
        return 0 if self._mapping is None else self._mapping.nbytes + self._mapping.pool_nbytes

    def list_owners(self) -> list[Owner]:
        """Return the owners of all ranks' weights, including those of the draft model."""
        if self.model is None:
            return []
        process = Role.WEIGHT_SERVER if self.is_mapped else Role.WORKER
        kind = MemoryKind.DEVICE if self.model.device.type == "cuda" else MemoryKind.HOST
        return [
            Owner(name=name, kind=kind, nbytes=partial(int, nbytes), bound=nbytes, process=process)
            for name, nbytes in self._sizes.items()
        ]

    def close(self) -> None:
        """Close the models, and unmap their weights. Idempotent."""
        for model in (self.model, self.draft):
            if model is not None:
                model.close()
        self.model = self.draft = self.pool = self._unbound = None
        if self._mapping is not None:
            self.is_fenced = self._mapping.unmap() and self._member.is_fenced
            self._mapping = None


class GarbageCollectorSettings:
    """Garbage collector settings of a serving worker."""

    name = "heap"

    def __init__(self) -> None:
        self.collections = FullCollectionCounter()
        self._thresholds: tuple[int, int, int] | None = None

    def open(self) -> None:
        """Exclude all existing objects from garbage collection until :meth:`close`."""
        self._thresholds = gc.get_threshold()
        freeze_counter.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        self.collections.start()

    def list_owners(self) -> list[Owner]:
        """Return an empty list, because other owners count the excluded objects."""
        return []

    def close(self) -> None:
        """Restore the previous settings. Idempotent."""
        self.collections.stop()
        if self._thresholds is not None:
            gc.set_threshold(*self._thresholds)
            freeze_counter.unfreeze()
            self._thresholds = None


def _count_bytes(model: Model) -> int:
    return sum(tensor.nbytes for tensor in model.get_parameters().values())


def has_used_torch_compile() -> bool:
    """Report whether torch.compile has compiled anything in this process."""
    # Importing the compiler only to reset it would add 2 s to a restart.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters)


def limit_hardware_queues() -> None:
    """Make the driver create one hardware queue per context. Keep a number that the user has set.

    Call this before CUDA is initialised. By default, the driver creates several queues, and does so
    for one process at a time. On four H200s, four contexts then take 0.6 s instead of 0.25 s. With
    one queue, kernels of different streams do not overlap.
    """
    os.environ.setdefault(QUEUES_VARIABLE, "1")


def create_context(device: torch.device) -> None:
    """Create the CUDA context of ``device``, and make it current in this thread."""
    if device.type == "cuda":
        with retain_primary_context(device.index):
            torch.cuda.set_device(device)
            torch.cuda.synchronize(device)


def measure_baseline_bytes(device: torch.device, dtype: torch.dtype) -> int | None:
    """Return the device bytes allocated after a first use of ``dtype``; None on a CPU."""
    if device.type != "cuda":
        return None
    square = torch.ones(64, 64, dtype=dtype, device=device)
    torch.nn.functional.linear(square, square)
    torch.cuda.synchronize(device)
    del square
    release_device_caches()
    return torch.cuda.memory_allocated(device)


def release_device_caches() -> None:
    """Release the memory in torch's caches: cuBLAS workspaces, free segments and pinned memory."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
