"""Faults of caches: inconsistent keys, leaked pins, and entries freed too early or never."""

from __future__ import annotations

from typing import Literal

from plimsoll_faults.kinds.base import Fault


class EvictionLoop(Fault, frozen=True, tag="eviction_loop"):
    """After ``after_requests`` finished requests, an eviction loops forever.

    The usage order of the prefix cache has a key without a value. The worker hangs, while the
    frontend seems healthy.
    """

    owner = "the prefix cache"
    segment = "none: a stall"
    after_requests: int = 8


class PinnedItems(Fault, frozen=True, tag="pinned_items"):
    """Each finished request leaves ``blocks_per_request`` cached KV blocks pinned.

    Evictions skip them, so the pool shrinks.
    """

    owner = "the prefix cache"
    segment = "KV blocks held by no request"
    blocks_per_request: int = 1


class EncoderEarlyFree(Fault, frozen=True, tag="encoder_freed_early"):
    """The encoder cache frees an entry in the step that reserves it.

    The runner encodes the entry only after this, so the encoder's output is never freed. Needs a
    model with an encoder.
    """

    owner = "encoder outputs of the runner"
    segment = "torch_allocated, malloc_in_use on a CPU"


class EncoderBudgetLeak(Fault, frozen=True, tag="encoder_budget_held"):
    """A request that ends before its prompt is computed keeps its budget in the encoder cache.

    Needs a model with an encoder.
    """

    owner = "the scheduler's ledger of encoder outputs"
    segment = "none: the encoder cache's budget"


class MediaRetention(Fault, frozen=True, tag="media_kept"):
    """The worker's receiver cache keeps every image and audio clip.

    It ignores which media the frontend has dropped from its own cache. Needs a model with an
    encoder.
    """

    owner = "the worker's receiver cache"
    segment = "malloc_in_use"
    cure = "trim"


class UnpolledTransfers(Fault, frozen=True, tag="offload_unpolled"):
    """Transfers of the KV offload are polled only in steps.

    An idle engine keeps their blocks forever. Needs ``--kv-offload-bytes``.
    """

    owner = "KV transfers"
    segment = "KV blocks held at idle"
    cure = "trim"


class AbandonedTransfers(Fault, frozen=True, tag="offload_abandoned"):
    """Each abort leaves a transfer of ``blocks_per_abort`` KV blocks that never ends.

    Needs ``--kv-offload-bytes``.
    """

    owner = "KV transfers"
    segment = "KV blocks held by no request"
    blocks_per_abort: int = 1


class PinnedHostBlocks(Fault, frozen=True, tag="offload_pinned"):
    """Host blocks that were copied back to the device stay pinned.

    They are never evicted, so the host pool fills up and accepts no more blocks. Needs
    ``--kv-offload-bytes``.
    """

    owner = "the host's pool of KV blocks"
    segment = "host KV blocks pinned by no transfer"


# ---- no fault


class CacheFill(Fault, frozen=True, tag="cache_fills"):
    """No defect: each finished request adds a grammar of ``text_bytes`` to the grammar cache.

    The cache grows to its capacity and stays there. With ``bound=low``, the ledger declares a
    quarter of the capacity as the bound. A supervisor must not act on this.
    """

    owner = "the cache of compiled grammars"
    segment = "malloc_in_use, up to the cache's capacity"
    cure = "none: no defect"
    text_bytes: int = 2 << 10
    bound: Literal["low", "true"] = "low"
