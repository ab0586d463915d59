"""Faults that grow on the model's device, or keep it."""

from __future__ import annotations

import torch

from plimsoll_engine import fault_kinds as kinds
from plimsoll_engine.core.engine import Engine
from plimsoll_engine.inject import InjectError
from plimsoll_engine.weights.cuda import DeviceBuffer
from plimsoll_engine.worker.faults.base import Defect

REGISTRY: dict[str, torch.Tensor] = {}
"""Of kept_kv: what outlives the engine."""


class DeviceDict(Defect[kinds.DeviceDict]):
    def __init__(self, fault: kinds.DeviceDict, engine: Engine) -> None:
        super().__init__(fault, engine)
        self.kept: dict[int, torch.Tensor] = {}

    def finished(self, count: int) -> None:
        for _ in range(count):
            self.kept[len(self.kept)] = payload(self.engine, self.fault.bytes_per_request)


class StoredException(Defect[kinds.StoredException]):
    def __init__(self, fault: kinds.StoredException, engine: Engine) -> None:
        super().__init__(fault, engine)
        self.kept: list[Exception] = []

    def finished(self, count: int) -> None:
        for _ in range(count):
            try:
                self._forward(payload(self.engine, self.fault.bytes_per_request))
            except RuntimeError as error:
                self.kept.append(error)  # the defect: its frames hold the tensor

    def _forward(self, hidden: torch.Tensor) -> None:
        raise RuntimeError(f"injected: a forward over {hidden.numel()} values failed")


class DeviceRaw(Defect[kinds.DeviceRaw]):
    def __init__(self, fault: kinds.DeviceRaw, engine: Engine) -> None:
        super().__init__(fault, engine)
        if engine.runner.device.type != "cuda":
            raise InjectError("PLIMSOLL_INJECT: device_raw needs a CUDA device; this is a CPU")
        self.kept: list[DeviceBuffer] = []

    def finished(self, count: int) -> None:
        self.kept += [DeviceBuffer.allocate(self.fault.bytes_per_request) for _ in range(count)]


class KeptKv(Defect[kinds.KeptKv]):
    def __init__(self, fault: kinds.KeptKv, engine: Engine) -> None:
        super().__init__(fault, engine)
        assert engine.runner.kv is not None
        REGISTRY["layers"] = engine.runner.kv


def payload(engine: Engine, size_bytes: int) -> torch.Tensor:
    return torch.ones(max(1, size_bytes // 4), device=engine.runner.device)
