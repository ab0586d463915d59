"""The first runs of vLLM that the rig can record; ``vllm_lot_runs.py`` and
``vllm_drawn_runs.py`` have the later ones."""

from __future__ import annotations

from leaklab.recording.loads import Phase
from leaklab.recording.run import (
    ADAPTERS,
    BURSTS,
    FEW_BLOCKS,
    IN_USE,
    KIB,
    LEAVING,
    LONG_S,
    MIB,
    OBJECTS,
    OTHER,
    RAMP,
    RETAINED,
    RUSH,
    SHARED,
    TENSORS,
    VLLM,
    WAVES,
    Injection,
    Run,
)

RUNS = (
    # ---- leaks inside vLLM
    Run(VLLM, 1, "heap_blocks", cause=Injection(IN_USE, "requests", 192 * KIB)),
    Run(
        VLLM, 2, "retained_tensors", device=True,
        cause=Injection(TENSORS, "tokens", 6 * KIB, 2 * MIB),
    ),
    Run(VLLM, 3, "small_objects", LEAVING, Injection(OBJECTS, "aborts", 320 * KIB, frontend=True)),
    Run(
        VLLM, 4, "pinned_buffers", device=True,
        # NVIDIA's driver maps pinned memory as shared.
        cause=Injection(SHARED, "seconds", 448 * KIB),
    ),
    Run(VLLM, 5, "mappings", cause=Injection(OTHER, "seconds", 640 * KIB, shape="accelerating")),
    Run(VLLM, 6, "fragmentation", BURSTS, Injection(RETAINED, "requests", 160 * KIB)),
    Run(VLLM, 7, "threads_left", cause=Injection(IN_USE, "requests", 128 * KIB, frontend=True)),
    Run(
        VLLM, 8, "retained_slices", device=True,
        cause=Injection(TENSORS, "requests", 224 * KIB, 2 * MIB, "steps"),
    ),
    Run(VLLM, 9, "memory_files", cause=Injection(SHARED, "tokens", 4 * KIB)),
    # ---- healthy vLLM
    Run(VLLM, 10, "bursts", BURSTS),
    Run(VLLM, 11, "grammar", (Phase(60.0, 3.0, "grammars"),)),
    Run(VLLM, 12, "growing_prompts", (Phase(60.0, 4.0, "growing"),)),
    Run(VLLM, 13, "lora", (Phase(60.0, 4.0, "adapters"),), flags=ADAPTERS),
    Run(
        VLLM, 14, "preemption", (Phase(60.0, 8.0, "long"), Phase(60.0, 2.0, "long")),
        flags=FEW_BLOCKS,
    ),
    Run(
        VLLM, 15, "saturation", (Phase(90.0, 40.0, "answers"), Phase(60.0, 1.0, "answers")),
        flags=("--max-num-seqs=4",),
    ),
    Run(VLLM, 16, "restart", restarts=(170.0,)),
    Run(VLLM, 17, "cache_fill", cause=Injection(None, speed=6.0)),
    # ---- vLLM, more of both
    Run(VLLM, 18, "cycles", cause=Injection(IN_USE, "requests", 96 * KIB)),
    Run(VLLM, 19, "shared", LEAVING, Injection(SHARED, "aborts", 224 * KIB, frontend=True)),
    Run(VLLM, 20, "sawtooth", cause=Injection(None)),
    Run(VLLM, 21, "retention", cause=Injection(None)),
    # ---- vLLM: what services hold, and other loads
    Run(VLLM, 22, "request_table", cause=Injection(OBJECTS, "requests", 96 * KIB, frontend=True)),
    Run(VLLM, 23, "ramp", RAMP),
    Run(VLLM, 24, "unread_queues", LEAVING, Injection(IN_USE, "aborts", 224 * KIB, frontend=True)),
    Run(VLLM, 25, "mixed_lengths", (Phase(60.0, 3.0, "mixed"),)),
    Run(
        VLLM, 26, "kept_logits", (Phase(60.0, 4.0, "answers"),),
        Injection(IN_USE, "tokens", 4 * KIB),
    ),
    Run(VLLM, 27, "choices", (Phase(60.0, 2.0, "several"),)),
    Run(
        VLLM, 28, "open_compressors", (Phase(60.0, 3.0, "streaming"),),
        Injection(IN_USE, "requests", 192 * KIB, frontend=True),
    ),
    Run(VLLM, 29, "few_grammars", (Phase(60.0, 3.0, "few_grammars"),)),
    Run(
        VLLM, 30, "log_buffer", (Phase(60.0, 3.0, "mixed"),),
        Injection(IN_USE, "requests", 104 * KIB, frontend=True), seconds=LONG_S,
    ),
    Run(VLLM, 31, "waves", WAVES, seconds=LONG_S),
    Run(
        VLLM, 32, "private_copies", (Phase(60.0, 3.0, "answers"),),
        Injection(OTHER, "seconds", 512 * KIB, shape="steps"),
    ),
    Run(VLLM, 33, "rush", RUSH),
    Run(
        VLLM, 34, "histories", (Phase(60.0, 3.0, "returning"),),
        Injection(OBJECTS, "requests", 160 * KIB, frontend=True),
    ),
    Run(
        VLLM, 35, "long_answers", (Phase(60.0, 2.0, "long"), Phase(60.0, 0.5, "long")),
        # Blocks have 128 tokens on a CPU: these are enough for one request of full length.
        flags=("--num-gpu-blocks-override=36", "--max-num-seqs=32"),
    ),
)  # fmt: skip
