"""The runs of vLLM of whose mechanisms a lot draws a third: see ``split.py``."""

from __future__ import annotations

from leaklab.recording.loads import Phase
from leaklab.recording.run import (
    ADAPTERS,
    BURSTS,
    IN_USE,
    KIB,
    LIGHT,
    MIB,
    MIXED,
    NAPS,
    OBJECTS,
    OTHER,
    SHARED,
    TENSORS,
    UNUSED,
    VLLM,
    WAVES_OF_THREE,
    Injection,
    Run,
)

RUNS = (
    # ---- leaks by other means, and the kinds of healthy growth that resemble them
    Run(VLLM, 41, "thread_stacks", LIGHT, Injection(OTHER, "requests", 320 * KIB)),
    Run(
        VLLM, 42, "written_snapshots", LIGHT, Injection(OTHER, "seconds", 768 * KIB, shape="steps"),
    ),
    Run(VLLM, 43, "grown_mapping", MIXED, Injection(OTHER, "tokens", 12 * KIB)),
    Run(VLLM, 44, "sysv_segments", LIGHT, Injection(SHARED, "requests", 256 * KIB, frontend=True)),
    Run(VLLM, 45, "label_sets", LIGHT, Injection(OBJECTS, "requests", 224 * KIB, frontend=True)),
    Run(VLLM, 46, "user_vectors", MIXED, Injection(IN_USE, "requests", 384 * KIB, frontend=True)),
    Run(
        VLLM, 47, "abandoned_results", (Phase(60.0, 4.0, "leaving"),),
        Injection(OBJECTS, "aborts", 352 * KIB, frontend=True),
    ),
    Run(VLLM, 48, "memory_database", WAVES_OF_THREE, Injection(IN_USE, "requests", 448 * KIB)),
    Run(
        VLLM, 49, "memory_bios", (Phase(60.0, 3.0, "streaming"),),
        Injection(IN_USE, "requests", 320 * KIB, frontend=True),
    ),
    Run(VLLM, 50, "tasks_left", NAPS, Injection(IN_USE, "requests", 640 * KIB, frontend=True)),
    Run(VLLM, 51, "finalizers", LIGHT, Injection(OBJECTS, "seconds", MIB)),
    Run(VLLM, 52, "helper_heap", LIGHT, Injection(OTHER, "requests", 288 * KIB, frontend=True)),
    Run(
        VLLM, 53, "autograd_history", LIGHT, device=True,
        cause=Injection(TENSORS, "requests", 320 * KIB, 2 * MIB),
    ),
    Run(
        VLLM, 54, "registered_buffers", LIGHT, device=True,
        # The registered pages are counted as the driver maps them.
        cause=Injection(IN_USE, "seconds", 896 * KIB),
    ),
    Run(
        VLLM, 55, "device_workspaces", (Phase(60.0, 3.0, "growing"),), device=True,
        cause=Injection(TENSORS, "lengths", 384 * KIB, 2 * MIB),
    ),
    Run(VLLM, 61, "backlogs", (Phase(5.0, 16.0, "mixed"), Phase(55.0, 0.5, "answers"))),
    Run(
        VLLM, 62, "deep_queue", (Phase(120.0, 2.0, "answers"), Phase(8.0, 15.0, "long")),
        flags=("--max-num-seqs=4",),
    ),
    Run(VLLM, 63, "stepped_prompts", (Phase(60.0, 3.0, "stepped"),)),
    Run(VLLM, 64, "documents", (Phase(60.0, 3.0, "documents"),)),
    Run(VLLM, 65, "late_logprobs", (Phase(160.0, 3.0, "answers"), Phase(600.0, 2.0, "logprobs"))),
    Run(
        VLLM, 66, "late_grammars",
        (Phase(160.0, 3.0, "answers"), Phase(600.0, 2.0, "few_grammars")),
    ),
    Run(
        VLLM, 67, "late_adapters", (Phase(150.0, 3.0, "answers"), Phase(600.0, 2.0, "adapters")),
        flags=ADAPTERS,
    ),
    Run(VLLM, 68, "late_choices", (Phase(160.0, 3.0, "answers"), Phase(600.0, 1.5, "several"))),
    Run(VLLM, 69, "prompt_cache", LIGHT, Injection(None)),
    Run(VLLM, 70, "even_cache", LIGHT, Injection(None, frontend=True)),
    Run(VLLM, 71, "large_cache", MIXED, Injection(None)),
    Run(VLLM, 72, "doubling_table", LIGHT, Injection(None, frontend=True)),
    Run(VLLM, 73, "high_water", MIXED, Injection(None)),
    Run(VLLM, 74, "night_jobs", LIGHT, Injection(None)),
    Run(VLLM, 75, "naps", NAPS),
    Run(VLLM, 76, "night", (Phase(70.0, 4.0, "mixed"), Phase(200.0, 0.0, "mixed"))),
    Run(VLLM, 77, "two_restarts", LIGHT, restarts=(130.0, 290.0)),
    Run(VLLM, 78, "idle_restart", NAPS, restarts=(170.0,)),
    Run(VLLM, 79, "device_cache", LIGHT, Injection(None), device=True),
    Run(VLLM, 80, "device_high_water", MIXED, Injection(None), device=True),
    Run(VLLM, 81, "quiet", (Phase(60.0, 0.4, "mixed"),)),
    # ---- what is kept for each request, token, abort or second, and caches that end
    Run(VLLM, 91, "token_records", LIGHT, Injection(OBJECTS, "tokens", 8 * KIB)),
    Run(
        VLLM, 92, "registered_callbacks", LIGHT,
        Injection(OBJECTS, "requests", 256 * KIB, frontend=True),
    ),
    Run(
        VLLM, 93, "kept_tracebacks", (Phase(60.0, 4.0, "leaving"),),
        Injection(IN_USE, "aborts", 320 * KIB, frontend=True),
    ),
    Run(VLLM, 94, "unflushed_files", MIXED, Injection(IN_USE, "requests", 288 * KIB)),
    Run(
        VLLM, 95, "parsed_documents", (Phase(60.0, 3.0, "streaming"),),
        Injection(OBJECTS, "requests", 224 * KIB, frontend=True),
    ),
    Run(
        VLLM, 96, "guarded_stacks", WAVES_OF_THREE,
        Injection(OTHER, "requests", 320 * KIB, frontend=True),
    ),
    Run(VLLM, 97, "code_pages", NAPS, Injection(OTHER, "seconds", 640 * KIB)),
    Run(
        VLLM, 98, "shared_arenas", (Phase(60.0, 4.0, "leaving"),),
        Injection(SHARED, "aborts", 384 * KIB, frontend=True),
    ),
    Run(VLLM, 99, "transcripts", MIXED, Injection(IN_USE, "tokens", 14 * KIB)),
    Run(
        VLLM, 100, "captured_tensors", BURSTS, device=True,
        cause=Injection(TENSORS, "requests", 192 * KIB, 2 * MIB),
    ),
    Run(
        VLLM, 101, "kv_copies", (Phase(60.0, 4.0, "leaving"),), device=True,
        cause=Injection(TENSORS, "aborts", 352 * KIB, 2 * MIB),
    ),
    Run(
        VLLM, 102, "pinned_outputs", LIGHT, device=True, cause=Injection(SHARED, "tokens", 7 * KIB),
    ),
    Run(VLLM, 103, "answer_cache", LIGHT, Injection(None, "requests", 320 * KIB, frontend=True)),
    Run(VLLM, 104, "known_users", LIGHT, Injection(None, "requests", 2 * MIB, frontend=True)),
    Run(VLLM, 105, "audit_ring", LIGHT, Injection(None, "tokens", 8 * KIB)),
    Run(VLLM, 106, "flushed_log", MIXED, Injection(None, frontend=True)),
    Run(VLLM, 107, "compile_cache", MIXED, Injection(None)),
    Run(VLLM, 108, "resized_dict", LIGHT, Injection(None, frontend=True)),
    Run(VLLM, 109, "lazy_models", LIGHT, Injection(None)),
    Run(VLLM, 110, "arena_spread", WAVES_OF_THREE, Injection(None)),
    Run(VLLM, 111, "weight_reload", NAPS, Injection(None)),
    Run(VLLM, 112, "pinned_pool", LIGHT, Injection(None), device=True),
    Run(VLLM, 113, "shape_workspaces", MIXED, Injection(None), device=True),
    Run(
        VLLM, 114, "feature_tour",
        tuple(
            Phase(70.0, 2.0, shape)
            for shape in ("answers", "logprobs", "few_grammars", "several", "streaming")
        ),
    ),
    # ---- what the runtime, its libraries and the kernel keep, and more growth that ends
    Run(
        VLLM, 121, "interned_strings", LIGHT,
        Injection(OBJECTS, "requests", 256 * KIB, frontend=True),
    ),
    Run(
        VLLM, 122, "distant_timers", MIXED, Injection(IN_USE, "requests", 320 * KIB, frontend=True),
    ),
    Run(
        VLLM, 123, "log_records", (Phase(60.0, 3.0, "streaming"),),
        Injection(OBJECTS, "requests", 192 * KIB, frontend=True),
    ),
    Run(
        VLLM, 124, "dynamic_classes", LIGHT,
        Injection(IN_USE, "requests", 224 * KIB, shape="accelerating", frontend=True),
    ),
    Run(VLLM, 125, "wrapped_handlers", NAPS, Injection(OBJECTS, "tokens", 8 * KIB)),
    Run(VLLM, 126, "kept_uploads", MIXED, Injection(IN_USE, "requests", 384 * KIB, frontend=True)),
    Run(
        VLLM, 127, "unsent_messages", (Phase(60.0, 4.0, "leaving"),),
        Injection(IN_USE, "aborts", 384 * KIB, frontend=True),
    ),
    Run(VLLM, 128, "shared_tensors", WAVES_OF_THREE, Injection(SHARED, "requests", 320 * KIB)),
    Run(VLLM, 129, "growing_channel", MIXED, Injection(SHARED, "tokens", 10 * KIB)),
    Run(VLLM, 130, "sparse_table", LIGHT, Injection(OTHER, "seconds", 832 * KIB, shape="steps")),
    Run(
        VLLM, 131, "frozen_cycles", LIGHT, device=True,
        cause=Injection(TENSORS, "requests", 288 * KIB, 2 * MIB),
    ),
    Run(
        VLLM, 132, "dlpack_capsules", WAVES_OF_THREE, device=True,
        cause=Injection(TENSORS, "tokens", 9 * KIB, 2 * MIB),
    ),
    Run(
        VLLM, 133, "rising_bursts",
        tuple(
            phase
            for per_s in (8.0, 14.0, 20.0, 26.0)
            for phase in (Phase(40.0, 1.0, "answers"), Phase(5.0, per_s, "mixed"))
        ),
        flags=("--max-num-seqs=8",),
    ),
    Run(VLLM, 134, "growing_chats", (Phase(60.0, 3.0, "chats"),)),
    Run(VLLM, 135, "late_features", (Phase(140.0, 2.5, "answers"), Phase(600.0, 2.5, "features"))),
    Run(VLLM, 136, "open_sessions", LIGHT, Injection(None, frontend=True)),
    Run(VLLM, 137, "two_caches", LIGHT, Injection(None)),
    Run(VLLM, 138, "touched_table", LIGHT, Injection(None, "requests", 640 * KIB, frontend=True)),
    Run(VLLM, 139, "pool_crumbs", MIXED, Injection(None)),
    Run(VLLM, 140, "stream_reserves", MIXED, Injection(None), device=True),
    Run(VLLM, 141, "refilled_cache", LIGHT, Injection(None), restarts=(200.0,)),
    Run(
        VLLM, 142, "morning_rush",
        (Phase(80.0, 1.0, "answers"), Phase(90.0, 0.0, "answers"), Phase(190.0, 7.0, "mixed")),
    ),
    Run(VLLM, 143, "short_programs", LIGHT, Injection(None, frontend=True)),
    Run(
        VLLM, 144, "vision_cache", LIGHT, device=True,
        cause=Injection(None, "requests", 512 * KIB, 2 * MIB),
    ),
    # ---- what libraries, the kernel and torch's allocator keep, and growth that ends early
    Run(
        VLLM, 151, "receive_buffers", (Phase(60.0, 3.0, "streaming"),),
        Injection(IN_USE, "requests", 288 * KIB, frontend=True),
    ),
    Run(
        VLLM, 152, "named_loggers", LIGHT, Injection(OBJECTS, "requests", 192 * KIB, frontend=True),
    ),
    Run(
        VLLM, 153, "context_variables", (Phase(60.0, 4.0, "leaving"),),
        Injection(OBJECTS, "aborts", 352 * KIB, frontend=True),
    ),
    Run(
        VLLM, 154, "client_contexts", NAPS, Injection(IN_USE, "requests", 320 * KIB, frontend=True),
    ),
    Run(
        VLLM, 155, "pending_calls", WAVES_OF_THREE,
        Injection(IN_USE, "requests", 288 * KIB, shape="accelerating", frontend=True),
    ),
    Run(
        VLLM, 156, "thread_locals", BURSTS, Injection(IN_USE, "requests", 144 * KIB, frontend=True),
    ),
    Run(VLLM, 157, "prefix_tree", MIXED, Injection(OBJECTS, "tokens", 12 * KIB)),
    Run(VLLM, 158, "environment_values", LIGHT, Injection(IN_USE, "requests", 256 * KIB)),
    Run(VLLM, 159, "huge_pages", NAPS, Injection(OTHER, "seconds", 704 * KIB, 2 * MIB, "steps")),
    Run(
        VLLM, 160, "raw_arrays", (Phase(60.0, 4.0, "leaving"),),
        Injection(SHARED, "aborts", 320 * KIB),
    ),
    Run(
        VLLM, 161, "adapter_copies", (Phase(60.0, 4.0, "adapters"),), device=True,
        cause=Injection(TENSORS, "adapters", 4 * MIB, 2 * MIB), flags=ADAPTERS,
    ),
    Run(
        VLLM, 162, "private_pools", LIGHT, device=True,
        # Torch's allocator takes 20 MiB at once for a smaller tensor.
        cause=Injection(UNUSED, "requests", 288 * KIB, 10 * MIB),
    ),
    Run(
        VLLM, 163, "abort_storms", (Phase(80.0, 2.0, "answers"), Phase(6.0, 14.0, "leaving_early")),
        flags=("--max-num-seqs=8",),
    ),
    Run(
        VLLM, 164, "night_and_rush",
        (Phase(80.0, 4.0, "mixed"), Phase(60.0, 0.0, "mixed"), Phase(10.0, 12.0, "mixed")),
    ),
    Run(VLLM, 165, "seesaw_prompts", (Phase(60.0, 4.0, "seesaw"),)),
    Run(VLLM, 166, "features_again", (Phase(60.0, 2.5, "features"),), restarts=(150.0,)),
    Run(VLLM, 167, "chats_again", (Phase(60.0, 3.0, "chats"),), restarts=(160.0,)),
    Run(VLLM, 168, "staircase", LIGHT, Injection(None, bound=96 * MIB)),
    Run(VLLM, 169, "uneven_stairs", LIGHT, Injection(None, frontend=True, bound=104 * MIB)),
    Run(VLLM, 170, "device_stairs", MIXED, Injection(None, bound=100 * MIB), device=True),
    Run(
        VLLM, 171, "generational_cache", LIGHT,
        Injection(None, "requests", 352 * KIB, frontend=True, bound=96 * MIB),
    ),
    Run(VLLM, 172, "seen_words", LIGHT, Injection(None, "tokens", 16 * KIB, bound=112 * MIB)),
    Run(VLLM, 173, "object_spikes", MIXED, Injection(None, bound=88 * MIB)),
    Run(VLLM, 174, "split_blocks", LIGHT, Injection(None, bound=100 * MIB), device=True),
)  # fmt: skip
