"""The runs of our own engine that the rig can record."""

from __future__ import annotations

from leaklab.recording.loads import Phase
from leaklab.recording.run import (
    BURSTS,
    IN_USE,
    KIB,
    OBJECTS,
    OFFLOAD,
    OTHER,
    OURS,
    SHARED,
    TENSORS,
    Fault,
    Run,
)

RUNS = (
    # ---- leaks of our engine
    Run(
        OURS, 1, "device_dict", device=True,
        cause=Fault("device_dict:bytes_per_request=128Ki", TENSORS, 128 * KIB),
    ),
    Run(
        OURS, 2, "request_cycle",
        cause=Fault("request_cycle:payload_bytes=192Ki", IN_USE, 192 * KIB),
    ),
    Run(
        OURS, 3, "ipc_unreleased", BURSTS, device=True,
        cause=Fault("ipc_unreleased:bytes_per_request=256Ki", TENSORS, 256 * KIB),
    ),
    Run(
        OURS, 4, "shared_growth",
        cause=Fault("shared_growth:bytes_per_request=96Ki", SHARED, 96 * KIB),
    ),
    # ---- our engine, healthy
    Run(
        OURS, 5, "images", (Phase(60.0, 2.0, "albums"),),
        flags=("--media-cache-mib=64",), model="llava",
    ),
    Run(OURS, 6, "returning_prefixes", (Phase(60.0, 8.0, "returning"),), flags=OFFLOAD),
    Run(OURS, 7, "declared_cache", cause=Fault("cache_fills:text_bytes=8Ki,bound=true", None)),
    Run(OURS, 8, "idle_gaps", (Phase(30.0, 6.0, "answers"), Phase(60.0, 0.0, "answers"))),
    # ---- our engine, more of both: what leaks on its device there is in malloc's memory on a CPU
    Run(
        OURS, 9, "append_list",
        cause=Fault("append_list:bytes_per_request=96Ki", OBJECTS, 96 * KIB),
    ),
    Run(
        OURS, 10, "stored_exception", BURSTS,
        Fault("stored_exception:bytes_per_request=96Ki", IN_USE, 96 * KIB),
    ),
    Run(
        OURS, 11, "method_cache", (Phase(60.0, 4.0, "growing"),),
        Fault("method_cache:bytes_per_request=128Ki", IN_USE, 128 * KIB),
    ),
    Run(
        OURS, 12, "mmap_growth", cause=Fault("mmap_growth:bytes_per_request=96Ki", OTHER, 96 * KIB),
    ),
    Run(
        OURS, 13, "tokenizer_cache", (Phase(60.0, 5.0, "wordy"),),
        # A list has 8 bytes for each token.
        Fault("tokenizer_cache:repeat=64", IN_USE, 64 * 8, "prompt_tokens_total"),
    ),
    Run(
        OURS, 14, "grammar_cache_growth",
        # Measured with mallinfo2: 60 grammars of this length took 80,548 bytes each.
        cause=Fault("grammar_cache_growth:text_bytes=4Ki", IN_USE, 80_548),
    ),
    Run(
        OURS, 15, "abort_unregistered", (Phase(60.0, 4.0, "leaving_early"),),
        Fault("abort_unregistered:payload_bytes=224Ki", IN_USE, 224 * KIB, "aborted_total"),
        flags=("--max-num-batched-tokens=16",),
    ),
    Run(
        OURS, 16, "pinned_buffers",
        (Phase(40.0, 3.0, "answers"), Phase(40.0, 0.0, "answers"), Phase(40.0, 9.0, "answers")),
        Fault("pinned_buffers:bytes_per_request=128Ki", IN_USE, 128 * KIB),
    ),
    Run(
        OURS, 17, "device_dict", (Phase(60.0, 4.0, "growing"),),
        Fault("device_dict:bytes_per_request=112Ki", IN_USE, 112 * KIB),
    ),
    Run(OURS, 18, "choices", (Phase(60.0, 2.0, "choices"),), flags=("--num-blocks=512",)),
    Run(OURS, 19, "steady"),
    Run(
        OURS, 20, "ramp",
        tuple(Phase(100.0, per_s, "answers") for per_s in (1.0, 2.0, 4.0, 6.0, 8.0, 10.0)),
    ),
)  # fmt: skip
