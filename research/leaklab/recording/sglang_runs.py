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
    Run(SGLANG, 1, "heap_blocks", cause=Injection(IN_USE, "requests", 192 * KIB)),
    Run(SGLANG, 2, "small_objects", cause=Injection(OBJECTS, "seconds", 448 * KIB)),
    Run(SGLANG, 3, "mappings", cause=Injection(OTHER, "seconds", 320 * KIB, shape="accelerating")),
    Run(SGLANG, 4, "fragmentation", BURSTS, Injection(RETAINED, "requests", 160 * KIB)),
    Run(SGLANG, 5, "memory_files", cause=Injection(SHARED, "tokens", 4 * KIB)),
    Run(
        SGLANG, 6, "threads_left",
        cause=Injection(IN_USE, "seconds", 320 * KIB, shape="steps", frontend=True),
    ),
    Run(SGLANG, 7, "shared", LEAVING, Injection(SHARED, "aborts", 320 * KIB)),
    # ---- healthy SGLang
    Run(SGLANG, 8, "bursts", BURSTS),
    Run(SGLANG, 9, "growing_prompts", (Phase(60.0, 4.0, "growing"),)),
    Run(SGLANG, 10, "leaving", LEAVING),
    Run(
        SGLANG, 11, "saturation", (Phase(90.0, 40.0, "answers"), Phase(60.0, 1.0, "answers")),
        flags=("--max-running-requests=4",),
    ),
    Run(SGLANG, 12, "restart", restarts=(170.0,)),
    Run(SGLANG, 13, "cache_fill", cause=Injection(None)),
    Run(SGLANG, 14, "tide", cause=Injection(None, speed=2.0)),
    # ---- SGLang, more of both
    Run(SGLANG, 15, "locked", cause=Injection(IN_USE, "requests", 96 * KIB)),
    Run(SGLANG, 16, "cycles", BURSTS, Injection(IN_USE, "tokens", 3 * KIB)),
    Run(SGLANG, 17, "file_cache", cause=Injection(None)),
    # ---- SGLang: what services hold, and other loads
    Run(
        SGLANG, 18, "kept_bodies", (Phase(60.0, 4.0, "answers"),),
        Injection(IN_USE, "requests", 128 * KIB, frontend=True),
    ),
    Run(SGLANG, 19, "returning_prefixes", (Phase(60.0, 4.0, "returning"),)),
    Run(
        SGLANG, 20, "thread_arenas", (Phase(60.0, 4.0, "answers"),),
        Injection(RETAINED, "requests", 128 * KIB),
    ),
    Run(SGLANG, 21, "batch_jobs", BATCH_JOBS),
    Run(SGLANG, 22, "ledger", (Phase(60.0, 3.0, "mixed"),), Injection(IN_USE, "tokens", 6 * KIB)),
    Run(SGLANG, 23, "streaming", (Phase(60.0, 3.0, "streaming"),)),
    Run(
        SGLANG, 24, "streams_left", (Phase(60.0, 3.0, "leaving"),),
        Injection(IN_USE, "aborts", 208 * KIB), seconds=LONG_S,
    ),
    Run(SGLANG, 25, "mixed_lengths", (Phase(60.0, 2.0, "mixed"),), seconds=LONG_S),
    Run(
        SGLANG, 26, "open_connections", (Phase(60.0, 3.0, "streaming"),),
        Injection(IN_USE, "requests", 192 * KIB, frontend=True),
    ),
    Run(SGLANG, 27, "steady", (Phase(60.0, 3.0, "answers"),)),
    Run(SGLANG, 28, "ramp", RAMP),
    Run(SGLANG, 29, "request_table", RAMP, Injection(OBJECTS, "requests", 160 * KIB)),
    # Not vLLM: it compiles at the first one, for 30 s on a free machine.
    Run(SGLANG, 30, "logprobs", (Phase(60.0, 3.0, "logprobs"),)),
)  # fmt: skip
