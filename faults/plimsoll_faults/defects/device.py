"""Faults that allocate or keep memory of the model's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.execute.sampling import SampledTokens, SamplingPlan
from plimsoll_engine.core.schedule.scheduler import Chunk
from plimsoll_engine.device.buffer import DeviceBuffer
from plimsoll_engine.distributed.group import RANKS_FLAG, ProcessGroup
from plimsoll_engine.kernels.ops import Ops
from plimsoll_engine.kernels.step_plan import StepPlan
from plimsoll_engine.messages.rank_ipc import Inputs
from plimsoll_faults import kinds
from plimsoll_faults.defects.base import Defect, make_inject_error, require_cuda
from plimsoll_faults.tampering import replace_methods

# The fault kept_kv keeps them after the engine's shutdown.
GLOBAL_TENSORS: dict[str, torch.Tensor] = {}


class DeviceDictDefect(Defect[kinds.DeviceDict]):
    """Keep a tensor for each request in a dictionary."""

    def __init__(self, fault: kinds.DeviceDict, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self.kept: dict[int, torch.Tensor] = {}

    def after_requests(self, num_requests: int) -> None:
        """Keep another tensor on the device for each request."""
        for _ in range(num_requests):
            self.kept[len(self.kept)] = make_payload(self.engine, self.fault.bytes_per_request)


class StoredExceptionDefect(Defect[kinds.StoredException]):
    """Store exceptions whose frames refer to tensors."""

    def __init__(self, fault: kinds.StoredException, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self.kept: list[Exception] = []

    def after_requests(self, num_requests: int) -> None:
        """Raise and store an exception for each request."""
        for _ in range(num_requests):
            try:
                self._forward(make_payload(self.engine, self.fault.bytes_per_request))
            except RuntimeError as error:
                self.kept.append(error)  # the defect: its frames hold the tensor

    def _forward(self, hidden: torch.Tensor) -> None:
        raise RuntimeError(f"injected fault: the forward pass over {hidden.numel()} values failed")


class DeviceRawDefect(Defect[kinds.DeviceRaw]):
    """Allocate from the driver instead of from torch's allocator. Needs CUDA."""

    def __init__(self, fault: kinds.DeviceRaw, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        require_cuda(fault, engine)
        self.kept: list[DeviceBuffer] = []

    def after_requests(self, num_requests: int) -> None:
        """Allocate another buffer for each request."""
        self.kept += [
            DeviceBuffer.allocate(self.fault.bytes_per_request) for _ in range(num_requests)
        ]


class KvPoolRetentionDefect(Defect[kinds.KvPoolRetention]):
    """Keep the KV pool in a registry, so that the shutdown of the worker does not free it."""

    def __init__(self, fault: kinds.KvPoolRetention, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        assert engine.runner.kv is not None
        GLOBAL_TENSORS["layers"] = engine.runner.kv


class SliceRetentionDefect(Defect[kinds.SliceRetention]):
    """Keep a slice of the first layer's input for each step that computes a prompt.

    A slice keeps the whole input of its step.
    """

    def __init__(self, fault: kinds.SliceRetention, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self.kept: list[torch.Tensor] = []
        if engine.runner.layers is not None:  # captured steps do not call the model's forward
            engine.runner.layers.close()
            engine.runner.layers = None
        model: Any = engine.runner.model
        forward = model.forward

        def forward_and_keep(
            ids: torch.Tensor, positions: torch.Tensor, step: StepPlan, embeds: Any = None
        ) -> torch.Tensor:
            states: torch.Tensor = model.embed(ids) if embeds is None else embeds
            if len(ids) > step.decodes:
                self.kept.append(states[-1:])  # the defect: no clone()
            hidden: torch.Tensor = forward(ids, positions, step, states)
            return hidden

        model.forward = forward_and_keep


class UnreleasedIpcTensorDefect(Defect[kinds.UnreleasedIpcTensor]):
    """Share tensors through CUDA IPC that no process ever opens or releases."""

    def __init__(self, fault: kinds.UnreleasedIpcTensor, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        require_cuda(fault, engine)

    def after_requests(self, num_requests: int) -> None:
        """Share a tensor for each request."""
        for _ in range(num_requests):
            storage: Any = make_payload(self.engine, self.fault.bytes_per_request).untyped_storage()
            storage._share_cuda_()


class MaskLeakRunner(Runner):
    """Runner that copies each grammar mask to the device and keeps the copy."""

    masks: list[torch.Tensor]

    def _sample_tokens(
        self, inputs: Inputs, chunks: Sequence[Chunk], sampling_plan: SamplingPlan
    ) -> SampledTokens | Exception | None:
        for mask in sampling_plan.masks:
            words = torch.frombuffer(bytearray(mask), dtype=torch.int32)
            self.masks.append(words.to(self.device))
        return super()._sample_tokens(inputs, chunks, sampling_plan)


class GrammarMasksDefect(Defect[kinds.GrammarMasks]):
    """Keep the grammar masks of all steps on the device. Needs CUDA."""

    def __init__(self, fault: kinds.GrammarMasks, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        require_cuda(fault, engine)
        self.runner = replace_methods(engine.runner, MaskLeakRunner)
        self.runner.masks = []


class ScratchProcessGroup(ProcessGroup):
    """Process group that keeps a scratch buffer with its own memory pool for each shape."""

    scratch: dict[torch.Size, tuple[torch.Tensor, torch.cuda.MemPool]]

    def add_norm(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Copy ``x`` to a scratch buffer before the operation."""
        return super().add_norm(ops, self._copy_to_scratch(x), residual, weight, eps)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over all ranks in a scratch buffer."""
        copy = self._copy_to_scratch(x)
        return super().all_reduce(x) if copy is x else x.copy_(super().all_reduce(copy))

    def _copy_to_scratch(self, x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            return x
        if x.shape not in self.scratch:
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                self.scratch[x.shape] = torch.empty_like(x), pool
        buffer, _ = self.scratch[x.shape]
        return buffer if buffer.data_ptr() == x.data_ptr() else buffer.copy_(x)


class CollectiveScratchDefect(Defect[kinds.CollectiveScratch]):
    """Keep a scratch buffer for each tensor shape in collectives. Needs CUDA."""

    def __init__(self, fault: kinds.CollectiveScratch, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        require_cuda(fault, engine)
        group = engine.runner.group
        if not isinstance(group, ProcessGroup):
            raise make_inject_error(fault, f"needs {RANKS_FLAG} of at least 2")
        self.group = replace_methods(group, ScratchProcessGroup)
        self.group.scratch = {}


def make_payload(engine: EngineCore, size_bytes: int) -> torch.Tensor:
    """Return a float32 tensor [size_bytes / 4] of ones on the engine's device."""
    return torch.ones(max(1, size_bytes // 4), device=engine.runner.device)
