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
    Run("vllm-01", VLLM, "heap_blocks", cause=Injection(IN_USE, "requests", 192 * KIB)),
    Run(
        "vllm-02", VLLM, "retained_tensors", device=True,
        cause=Injection(TENSORS, "tokens", 6 * KIB, 2 * MIB),
    ),
    Run(
        "vllm-03", VLLM, "small_objects", LEAVING,
        Injection(OBJECTS, "aborts", 320 * KIB, frontend=True),
    ),
    Run(
        "vllm-04", VLLM, "pinned_buffers", device=True,
        # NVIDIA's driver maps pinned memory as shared.
        cause=Injection(SHARED, "seconds", 448 * KIB),
    ),
    Run(
        "vllm-05", VLLM, "mappings",
        cause=Injection(OTHER, "seconds", 640 * KIB, shape="accelerating"),
    ),
    Run("vllm-06", VLLM, "fragmentation", BURSTS, Injection(RETAINED, "requests", 160 * KIB)),
    Run(
        "vllm-07", VLLM, "threads_left",
        cause=Injection(IN_USE, "requests", 128 * KIB, frontend=True),
    ),
    Run(
        "vllm-08", VLLM, "retained_slices", device=True,
        cause=Injection(TENSORS, "requests", 224 * KIB, 2 * MIB, "steps"),
    ),
    Run("vllm-09", VLLM, "memory_files", cause=Injection(SHARED, "tokens", 4 * KIB)),
    # ---- healthy vLLM
    Run("vllm-10", VLLM, "bursts", BURSTS),
    Run("vllm-11", VLLM, "grammar", (Phase(60.0, 3.0, "grammars"),)),
    Run("vllm-12", VLLM, "growing_prompts", (Phase(60.0, 4.0, "growing"),)),
    Run(
        "vllm-13", VLLM, "lora", (Phase(60.0, 4.0, "adapters"),),
        flags=ADAPTERS,
    ),
    Run(
        "vllm-14", VLLM, "preemption", (Phase(60.0, 8.0, "long"), Phase(60.0, 2.0, "long")),
        flags=FEW_BLOCKS,
    ),
    Run(
        "vllm-15", VLLM, "saturation", (Phase(90.0, 40.0, "answers"), Phase(60.0, 1.0, "answers")),
        flags=("--max-num-seqs=4",),
    ),
    Run("vllm-16", VLLM, "restart", restarts=(170.0,)),
    Run("vllm-17", VLLM, "cache_fill", cause=Injection(None, speed=6.0)),
    # ---- vLLM, more of both
    Run("vllm-18", VLLM, "cycles", cause=Injection(IN_USE, "requests", 96 * KIB)),
    Run(
        "vllm-19", VLLM, "shared", LEAVING,
        Injection(SHARED, "aborts", 224 * KIB, frontend=True),
    ),
    Run("vllm-20", VLLM, "sawtooth", cause=Injection(None)),
    Run("vllm-21", VLLM, "retention", cause=Injection(None)),
    # ---- vLLM: what services hold, and other loads
    Run(
        "vllm-22", VLLM, "request_table",
        cause=Injection(OBJECTS, "requests", 96 * KIB, frontend=True),
    ),
    Run("vllm-23", VLLM, "ramp", RAMP),
    Run(
        "vllm-24", VLLM, "unread_queues", LEAVING,
        Injection(IN_USE, "aborts", 224 * KIB, frontend=True),
    ),
    Run("vllm-25", VLLM, "mixed_lengths", (Phase(60.0, 3.0, "mixed"),)),
    Run(
        "vllm-26", VLLM, "kept_logits", (Phase(60.0, 4.0, "answers"),),
        Injection(IN_USE, "tokens", 4 * KIB),
    ),
    Run("vllm-27", VLLM, "choices", (Phase(60.0, 2.0, "several"),)),
    Run(
        "vllm-28", VLLM, "open_compressors", (Phase(60.0, 3.0, "streaming"),),
        Injection(IN_USE, "requests", 192 * KIB, frontend=True),
    ),
    Run("vllm-29", VLLM, "few_grammars", (Phase(60.0, 3.0, "few_grammars"),)),
    Run(
        "vllm-30", VLLM, "log_buffer", (Phase(60.0, 3.0, "mixed"),),
        Injection(IN_USE, "requests", 104 * KIB, frontend=True), seconds=LONG_S,
    ),
    Run("vllm-31", VLLM, "waves", WAVES, seconds=LONG_S),
    Run(
        "vllm-32", VLLM, "private_copies", (Phase(60.0, 3.0, "answers"),),
        Injection(OTHER, "seconds", 512 * KIB, shape="steps"),
    ),
    Run("vllm-33", VLLM, "rush", RUSH),
    Run(
        "vllm-34", VLLM, "histories", (Phase(60.0, 3.0, "returning"),),
        Injection(OBJECTS, "requests", 160 * KIB, frontend=True),
    ),
    Run(
        "vllm-35", VLLM, "long_answers", (Phase(60.0, 2.0, "long"), Phase(60.0, 0.5, "long")),
        # Blocks have 128 tokens on a CPU: these are enough for one request of full length.
        flags=("--num-gpu-blocks-override=36", "--max-num-seqs=32"),
    ),
)  # fmt: skip
