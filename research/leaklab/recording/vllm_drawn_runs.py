"""The runs of vLLM of the lot of which all are drawn: see ``split.py``."""

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
    RETAINED,
    SHARED,
    TENSORS,
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
)  # fmt: skip
