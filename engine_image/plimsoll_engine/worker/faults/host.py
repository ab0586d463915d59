"""Faults that grow in host memory."""

from __future__ import annotations

import mmap
import os
from functools import cache

import torch
from llguidance import LLMatcher

from plimsoll_engine import fault_kinds as kinds
from plimsoll_engine.core.engine import Engine
from plimsoll_engine.core.grammar import GrammarError
from plimsoll_engine.inject import InjectError
from plimsoll_engine.ipc import Grammar
from plimsoll_engine.worker.faults.base import Defect


class AppendList(Defect[kinds.AppendList]):
    def __init__(self, fault: kinds.AppendList, engine: Engine) -> None:
        super().__init__(fault, engine)
        self.kept: list[list[float]] = []

    def finished(self, count: int) -> None:
        # A float is 24 bytes and a list slot 8.
        size = self.fault.bytes_per_request // 32
        self.kept += [[float(i) for i in range(size)] for _ in range(count)]


class Rotary:
    """What a request's positions are computed by. The cache below holds each one."""

    def __init__(self, size_bytes: int) -> None:
        self.table = bytearray(b"\x01") * size_bytes

    @cache  # noqa: B019 - the defect
    def angle(self, position: int) -> int:
        return self.table[position % len(self.table)]


class MethodCache(Defect[kinds.MethodCache]):
    def finished(self, count: int) -> None:
        for _ in range(count):
            Rotary(self.fault.bytes_per_request).angle(1)


class GrammarCacheGrowth(Defect[kinds.GrammarCacheGrowth]):
    def __init__(self, fault: kinds.GrammarCacheGrowth, engine: Engine) -> None:
        super().__init__(fault, engine)
        self.kept: dict[str, LLMatcher] = {}
        try:
            self.finished(1)
        except GrammarError as error:
            raise InjectError(f"PLIMSOLL_INJECT: grammar_cache_growth: {error}") from None

    def finished(self, count: int) -> None:
        for _ in range(count):
            text = f"{len(self.kept)}".ljust(self.fault.text_bytes, "a")
            self.kept[text] = self.engine.grammars.compile(Grammar("regex", text))


class Mappings:
    """Mappings that are written, so resident, and never closed."""

    def __init__(self) -> None:
        self.kept: list[mmap.mmap] = []

    def add(self, size: int, shared: bool) -> None:
        if size < 1:
            return
        if shared:
            file = os.memfd_create("plimsoll-fault")
            os.ftruncate(file, size)
            mapping = mmap.mmap(file, size, flags=mmap.MAP_SHARED)
            os.close(file)
        else:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for offset in range(0, size, mmap.PAGESIZE):
            mapping[offset] = 1
        self.kept.append(mapping)


class MmapGrowth(Defect[kinds.MmapGrowth]):
    def __init__(self, fault: kinds.MmapGrowth, engine: Engine) -> None:
        super().__init__(fault, engine)
        self.mappings = Mappings()

    def finished(self, count: int) -> None:
        self.mappings.add(self.fault.bytes_per_request * count, shared=False)

    def tick(self, passed_s: float) -> None:
        self.mappings.add(int(self.fault.bytes_per_s * passed_s), shared=False)


class SharedGrowth(Defect[kinds.SharedGrowth]):
    def __init__(self, fault: kinds.SharedGrowth, engine: Engine) -> None:
        super().__init__(fault, engine)
        self.mappings = Mappings()

    def finished(self, count: int) -> None:
        self.mappings.add(self.fault.bytes_per_request * count, shared=True)


class PinnedBuffers(Defect[kinds.PinnedBuffers]):
    def __init__(self, fault: kinds.PinnedBuffers, engine: Engine) -> None:
        super().__init__(fault, engine)
        self.kept: list[torch.Tensor] = []

    def finished(self, count: int) -> None:
        pinned = self.engine.runner.device.type == "cuda"
        for _ in range(count):
            size = self.fault.bytes_per_request
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            self.kept.append(buffer.fill_(1))
