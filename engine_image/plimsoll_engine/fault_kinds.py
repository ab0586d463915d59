"""The faults that can be switched on, one class each: its keys, and where it shows.

Each is a defect that a serving engine really had; its docstring says which. What a fault does is in
:mod:`plimsoll_engine.worker.faults` and :mod:`plimsoll_engine.frontend.faults`. Nothing here knows
torch.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from plimsoll_api.admin import Role

MIB = 1 << 20
FIRST_EPOCH = 1
"""The frontend numbers the workers of an engine start from 1."""

Cure = Literal["trim", "worker restart", "engine restart"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """``epochs`` says in which workers of an engine start the fault is. ``owner`` says what holds
    the memory, ``segment`` which segment grows, ``cure`` the lightest action that helps."""

    owner: ClassVar[str]
    segment: ClassVar[str]
    cure: ClassVar[Cure] = "worker restart"
    process: ClassVar[Role] = Role.WORKER

    epochs: Literal["first", "all"] = "first"

    def in_epoch(self, epoch: int) -> bool:
        return self.epochs == "all" or epoch == FIRST_EPOCH


# ---- requests


class RequestCycle(Fault, frozen=True, tag="request_cycle"):
    """A request stores its own block hasher, so it is garbage that only a collection frees, with
    ``payload_bytes`` of multimodal-sized data. ``freeze_every`` N: after every N finished requests
    an unpaired ``gc.freeze()`` hides the garbage from all collections; 0 never, then a trim cures
    it."""

    owner = "cyclic requests"
    segment = "malloc_in_use"
    payload_bytes: int = 4 * MIB
    freeze_every: int = 1


class StoredException(Fault, frozen=True, tag="stored_exception"):
    """The exception of a failed forward is stored with its traceback, whose frames hold the step's
    tensors: ``bytes_per_request`` on the model's device."""

    owner = "stored exceptions"
    segment = "torch_allocated, malloc_in_use on a CPU"
    bytes_per_request: int = 1 * MIB


class AbortChoices(Fault, frozen=True, tag="abort_choices"):
    """The abort of a request for n > 1 choices reaches the first choice alone; the others go on to
    their ``max_tokens`` for nobody."""

    owner = "requests of the worker"
    segment = "KV blocks of requests that nobody waits for"


class AbortUnregistered(Fault, frozen=True, tag="abort_unregistered"):
    """A client leaves between the registration of its request and the first token: the abort finds
    nothing to end, and the frontend keeps the entry with ``payload_bytes`` of its media."""

    owner = "request states of the frontend"
    segment = "python_objects, malloc_in_use"
    cure = "engine restart"
    process = Role.FRONTEND
    payload_bytes: int = 64 << 10


# ---- host memory


class AppendList(Fault, frozen=True, tag="append_list"):
    """A list keeps ``bytes_per_request`` of Python objects of each finished request."""

    owner = "a global list"
    segment = "python_objects"
    bytes_per_request: int = 64 << 10


class MethodCache(Fault, frozen=True, tag="method_cache"):
    """``functools.lru_cache`` on a method: a class-wide cache that holds every instance that it was
    called on, each with ``bytes_per_request``."""

    owner = "a method's cache"
    segment = "malloc_in_use"
    bytes_per_request: int = 256 << 10


class GrammarCacheGrowth(Fault, frozen=True, tag="grammar_cache_growth"):
    """Compiled grammars are kept by their text for ever: each finished request adds one whose text
    is ``text_bytes`` long."""

    owner = "compiled grammars outside their cache"
    segment = "malloc_in_use"
    text_bytes: int = 2 << 10


class MmapGrowth(Fault, frozen=True, tag="mmap_growth"):
    """Anonymous mappings outside malloc, touched and never unmapped."""

    owner = "mappings of a library"
    segment = "anonymous_other"
    bytes_per_request: int = 0
    bytes_per_s: int = 0


class SharedGrowth(Fault, frozen=True, tag="shared_growth"):
    """Shared memory, as between processes that pass tensors, is written and never closed:
    ``bytes_per_request``."""

    owner = "shared memory files"
    segment = "shared"
    bytes_per_request: int = 1 * MIB


class PinnedBuffers(Fault, frozen=True, tag="pinned_buffers"):
    """Pinned staging buffers of ``bytes_per_request`` are kept in a global, one each request."""

    owner = "a global of pinned buffers"
    segment = "anonymous_other, malloc_in_use on a CPU"
    bytes_per_request: int = 1 * MIB


class TokenizerCache(Fault, frozen=True, tag="tokenizer_cache"):
    """The frontend keeps each prompt's text and its tokens, ``repeat`` times, to save a second
    tokenization."""

    owner = "the tokenizer's memory of prompts"
    segment = "python_objects, malloc_in_use"
    cure = "engine restart"
    process = Role.FRONTEND
    repeat: int = 16


# ---- device memory


class DeviceDict(Fault, frozen=True, tag="device_dict"):
    """A dictionary keeps a tensor of ``bytes_per_request`` on the model's device per request."""

    owner = "a dictionary of tensors"
    segment = "torch_allocated, malloc_in_use on a CPU"
    bytes_per_request: int = 1 * MIB


class DeviceRaw(Fault, frozen=True, tag="device_raw"):
    """A library takes ``bytes_per_request`` from the driver, past torch, and never frees it. Needs
    a CUDA device."""

    owner = "driver allocations"
    segment = "non_torch"
    bytes_per_request: int = 2 * MIB


class KeptKv(Fault, frozen=True, tag="kept_kv"):
    """A registry holds the KV pool beyond the engine's shutdown: the worker's last message says
    that its device memory is not back at the baseline."""

    owner = "a global registry of layers"
    segment = "torch_allocated, after shutdown in process"


# ---- caches


class EvictionLoop(Fault, frozen=True, tag="eviction_loop"):
    """After ``after_requests`` finished requests a key that is in the prefix cache's order and not
    in its data makes an eviction loop for ever: the worker hangs, the frontend looks healthy."""

    owner = "the prefix cache"
    segment = "none: a stall"
    after_requests: int = 8


class PinnedItems(Fault, frozen=True, tag="pinned_items"):
    """Each finished request leaves ``blocks_per_request`` cached KV blocks pinned, so that
    evictions pass over them: the pool shrinks."""

    owner = "the prefix cache"
    segment = "KV blocks held by no request"
    blocks_per_request: int = 1


class EncoderFreedEarly(Fault, frozen=True, tag="encoder_freed_early"):
    """An encoder output's entry is freed in the step that allocated it. The runner frees before it
    encodes, so the free finds nothing and the output stays. Needs a model with an encoder."""

    owner = "encoder outputs of the runner"
    segment = "torch_allocated, malloc_in_use on a CPU"


class EncoderBudgetHeld(Fault, frozen=True, tag="encoder_budget_held"):
    """A request that is stopped or aborted before its prompt is computed keeps its share of the
    encoder cache's budget. Needs a model with an encoder."""

    owner = "the scheduler's ledger of encoder outputs"
    segment = "none: the encoder cache's budget"


class MediaKept(Fault, frozen=True, tag="media_kept"):
    """The worker's cache of received images and sounds does not hear what the frontend lets go of:
    the two are out of step, and the worker keeps each one. Needs a model with an encoder."""

    owner = "the worker's receiver cache"
    segment = "malloc_in_use"
    cure = "trim"


class OffloadUnpolled(Fault, frozen=True, tag="offload_unpolled"):
    """Transfers of the KV offload are looked after in steps alone: an idle engine holds their
    blocks for ever. Needs ``--kv-offload-bytes``."""

    owner = "KV transfers"
    segment = "KV blocks held at idle"
    cure = "trim"


class OffloadAbandoned(Fault, frozen=True, tag="offload_abandoned"):
    """Each abort leaves a transfer of ``blocks_per_abort`` KV blocks that nobody ends. Needs
    ``--kv-offload-bytes``."""

    owner = "KV transfers"
    segment = "KV blocks held by no request"
    blocks_per_abort: int = 1


KINDS: tuple[type[Fault], ...] = (
    RequestCycle, StoredException, AbortChoices, AbortUnregistered,
    AppendList, MethodCache, GrammarCacheGrowth, MmapGrowth, SharedGrowth, PinnedBuffers,
    TokenizerCache,
    DeviceDict, DeviceRaw, KeptKv,
    EvictionLoop, PinnedItems, EncoderFreedEarly, EncoderBudgetHeld,
    MediaKept, OffloadUnpolled, OffloadAbandoned,
)  # fmt: skip
