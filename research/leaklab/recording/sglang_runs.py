"""The runs of SGLang that the rig can record."""

from __future__ import annotations

from leaklab.recording.loads import Phase
from leaklab.recording.run import (
    BATCH_JOBS,
    BURSTS,
    IN_USE,
    KIB,
    LEAVING,
    LONG_S,
    OBJECTS,
    OTHER,
    RAMP,
    RETAINED,
    SGLANG,
    SHARED,
    Injection,
    Run,
)

RUNS = (
    # ---- leaks inside SGLang
    Run("sglang-01", SGLANG, "heap_blocks", cause=Injection(IN_USE, "requests", 192 * KIB)),
    Run("sglang-02", SGLANG, "small_objects", cause=Injection(OBJECTS, "seconds", 448 * KIB)),
    Run(
        "sglang-03", SGLANG, "mappings",
        cause=Injection(OTHER, "seconds", 320 * KIB, shape="accelerating"),
    ),
    Run("sglang-04", SGLANG, "fragmentation", BURSTS, Injection(RETAINED, "requests", 160 * KIB)),
    Run("sglang-05", SGLANG, "memory_files", cause=Injection(SHARED, "tokens", 4 * KIB)),
    Run(
        "sglang-06", SGLANG, "threads_left",
        cause=Injection(IN_USE, "seconds", 320 * KIB, shape="steps", frontend=True),
    ),
    Run("sglang-07", SGLANG, "shared", LEAVING, Injection(SHARED, "aborts", 320 * KIB)),
    # ---- healthy SGLang
    Run("sglang-08", SGLANG, "bursts", BURSTS),
    Run("sglang-09", SGLANG, "growing_prompts", (Phase(60.0, 4.0, "growing"),)),
    Run("sglang-10", SGLANG, "leaving", LEAVING),
    Run(
        "sglang-11", SGLANG, "saturation",
        (Phase(90.0, 40.0, "answers"), Phase(60.0, 1.0, "answers")),
        flags=("--max-running-requests=4",),
    ),
    Run("sglang-12", SGLANG, "restart", restarts=(170.0,)),
    Run("sglang-13", SGLANG, "cache_fill", cause=Injection(None)),
    Run("sglang-14", SGLANG, "tide", cause=Injection(None, speed=2.0)),
    # ---- SGLang, more of both
    Run("sglang-15", SGLANG, "locked", cause=Injection(IN_USE, "requests", 96 * KIB)),
    Run("sglang-16", SGLANG, "cycles", BURSTS, Injection(IN_USE, "tokens", 3 * KIB)),
    Run("sglang-17", SGLANG, "file_cache", cause=Injection(None)),
    # ---- SGLang: what services hold, and other loads
    Run(
        "sglang-18", SGLANG, "kept_bodies", (Phase(60.0, 4.0, "answers"),),
        Injection(IN_USE, "requests", 128 * KIB, frontend=True),
    ),
    Run("sglang-19", SGLANG, "returning_prefixes", (Phase(60.0, 4.0, "returning"),)),
    Run(
        "sglang-20", SGLANG, "thread_arenas", (Phase(60.0, 4.0, "answers"),),
        Injection(RETAINED, "requests", 128 * KIB),
    ),
    Run("sglang-21", SGLANG, "batch_jobs", BATCH_JOBS),
    Run(
        "sglang-22", SGLANG, "ledger", (Phase(60.0, 3.0, "mixed"),),
        Injection(IN_USE, "tokens", 6 * KIB),
    ),
    Run("sglang-23", SGLANG, "streaming", (Phase(60.0, 3.0, "streaming"),)),
    Run(
        "sglang-24", SGLANG, "streams_left", (Phase(60.0, 3.0, "leaving"),),
        Injection(IN_USE, "aborts", 208 * KIB), seconds=LONG_S,
    ),
    Run("sglang-25", SGLANG, "mixed_lengths", (Phase(60.0, 2.0, "mixed"),), seconds=LONG_S),
    Run(
        "sglang-26", SGLANG, "open_connections", (Phase(60.0, 3.0, "streaming"),),
        Injection(IN_USE, "requests", 192 * KIB, frontend=True),
    ),
    Run("sglang-27", SGLANG, "steady", (Phase(60.0, 3.0, "answers"),)),
    Run("sglang-28", SGLANG, "ramp", RAMP),
    Run(
        "sglang-29", SGLANG, "request_table", RAMP,
        Injection(OBJECTS, "requests", 160 * KIB),
    ),
    # Not vLLM: it compiles at the first one, for 30 s on a free machine.
    Run("sglang-30", SGLANG, "logprobs", (Phase(60.0, 3.0, "logprobs"),)),
)  # fmt: skip
