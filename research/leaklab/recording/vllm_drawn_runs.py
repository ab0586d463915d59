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
    Run("vllm-181", VLLM, "lost_references", MIXED, Injection(OBJECTS, "tokens", 11 * KIB)),
    Run(
        "vllm-182", VLLM, "trace_spans", (Phase(60.0, 3.0, "streaming"),),
        Injection(OBJECTS, "requests", 256 * KIB, frontend=True),
    ),
    Run(
        "vllm-183", VLLM, "source_lines", WAVES_OF_THREE,
        Injection(OBJECTS, "requests", 256 * KIB, shape="accelerating", frontend=True),
    ),
    Run(
        "vllm-184", VLLM, "compiled_patterns", LIGHT,
        Injection(IN_USE, "requests", 224 * KIB, frontend=True),
    ),
    Run(
        "vllm-185", VLLM, "weak_table", (Phase(60.0, 4.0, "leaving"),),
        Injection(IN_USE, "aborts", 320 * KIB, frontend=True),
    ),
    Run("vllm-186", VLLM, "unread_socket", MIXED, Injection(IN_USE, "requests", 352 * KIB)),
    Run("vllm-187", VLLM, "aligned_buffers", BURSTS, Injection(RETAINED, "requests", 160 * KIB)),
    Run(
        "vllm-188", VLLM, "committed_slabs", NAPS,
        Injection(OTHER, "seconds", 768 * KIB, shape="steps"),
    ),
    Run(
        "vllm-189", VLLM, "attached_blocks", LIGHT,
        Injection(SHARED, "requests", 256 * KIB, frontend=True),
    ),
    Run(
        "vllm-190", VLLM, "hooked_outputs", MIXED, device=True,
        cause=Injection(TENSORS, "tokens", 12 * KIB, 2 * MIB),
    ),
    Run(
        "vllm-192", VLLM, "transfer_regions", (Phase(60.0, 4.0, "leaving"),), device=True,
        cause=Injection(SHARED, "aborts", 384 * KIB, 2 * MIB),
    ),
    # ---- healthy: caches and pools that stop, demand, and service as on any day
    Run(
        "vllm-193", VLLM, "expiring_entries", LIGHT,
        Injection(None, "requests", 256 * KIB, frontend=True, bound=64 * MIB),
    ),
    Run(
        "vllm-194", VLLM, "recent_prefixes", LIGHT,
        # Its entries are 64 MiB. The dictionary of them is copied when it has too many gaps.
        Injection(None, "requests", 192 * KIB, frontend=True, bound=80 * MIB),
    ),
    Run("vllm-195", VLLM, "pooled_buffers", MIXED, Injection(None, bound=72 * MIB)),
    Run("vllm-196", VLLM, "batch_buffers", MIXED, Injection(None, bound=90 * MIB), device=True),
    Run(
        "vllm-197", VLLM, "late_articles",
        (Phase(150.0, 3.0, "answers"), Phase(600.0, 1.5, "articles")),
    ),
    Run(
        "vllm-198", VLLM, "lunch_rush",
        tuple(
            Phase(seconds, per_s, "mixed")
            for seconds, per_s in ((70.0, 2.0), (30.0, 5.0), (40.0, 10.0), (30.0, 5.0), (60.0, 1.0))
        ),
        flags=("--max-num-seqs=8",),
    ),
    Run("vllm-199", VLLM, "report_builds", WAVES_OF_THREE, Injection(None, bound=72 * MIB)),
    Run("vllm-200", VLLM, "busy_restart", (Phase(60.0, 4.0, "blended"),), restarts=(190.0,)),
    Run("vllm-201", VLLM, "blended", (Phase(90.0, 3.0, "blended"), Phase(30.0, 4.5, "blended"))),
    Run("vllm-202", VLLM, "streams_cut", (Phase(60.0, 3.0, "streams_cut"),)),
    Run(
        "vllm-203", VLLM, "lulls",
        (
            Phase(45.0, 3.0, "mixed"),
            Phase(15.0, 0.0, "mixed"),
            Phase(80.0, 2.0, "streaming"),
            Phase(25.0, 0.0, "streaming"),
        ),
    ),
    Run("vllm-204", VLLM, "scored", (Phase(60.0, 2.5, "scored"),)),
    # ---- leaks, of which five are not even: one gets faster, one has a load that gets heavier, two
    # begin late (one of these after tables that have filled), and one comes in bursts
    Run("vllm-205", VLLM, "unacknowledged_events", MIXED, Injection(OBJECTS, "tokens", 12 * KIB)),
    Run(
        "vllm-206", VLLM, "session_cookies", (Phase(60.0, 3.0, "streaming"),),
        Injection(OBJECTS, "requests", 256 * KIB, frontend=True),
    ),
    Run(
        "vllm-207", VLLM, "memory_streams",
        # The core has a request for each of the three choices.
        (Phase(200.0, 2.0, "answers"), Phase(600.0, 2.0, "several")),
        Injection(IN_USE, "requests", 176 * KIB),
    ),
    Run(
        "vllm-208", VLLM, "turn_copies", (Phase(60.0, 3.0, "chats"),),
        Injection(IN_USE, "requests", 256 * KIB, shape="accelerating", frontend=True),
    ),
    Run(
        "vllm-209", VLLM, "chained_errors",
        (Phase(160.0, 3.0, "answers"), Phase(600.0, 4.0, "leaving")),
        Injection(OBJECTS, "aborts", 512 * KIB, frontend=True),
    ),
    Run(
        "vllm-210", VLLM, "untrimmed_mappings",
        (Phase(40.0, 3.0, "answers"), Phase(12.0, 10.0, "leaving")),
        Injection(OTHER, "aborts", 704 * KIB),
    ),
    Run(
        "vllm-211", VLLM, "starved_jobs", LIGHT,
        Injection(
            IN_USE, "requests", 352 * KIB, shape="late", frontend=True, beside="first_fill"
        ),
    ),
    Run(
        "vllm-212", VLLM, "pointer_types", LIGHT,
        Injection(IN_USE, "seconds", 832 * KIB, worker=True), flags=OWN_WORKER,
    ),
    Run(
        "vllm-213", VLLM, "sealed_messages", NAPS,
        Injection(SHARED, "seconds", 768 * KIB, worker=True), flags=OWN_WORKER,
    ),
    Run(
        "vllm-214", VLLM, "failed_batches", (Phase(60.0, 4.0, "leaving"),), device=True,
        cause=Injection(TENSORS, "aborts", 384 * KIB, 2 * MIB),
    ),
    Run(
        "vllm-215", VLLM, "unread_outputs", MIXED, device=True,
        cause=Injection(TENSORS, "tokens", 13 * KIB, 2 * MIB),
    ),
    Run(
        "vllm-216", VLLM, "stream_states", LIGHT, device=True,
        # Torch's allocator takes 20 MiB at once for a smaller tensor.
        cause=Injection(UNUSED, "requests", 272 * KIB, 10 * MIB),
    ),
    # ---- healthy: all grow by a good part of the budget, and end or go back
    Run(
        "vllm-217", VLLM, "segmented_cache", LIGHT,
        Injection(None, "requests", 640 * KIB, frontend=True, bound=144 * MIB),
    ),
    Run(
        "vllm-218", VLLM, "clock_frames", LIGHT,
        Injection(None, "tokens", 12 * KIB, bound=112 * MIB),
    ),
    Run(
        "vllm-219", VLLM, "filter_layers", (Phase(60.0, 3.0, "streaming"),),
        Injection(None, "requests", 224 * KIB, frontend=True, bound=120 * MIB),
    ),
    Run(
        "vllm-220", VLLM, "message_buffers", WAVES_OF_THREE,
        Injection(None, "requests", 120 * KIB, frontend=True, bound=160 * MIB),
    ),
    Run(
        "vllm-221", VLLM, "drained_backlog", LIGHT,
        Injection(None, frontend=True, bound=108 * MIB),
    ),
    Run("vllm-222", VLLM, "late_burst", MIXED, Injection(None, bound=141 * MIB)),
    Run("vllm-223", VLLM, "deferred_frees", LIGHT, Injection(None, bound=104 * MIB)),
    Run(
        "vllm-224", VLLM, "merged_runs", MIXED,
        # 96 MiB of pages in parts, of which one is there twice, and four runs.
        Injection(None, "tokens", 18 * KIB, bound=117 * MIB),
    ),
    Run(
        "vllm-225", VLLM, "shared_ring", LIGHT,
        Injection(None, "requests", 384 * KIB, bound=120 * MIB),
    ),
    Run(
        "vllm-226", VLLM, "regrown_workspace", MIXED, Injection(None, bound=140 * MIB), device=True
    ),
    Run(
        "vllm-227", VLLM, "late_prompt_scores",
        (Phase(150.0, 3.0, "answers"), Phase(600.0, 2.0, "prompt_scores")),
    ),
    Run("vllm-228", VLLM, "rising_volumes", (Phase(60.0, 3.0, "volumes"),)),
)  # fmt: skip
