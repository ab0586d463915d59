"""Faults that grow the worker's host memory."""

from __future__ import annotations

from typing import Literal

from plimsoll_faults.kinds.base import MIB, Fault


class AppendList(Fault, frozen=True, tag="append_list"):
    """A list keeps ``bytes_per_request`` of Python objects for each finished request."""

    owner = "a global list"
    segment = "python_objects"
    bytes_per_request: int = 64 << 10


class MethodCache(Fault, frozen=True, tag="method_cache"):
    """``functools.lru_cache`` is applied to a method.

    The cache belongs to the class and keeps every instance that the method was called on, each with
    ``bytes_per_request``.
    """

    owner = "a method's cache"
    segment = "malloc_in_use"
    bytes_per_request: int = 256 << 10


class GrammarCacheGrowth(Fault, frozen=True, tag="grammar_cache_growth"):
    """Compiled grammars are kept forever, one for each text.

    Each finished request adds a grammar of ``text_bytes``.
    """

    owner = "compiled grammars outside their cache"
    segment = "malloc_in_use"
    text_bytes: int = 2 << 10


class MmapGrowth(Fault, frozen=True, tag="mmap_growth"):
    """Anonymous mappings outside malloc are written and never unmapped."""

    owner = "mappings of a library"
    segment = "anonymous_other"
    bytes_per_request: int = 0
    bytes_per_s: int = 0


class SwappedGrowth(Fault, frozen=True, tag="swapped_growth"):
    """Anonymous mappings of ``bytes_per_request`` are never used again and are swapped out.

    Resident memory stays constant while the process grows (ollama#18106: 9.35 GiB leaked, 70 MiB
    resident). Needs swap, on the machine and in the limits of the container.
    """

    owner = "mappings of a library, swapped out"
    segment = "anonymous_other"
    bytes_per_request: int = 1 * MIB


class SharedGrowth(Fault, frozen=True, tag="shared_growth"):
    """Shared memory of ``bytes_per_request`` is written and never closed.

    Processes that exchange tensors use such memory.
    """

    owner = "shared memory files"
    segment = "shared"
    bytes_per_request: int = 1 * MIB


class SharedOrphan(Fault, frozen=True, tag="shared_orphan"):
    """A request's data is passed in a named segment that is never removed.

    The receiver should remove the segment, but never starts (sglang#40723). The segment has
    ``bytes_per_request``. No process holds it, so it outlives the worker and the container.
    ``family`` is a file in /dev/shm (``posix``) or a SysV segment (``sysv``). A worker restart
    stops the growth, but frees nothing.
    """

    owner = "segments that no process holds"
    segment = "shared_orphan"
    cure = "pod replacement"
    bytes_per_request: int = 1 * MIB
    family: Literal["posix", "sysv"] = "posix"


class PinnedBuffers(Fault, frozen=True, tag="pinned_buffers"):
    """A global variable keeps a pinned staging buffer of ``bytes_per_request`` for each request."""

    owner = "a global of pinned buffers"
    segment = "anonymous_other, malloc_in_use on a CPU"
    bytes_per_request: int = 1 * MIB


class LoraResidue(Fault, frozen=True, tag="lora_residue"):
    """Each loaded adapter leaves a copy of its tensors in host memory.

    The copy remains after the adapter is unloaded. Needs ``--enable-lora``.
    """

    owner = "host copies of LoRA adapters"
    segment = "malloc_in_use"
