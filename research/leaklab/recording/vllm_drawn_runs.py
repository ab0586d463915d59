"""The runs of vLLM of the lots of which all are drawn: see ``split.py``."""

from __future__ import annotations

from leaklab.recording.loads import Phase
from leaklab.recording.run import (
    BURSTS,
    IN_USE,
    KIB,
    LIGHT,
    MIB,
    MIXED,
    NAPS,
    OBJECTS,
    OTHER,
    OWN_WORKER,
    RETAINED,
    SHARED,
    TENSORS,
    UNUSED,
    VLLM,
    WAVES_OF_THREE,
    Injection,
    Run,
)

RUNS = (
    # ---- leaks: what extensions, libraries and the allocators of host and device keep
    Run(VLLM, 181, "lost_references", MIXED, Injection(OBJECTS, "tokens", 11 * KIB)),
    Run(
        VLLM, 182, "trace_spans", (Phase(60.0, 3.0, "streaming"),),
        Injection(OBJECTS, "requests", 256 * KIB, frontend=True),
    ),
    Run(
        VLLM, 183, "source_lines", WAVES_OF_THREE,
        Injection(OBJECTS, "requests", 256 * KIB, shape="accelerating", frontend=True),
    ),
    Run(
        VLLM, 184, "compiled_patterns", LIGHT,
        Injection(IN_USE, "requests", 224 * KIB, frontend=True),
    ),
    Run(
        VLLM, 185, "weak_table", (Phase(60.0, 4.0, "leaving"),),
        Injection(IN_USE, "aborts", 320 * KIB, frontend=True),
    ),
    Run(VLLM, 186, "unread_socket", MIXED, Injection(IN_USE, "requests", 352 * KIB)),
    Run(VLLM, 187, "aligned_buffers", BURSTS, Injection(RETAINED, "requests", 160 * KIB)),
    Run(VLLM, 188, "committed_slabs", NAPS, Injection(OTHER, "seconds", 768 * KIB, shape="steps")),
    Run(
        VLLM, 189, "attached_blocks", LIGHT,
        Injection(SHARED, "requests", 256 * KIB, frontend=True),
    ),
    Run(
        VLLM, 190, "hooked_outputs", MIXED, device=True,
        cause=Injection(TENSORS, "tokens", 12 * KIB, 2 * MIB),
    ),
    Run(
        VLLM, 192, "transfer_regions", (Phase(60.0, 4.0, "leaving"),), device=True,
        cause=Injection(SHARED, "aborts", 384 * KIB, 2 * MIB),
    ),
    # ---- healthy: caches and pools that stop, demand, and service as on any day
    Run(
        VLLM, 193, "expiring_entries", LIGHT,
        Injection(None, "requests", 256 * KIB, frontend=True, bound=64 * MIB),
    ),
    Run(
        VLLM, 194, "recent_prefixes", LIGHT,
        # Its entries are 64 MiB. The dictionary of them is copied when it has too many gaps.
        Injection(None, "requests", 192 * KIB, frontend=True, bound=80 * MIB),
    ),
    Run(VLLM, 195, "pooled_buffers", MIXED, Injection(None, bound=72 * MIB)),
    Run(VLLM, 196, "batch_buffers", MIXED, Injection(None, bound=90 * MIB), device=True),
    Run(VLLM, 197, "late_articles", (Phase(150.0, 3.0, "answers"), Phase(600.0, 1.5, "articles"))),
    Run(
        VLLM, 198, "lunch_rush",
        tuple(
            Phase(seconds, per_s, "mixed")
            for seconds, per_s in ((70.0, 2.0), (30.0, 5.0), (40.0, 10.0), (30.0, 5.0), (60.0, 1.0))
        ),
        flags=("--max-num-seqs=8",),
    ),
    Run(VLLM, 199, "report_builds", WAVES_OF_THREE, Injection(None, bound=72 * MIB)),
    Run(VLLM, 200, "busy_restart", (Phase(60.0, 4.0, "blended"),), restarts=(190.0,)),
    Run(VLLM, 201, "blended", (Phase(90.0, 3.0, "blended"), Phase(30.0, 4.5, "blended"))),
    Run(VLLM, 202, "streams_cut", (Phase(60.0, 3.0, "streams_cut"),)),
    Run(
        VLLM, 203, "lulls",
        (
            Phase(45.0, 3.0, "mixed"),
            Phase(15.0, 0.0, "mixed"),
            Phase(80.0, 2.0, "streaming"),
            Phase(25.0, 0.0, "streaming"),
        ),
    ),
    Run(VLLM, 204, "scored", (Phase(60.0, 2.5, "scored"),)),
    # ---- leaks, of which five are not even: one gets faster, one has a load that gets heavier, two
    # begin late (one of these after tables that have filled), and one comes in bursts
    Run(VLLM, 205, "unacknowledged_events", MIXED, Injection(OBJECTS, "tokens", 12 * KIB)),
    Run(
        VLLM, 206, "session_cookies", (Phase(60.0, 3.0, "streaming"),),
        Injection(OBJECTS, "requests", 256 * KIB, frontend=True),
    ),
    Run(
        VLLM, 207, "memory_streams",
        # The core has a request for each of the three choices.
        (Phase(200.0, 2.0, "answers"), Phase(600.0, 2.0, "several")),
        Injection(IN_USE, "requests", 176 * KIB),
    ),
    Run(
        VLLM, 208, "turn_copies", (Phase(60.0, 3.0, "chats"),),
        Injection(IN_USE, "requests", 256 * KIB, shape="accelerating", frontend=True),
    ),
    Run(
        VLLM, 209, "chained_errors", (Phase(160.0, 3.0, "answers"), Phase(600.0, 4.0, "leaving")),
        Injection(OBJECTS, "aborts", 512 * KIB, frontend=True),
    ),
    Run(
        VLLM, 210, "untrimmed_mappings",
        (Phase(40.0, 3.0, "answers"), Phase(12.0, 10.0, "leaving")),
        Injection(OTHER, "aborts", 704 * KIB),
    ),
    Run(
        VLLM, 211, "starved_jobs", LIGHT,
        Injection(
            IN_USE, "requests", 352 * KIB, shape="late", frontend=True, beside="first_fill"
        ),
    ),
    Run(
        VLLM, 212, "pointer_types", LIGHT,
        Injection(IN_USE, "seconds", 832 * KIB, worker=True), flags=OWN_WORKER,
    ),
    Run(
        VLLM, 213, "sealed_messages", NAPS,
        Injection(SHARED, "seconds", 768 * KIB, worker=True), flags=OWN_WORKER,
    ),
    Run(
        VLLM, 214, "failed_batches", (Phase(60.0, 4.0, "leaving"),), device=True,
        cause=Injection(TENSORS, "aborts", 384 * KIB, 2 * MIB),
    ),
    Run(
        VLLM, 215, "unread_outputs", MIXED, device=True,
        cause=Injection(TENSORS, "tokens", 13 * KIB, 2 * MIB),
    ),
    Run(
        VLLM, 216, "stream_states", LIGHT, device=True,
        # Torch's allocator takes 20 MiB at once for a smaller tensor.
        cause=Injection(UNUSED, "requests", 272 * KIB, 10 * MIB),
    ),
    # ---- healthy: all grow by a good part of the budget, and end or go back
    Run(
        VLLM, 217, "segmented_cache", LIGHT,
        Injection(None, "requests", 640 * KIB, frontend=True, bound=144 * MIB),
    ),
    Run(VLLM, 218, "clock_frames", LIGHT, Injection(None, "tokens", 12 * KIB, bound=112 * MIB)),
    Run(
        VLLM, 219, "filter_layers", (Phase(60.0, 3.0, "streaming"),),
        Injection(None, "requests", 224 * KIB, frontend=True, bound=120 * MIB),
    ),
    Run(
        VLLM, 220, "message_buffers", WAVES_OF_THREE,
        Injection(None, "requests", 120 * KIB, frontend=True, bound=160 * MIB),
    ),
    Run(VLLM, 221, "drained_backlog", LIGHT, Injection(None, frontend=True, bound=108 * MIB)),
    Run(VLLM, 222, "late_burst", MIXED, Injection(None, bound=141 * MIB)),
    Run(VLLM, 223, "deferred_frees", LIGHT, Injection(None, bound=104 * MIB)),
    Run(
        VLLM, 224, "merged_runs", MIXED,
        # 96 MiB of pages in parts, of which one is there twice, and four runs.
        Injection(None, "tokens", 18 * KIB, bound=117 * MIB),
    ),
    Run(VLLM, 225, "shared_ring", LIGHT, Injection(None, "requests", 384 * KIB, bound=120 * MIB)),
    Run(VLLM, 226, "regrown_workspace", MIXED, Injection(None, bound=140 * MIB), device=True),
    Run(
        VLLM, 227, "late_prompt_scores",
        (Phase(150.0, 3.0, "answers"), Phase(600.0, 2.0, "prompt_scores")),
    ),
    Run(VLLM, 228, "rising_volumes", (Phase(60.0, 3.0, "volumes"),)),
)  # fmt: skip
