"""How leaks come about: mechanisms in engines at rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from leaklab.series import EIGHT, MIB, Curve, diurnal
from plimsoll_api.assessment import DEVICE_SEGMENTS


@dataclass(frozen=True)
class Mechanism:
    """How a leak comes about: where its memory is and which process holds it. ``noises`` are how
    unsteady the memory of its engine is, by seed. ``shapes`` are the ways in which it can grow, all
    of its split's where it says none. ``accounted`` is a cache that its engine accounts for to the
    byte, and fills meanwhile; ``load`` are the requests in flight, where they drive no leak.
    ``beside`` are further settings of its series: what the same engine does in good health."""

    name: str
    segment: str
    role: str = "worker"
    malloc: bool = True
    noises: tuple[float, ...] = (8 * MIB, 25 * MIB, 40 * MIB)
    shapes: tuple[str, ...] = ()
    accounted: float = 0.0
    load: Curve = EIGHT
    beside: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The incident's, by where the memory is."""
        return "DeviceGrowth" if self.segment in DEVICE_SEGMENTS else "HostGrowth"


DEVELOPMENT = (
    Mechanism("request_cycle", "malloc_in_use"),
    Mechanism("tokenizer_cache", "python_objects", role="frontend"),
    Mechanism("device_dict", "torch_allocated"),
)
SEEN = (
    Mechanism("append_list", "python_objects"),
    Mechanism("method_cache", "malloc_in_use"),
    Mechanism("mmap_growth", "anonymous_other"),
    Mechanism("shared_growth", "shared"),
    Mechanism("device_raw", "non_torch"),
    Mechanism("foreign_frontend", "anonymous_other", role="frontend", malloc=False),
    Mechanism("exception_chain", "malloc_in_use"),
    Mechanism("detokenizer_state", "python_objects", role="frontend"),
    Mechanism("arena_mapping", "anonymous_other"),
    Mechanism("ring_segments", "shared"),
    Mechanism("collective_buffers", "non_torch"),
    Mechanism("graph_pools", "torch_reserved_unused"),
    Mechanism("foreign_worker", "anonymous_other", malloc=False),
    Mechanism("grammar_states", "malloc_in_use"),
    Mechanism("stream_queues", "python_objects", role="frontend"),
    Mechanism("thread_stacks", "anonymous_other"),
    Mechanism("media_handover", "shared"),
    Mechanism("kernel_modules", "non_torch"),
    Mechanism("fragmentation", "torch_reserved_unused"),
    Mechanism("logit_masks", "torch_allocated"),
    Mechanism("foreign_runtime", "anonymous_other", malloc=False),
    Mechanism("aborted_slots", "malloc_in_use", noises=(18 * MIB,)),
    Mechanism("trace_spans", "python_objects", role="frontend", noises=(10 * MIB,)),
    Mechanism("pinned_transfers", "anonymous_other", noises=(28 * MIB,)),
    Mechanism("dead_peers", "shared", noises=(50 * MIB,)),
    Mechanism("ipc_handles", "non_torch", noises=(14 * MIB,)),
    Mechanism("stream_pools", "torch_reserved_unused", noises=(38 * MIB,)),
    Mechanism("draft_states", "torch_allocated", noises=(22 * MIB,)),
    Mechanism("foreign_connector", "anonymous_other", malloc=False, noises=(32 * MIB,)),
    Mechanism("tokenizer_clones", "malloc_in_use", noises=(20 * MIB,)),
    Mechanism("response_store", "python_objects", role="frontend", noises=(12 * MIB,)),
    Mechanism("compile_workers", "anonymous_other", noises=(30 * MIB,)),
    Mechanism("plasma_objects", "shared", noises=(44 * MIB,)),
    Mechanism("virtual_mappings", "non_torch", noises=(36 * MIB,)),
    Mechanism("odd_sizes", "torch_reserved_unused", noises=(26 * MIB,)),
    Mechanism("prompt_logprobs", "torch_allocated", noises=(9 * MIB,)),
    Mechanism(
        "foreign_router", "anonymous_other", role="frontend", malloc=False, noises=(17 * MIB,)
    ),
    Mechanism("beam_histories", "malloc_in_use", noises=(24 * MIB,)),
    Mechanism("request_callbacks", "python_objects", role="frontend", noises=(11 * MIB,)),
    Mechanism("registered_regions", "anonymous_other", noises=(34 * MIB,)),
    Mechanism("orphaned_frames", "shared", noises=(47 * MIB,)),
    Mechanism("event_pools", "non_torch", noises=(16 * MIB,)),
    Mechanism("split_blocks", "torch_reserved_unused", noises=(29 * MIB,)),
    Mechanism("encoder_outputs", "torch_allocated", noises=(8 * MIB,)),
    Mechanism("foreign_batcher", "anonymous_other", malloc=False, noises=(40 * MIB,)),
    # A stream of many answers keeps its context in the RPC server, if its client left early.
    Mechanism(
        "stream_contexts",
        "malloc_in_use",
        noises=(21 * MIB,),
        shapes=("steady", "load", "tokens", "late", "swells"),
    ),
    # The frontend mirrors what the worker's cache of pictures holds, and misses its evictions.
    Mechanism(
        "mirrored_entries",
        "python_objects",
        role="frontend",
        noises=(13 * MIB,),
        shapes=("load", "bursty", "late", "renewed"),
        accounted=700 * MIB,
    ),
    # A read from the disk tier that failed does not give back its aligned buffer.
    Mechanism(
        "bounce_buffers",
        "anonymous_other",
        noises=(33 * MIB,),
        shapes=("steady", "bursty", "stairs", "swells"),
        accounted=900 * MIB,
    ),
    # Code that was compiled while serving is never unloaded: each release of a client brings
    # new shapes, and fewer of them from hour to hour.
    Mechanism(
        "code_pages",
        "anonymous_other",
        noises=(19 * MIB,),
        shapes=("steady", "late", "stairs", "renewed"),
    ),
    # Each update of the weights leaves the segment by which one rank received its part.
    Mechanism(
        "weight_segments",
        "shared",
        noises=(45 * MIB,),
        shapes=("late", "stairs", "bursty"),
        load=diurnal(5, 13, 8280),
    ),
    # A graph that is made anew for a changed batch leaves its executable in the driver.
    Mechanism(
        "graph_executables",
        "non_torch",
        noises=(15 * MIB,),
        shapes=("steady", "late", "stairs", "renewed"),
    ),
    # Each sleep begins a new private pool, and the one from before is never emptied.
    Mechanism(
        "wake_pools",
        "torch_reserved_unused",
        noises=(27 * MIB,),
        shapes=("late", "stairs", "bursty", "swells"),
    ),
    # An adapter that was replaced under its name is still referred to by a batch's mapping.
    Mechanism(
        "replaced_adapters",
        "torch_allocated",
        noises=(37 * MIB,),
        shapes=("late", "stairs", "bursty", "renewed"),
        load=diurnal(6, 16, 6120),
    ),
    # Hidden states that a trainer has asked for are kept for each token that is made.
    Mechanism(
        "hidden_states",
        "torch_allocated",
        noises=(10 * MIB,),
        shapes=("steady", "load", "tokens", "swells"),
        load=diurnal(4, 14, 7200),
    ),
    # A separate server of encoders, without a probe, keeps a tensor for each of its requests.
    Mechanism(
        "foreign_encoder",
        "anonymous_other",
        malloc=False,
        noises=(30 * MIB,),
        shapes=("steady", "load", "late", "swells"),
    ),
    # The scheduler's record of a request's tokens stays if the request ended in the same step
    # in which it was preempted.
    Mechanism(
        "token_histories",
        "python_objects",
        noises=(23 * MIB,),
        shapes=("steady", "tokens", "late", "renewed"),
        load=diurnal(5, 12, 11160),
    ),
)
