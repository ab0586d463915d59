"""Faults of the caches: keys out of step, pins that stay, entries freed too early or never."""

from __future__ import annotations

from typing import Literal

from plimsoll_faults.kinds.base import Fault


class EvictionLoop(Fault, frozen=True, tag="eviction_loop"):
    """After ``after_requests`` finished requests an eviction loops for ever.

    A key is in the prefix cache's order and not in its data: the worker hangs, the frontend looks
    healthy.
    """

    owner = "the prefix cache"
    segment = "none: a stall"
    after_requests: int = 8


class PinnedItems(Fault, frozen=True, tag="pinned_items"):
    """Each finished request leaves ``blocks_per_request`` cached KV blocks pinned.

    Evictions pass over them, so that the pool shrinks.
    """

    owner = "the prefix cache"
    segment = "KV blocks held by no request"
    blocks_per_request: int = 1


class EncoderFreedEarly(Fault, frozen=True, tag="encoder_freed_early"):
    """An encoder output's entry is freed in the step that allocated it.

    The runner frees before it encodes, so the free finds nothing and the output stays. Needs a
    model with an encoder.
    """

    owner = "encoder outputs of the runner"
    segment = "torch_allocated, malloc_in_use on a CPU"


class EncoderBudgetHeld(Fault, frozen=True, tag="encoder_budget_held"):
    """A request that ends before its prompt is computed keeps its encoder cache budget.

    Its end is a stop or an abort. Needs a model with an encoder.
    """

    owner = "the scheduler's ledger of encoder outputs"
    segment = "none: the encoder cache's budget"


class MediaKept(Fault, frozen=True, tag="media_kept"):
    """The worker's cache of received media does not hear what the frontend lets go of.

    The two are out of step, and the worker keeps each image and sound. Needs a model with an
    encoder.
    """

    owner = "the worker's receiver cache"
    segment = "malloc_in_use"
    cure = "trim"


class OffloadUnpolled(Fault, frozen=True, tag="offload_unpolled"):
    """Transfers of the KV offload are looked after in steps alone.

    An idle engine holds their blocks for ever. Needs ``--kv-offload-bytes``.
    """

    owner = "KV transfers"
    segment = "KV blocks held at idle"
    cure = "trim"


class OffloadAbandoned(Fault, frozen=True, tag="offload_abandoned"):
    """Each abort leaves a transfer of ``blocks_per_abort`` KV blocks that never ends.

    Needs ``--kv-offload-bytes``.
    """

    owner = "KV transfers"
    segment = "KV blocks held by no request"
    blocks_per_abort: int = 1


class OffloadPinned(Fault, frozen=True, tag="offload_pinned"):
    """Host blocks that were copied back to the device stay pinned.

    Nothing evicts them: the host's pool fills up and takes no more blocks. Needs
    ``--kv-offload-bytes``.
    """

    owner = "the host's pool of KV blocks"
    segment = "host KV blocks pinned by no transfer"


# ---- no fault


class CacheFills(Fault, frozen=True, tag="cache_fills"):
    """No defect: each finished request puts a grammar of ``text_bytes`` into the sound cache.

    The cache of compiled grammars grows to its capacity and stays there. ``bound=low`` has the
    ledger declare a quarter of that. A supervisor that acts is wrong.
    """

    owner = "the cache of compiled grammars"
    segment = "malloc_in_use, up to the cache's capacity"
    cure = "none: it is sound"
    text_bytes: int = 2 << 10
    bound: Literal["low", "true"] = "low"
