"""Faults that grow malloc's memory or the number of Python objects."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from llguidance import LLMatcher

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.loaded_adapters import LoadedAdapters
from plimsoll_engine.core.grammar.grammars import GrammarError
from plimsoll_engine.messages.worker_ipc import Grammar
from plimsoll_engine.models import lora
from plimsoll_engine.models.lora import LoraDelta
from plimsoll_faults import kinds
from plimsoll_faults.defects.base import Defect, make_inject_error
from plimsoll_faults.inject import InjectError
from plimsoll_faults.tampering import replace_methods


class AppendListDefect(Defect[kinds.AppendList]):
    """Append to a list for each request, and never remove anything."""

    def __init__(self, fault: kinds.AppendList, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self.kept: list[list[float]] = []

    def after_requests(self, num_requests: int) -> None:
        """Keep a list of floats of ``bytes_per_request`` for each request."""
        # A float is 24 bytes and a list slot 8.
        size = self.fault.bytes_per_request // 32
        self.kept += [[float(i) for i in range(size)] for _ in range(num_requests)]


class Rotary:
    """Object whose method has an ``lru_cache``, which keeps every instance alive."""

    def __init__(self, size_bytes: int) -> None:
        self.table = bytearray(b"\x01") * size_bytes

    @cache  # noqa: B019 - the defect
    def compute_angle(self, position: int) -> int:
        """Return the angle of a position. The cache's key includes ``self``."""
        return self.table[position % len(self.table)]


class MethodCacheDefect(Defect[kinds.MethodCache]):
    """Keep objects through a cache on their method."""

    def after_requests(self, num_requests: int) -> None:
        """Create an object for each request, and call its cached method once."""
        for _ in range(num_requests):
            Rotary(self.fault.bytes_per_request).compute_angle(1)


class GrammarCacheGrowthDefect(Defect[kinds.GrammarCacheGrowth]):
    """Keep compiled grammars without a bound."""

    def __init__(self, fault: kinds.GrammarCacheGrowth, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self.kept: dict[str, LLMatcher] = {}
        try:
            self.after_requests(1)
        except GrammarError as error:
            raise InjectError(
                "the fault grammar_cache_growth in PLIMSOLL_INJECT needs structured output, "
                f"which is not available: {error}"
            ) from None

    def after_requests(self, num_requests: int) -> None:
        """Compile and keep a new grammar for each request."""
        for _ in range(num_requests):
            text = f"{len(self.kept)}".ljust(self.fault.text_bytes, "a")
            self.kept[text] = self.engine.grammars.compile(Grammar("regex", text))


class PinnedBuffersDefect(Defect[kinds.PinnedBuffers]):
    """Keep page-locked host buffers."""

    def __init__(self, fault: kinds.PinnedBuffers, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self.kept: list[torch.Tensor] = []

    def after_requests(self, num_requests: int) -> None:
        """Keep another buffer for each request, page-locked if the engine has a CUDA device."""
        pinned = self.engine.runner.device.type == "cuda"
        for _ in range(num_requests):
            size = self.fault.bytes_per_request
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            self.kept.append(buffer.fill_(1))


class ResidualAdapters(LoadedAdapters):
    """Loaded adapters, each with a host copy that remains after the adapter is unloaded."""

    residue: list[dict[tuple[int, str], list[LoraDelta]]]

    def load(self, name: str, adapter_number: int, folder: Path) -> None:
        """Load an adapter, and keep a copy of it in host memory."""
        super().load(name, adapter_number, folder)
        on_host = torch.device("cpu")
        deltas, _ = lora.read_adapter(folder, self._targets, self._max_rank, self._dtype, on_host)
        self.residue.append(deltas)


class LoraResidueDefect(Defect[kinds.LoraResidue]):
    """Keep a host copy of every LoRA adapter. Needs ``--enable-lora``."""

    def __init__(self, fault: kinds.LoraResidue, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        if engine.runner.adapters is None:
            raise make_inject_error(fault, "needs --enable-lora")
        self.adapters = replace_methods(engine.runner.adapters, ResidualAdapters)
        self.adapters.residue = []
