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
    Run("vllm-41", VLLM, "thread_stacks", LIGHT, Injection(OTHER, "requests", 320 * KIB)),
    Run(
        "vllm-42", VLLM, "written_snapshots", LIGHT,
        Injection(OTHER, "seconds", 768 * KIB, shape="steps"),
    ),
    Run("vllm-43", VLLM, "grown_mapping", MIXED, Injection(OTHER, "tokens", 12 * KIB)),
    Run(
        "vllm-44", VLLM, "sysv_segments", LIGHT,
        Injection(SHARED, "requests", 256 * KIB, frontend=True),
    ),
    Run(
        "vllm-45", VLLM, "label_sets", LIGHT,
        Injection(OBJECTS, "requests", 224 * KIB, frontend=True),
    ),
    Run(
        "vllm-46", VLLM, "user_vectors", MIXED,
        Injection(IN_USE, "requests", 384 * KIB, frontend=True),
    ),
    Run(
        "vllm-47", VLLM, "abandoned_results", (Phase(60.0, 4.0, "leaving"),),
        Injection(OBJECTS, "aborts", 352 * KIB, frontend=True),
    ),
    Run(
        "vllm-48", VLLM, "memory_database", WAVES_OF_THREE,
        Injection(IN_USE, "requests", 448 * KIB),
    ),
    Run(
        "vllm-49", VLLM, "memory_bios", (Phase(60.0, 3.0, "streaming"),),
        Injection(IN_USE, "requests", 320 * KIB, frontend=True),
    ),
    Run(
        "vllm-50", VLLM, "tasks_left", NAPS,
        Injection(IN_USE, "requests", 640 * KIB, frontend=True),
    ),
    Run("vllm-51", VLLM, "finalizers", LIGHT, Injection(OBJECTS, "seconds", MIB)),
    Run(
        "vllm-52", VLLM, "helper_heap", LIGHT,
        Injection(OTHER, "requests", 288 * KIB, frontend=True),
    ),
    Run(
        "vllm-53", VLLM, "autograd_history", LIGHT, device=True,
        cause=Injection(TENSORS, "requests", 320 * KIB, 2 * MIB),
    ),
    Run(
        "vllm-54", VLLM, "registered_buffers", LIGHT, device=True,
        # The registered pages are counted as the driver maps them.
        cause=Injection(IN_USE, "seconds", 896 * KIB),
    ),
    Run(
        "vllm-55", VLLM, "device_workspaces", (Phase(60.0, 3.0, "growing"),), device=True,
        cause=Injection(TENSORS, "lengths", 384 * KIB, 2 * MIB),
    ),
    Run("vllm-61", VLLM, "backlogs", (Phase(5.0, 16.0, "mixed"), Phase(55.0, 0.5, "answers"))),
    Run(
        "vllm-62", VLLM, "deep_queue", (Phase(120.0, 2.0, "answers"), Phase(8.0, 15.0, "long")),
        flags=("--max-num-seqs=4",),
    ),
    Run("vllm-63", VLLM, "stepped_prompts", (Phase(60.0, 3.0, "stepped"),)),
    Run("vllm-64", VLLM, "documents", (Phase(60.0, 3.0, "documents"),)),
    Run(
        "vllm-65", VLLM, "late_logprobs",
        (Phase(160.0, 3.0, "answers"), Phase(600.0, 2.0, "logprobs")),
    ),
    Run(
        "vllm-66", VLLM, "late_grammars",
        (Phase(160.0, 3.0, "answers"), Phase(600.0, 2.0, "few_grammars")),
    ),
    Run(
        "vllm-67", VLLM, "late_adapters",
        (Phase(150.0, 3.0, "answers"), Phase(600.0, 2.0, "adapters")),
        flags=ADAPTERS,
    ),
    Run(
        "vllm-68", VLLM, "late_choices",
        (Phase(160.0, 3.0, "answers"), Phase(600.0, 1.5, "several")),
    ),
    Run("vllm-69", VLLM, "prompt_cache", LIGHT, Injection(None)),
    Run("vllm-70", VLLM, "even_cache", LIGHT, Injection(None, frontend=True)),
    Run("vllm-71", VLLM, "large_cache", MIXED, Injection(None)),
    Run("vllm-72", VLLM, "doubling_table", LIGHT, Injection(None, frontend=True)),
    Run("vllm-73", VLLM, "high_water", MIXED, Injection(None)),
    Run("vllm-74", VLLM, "night_jobs", LIGHT, Injection(None)),
    Run("vllm-75", VLLM, "naps", NAPS),
    Run("vllm-76", VLLM, "night", (Phase(70.0, 4.0, "mixed"), Phase(200.0, 0.0, "mixed"))),
    Run("vllm-77", VLLM, "two_restarts", LIGHT, restarts=(130.0, 290.0)),
    Run("vllm-78", VLLM, "idle_restart", NAPS, restarts=(170.0,)),
    Run("vllm-79", VLLM, "device_cache", LIGHT, Injection(None), device=True),
    Run("vllm-80", VLLM, "device_high_water", MIXED, Injection(None), device=True),
    Run("vllm-81", VLLM, "quiet", (Phase(60.0, 0.4, "mixed"),)),
    # ---- what is kept for each request, token, abort or second, and caches that end
    Run("vllm-91", VLLM, "token_records", LIGHT, Injection(OBJECTS, "tokens", 8 * KIB)),
    Run(
        "vllm-92", VLLM, "registered_callbacks", LIGHT,
        Injection(OBJECTS, "requests", 256 * KIB, frontend=True),
    ),
    Run(
        "vllm-93", VLLM, "kept_tracebacks", (Phase(60.0, 4.0, "leaving"),),
        Injection(IN_USE, "aborts", 320 * KIB, frontend=True),
    ),
    Run("vllm-94", VLLM, "unflushed_files", MIXED, Injection(IN_USE, "requests", 288 * KIB)),
    Run(
        "vllm-95", VLLM, "parsed_documents", (Phase(60.0, 3.0, "streaming"),),
        Injection(OBJECTS, "requests", 224 * KIB, frontend=True),
    ),
    Run(
        "vllm-96", VLLM, "guarded_stacks", WAVES_OF_THREE,
        Injection(OTHER, "requests", 320 * KIB, frontend=True),
    ),
    Run("vllm-97", VLLM, "code_pages", NAPS, Injection(OTHER, "seconds", 640 * KIB)),
    Run(
        "vllm-98", VLLM, "shared_arenas", (Phase(60.0, 4.0, "leaving"),),
        Injection(SHARED, "aborts", 384 * KIB, frontend=True),
    ),
    Run("vllm-99", VLLM, "transcripts", MIXED, Injection(IN_USE, "tokens", 14 * KIB)),
    Run(
        "vllm-100", VLLM, "captured_tensors", BURSTS, device=True,
        cause=Injection(TENSORS, "requests", 192 * KIB, 2 * MIB),
    ),
    Run(
        "vllm-101", VLLM, "kv_copies", (Phase(60.0, 4.0, "leaving"),), device=True,
        cause=Injection(TENSORS, "aborts", 352 * KIB, 2 * MIB),
    ),
    Run(
        "vllm-102", VLLM, "pinned_outputs", LIGHT, device=True,
        cause=Injection(SHARED, "tokens", 7 * KIB),
    ),
    Run(
        "vllm-103", VLLM, "answer_cache", LIGHT,
        Injection(None, "requests", 320 * KIB, frontend=True),
    ),
    Run(
        "vllm-104", VLLM, "known_users", LIGHT,
        Injection(None, "requests", 2 * MIB, frontend=True),
    ),
    Run("vllm-105", VLLM, "audit_ring", LIGHT, Injection(None, "tokens", 8 * KIB)),
    Run("vllm-106", VLLM, "flushed_log", MIXED, Injection(None, frontend=True)),
    Run("vllm-107", VLLM, "compile_cache", MIXED, Injection(None)),
    Run("vllm-108", VLLM, "resized_dict", LIGHT, Injection(None, frontend=True)),
    Run("vllm-109", VLLM, "lazy_models", LIGHT, Injection(None)),
    Run("vllm-110", VLLM, "arena_spread", WAVES_OF_THREE, Injection(None)),
    Run("vllm-111", VLLM, "weight_reload", NAPS, Injection(None)),
    Run("vllm-112", VLLM, "pinned_pool", LIGHT, Injection(None), device=True),
    Run("vllm-113", VLLM, "shape_workspaces", MIXED, Injection(None), device=True),
    Run(
        "vllm-114", VLLM, "feature_tour",
        tuple(
            Phase(70.0, 2.0, shape)
            for shape in ("answers", "logprobs", "few_grammars", "several", "streaming")
        ),
    ),
    # ---- what the runtime, its libraries and the kernel keep, and more growth that ends
    Run(
        "vllm-121", VLLM, "interned_strings", LIGHT,
        Injection(OBJECTS, "requests", 256 * KIB, frontend=True),
    ),
    Run(
        "vllm-122", VLLM, "distant_timers", MIXED,
        Injection(IN_USE, "requests", 320 * KIB, frontend=True),
    ),
    Run(
        "vllm-123", VLLM, "log_records", (Phase(60.0, 3.0, "streaming"),),
        Injection(OBJECTS, "requests", 192 * KIB, frontend=True),
    ),
    Run(
        "vllm-124", VLLM, "dynamic_classes", LIGHT,
        Injection(IN_USE, "requests", 224 * KIB, shape="accelerating", frontend=True),
    ),
    Run("vllm-125", VLLM, "wrapped_handlers", NAPS, Injection(OBJECTS, "tokens", 8 * KIB)),
    Run(
        "vllm-126", VLLM, "kept_uploads", MIXED,
        Injection(IN_USE, "requests", 384 * KIB, frontend=True),
    ),
    Run(
        "vllm-127", VLLM, "unsent_messages", (Phase(60.0, 4.0, "leaving"),),
        Injection(IN_USE, "aborts", 384 * KIB, frontend=True),
    ),
    Run(
        "vllm-128", VLLM, "shared_tensors", WAVES_OF_THREE,
        Injection(SHARED, "requests", 320 * KIB),
    ),
    Run("vllm-129", VLLM, "growing_channel", MIXED, Injection(SHARED, "tokens", 10 * KIB)),
    Run(
        "vllm-130", VLLM, "sparse_table", LIGHT,
        Injection(OTHER, "seconds", 832 * KIB, shape="steps"),
    ),
    Run(
        "vllm-131", VLLM, "frozen_cycles", LIGHT, device=True,
        cause=Injection(TENSORS, "requests", 288 * KIB, 2 * MIB),
    ),
    Run(
        "vllm-132", VLLM, "dlpack_capsules", WAVES_OF_THREE, device=True,
        cause=Injection(TENSORS, "tokens", 9 * KIB, 2 * MIB),
    ),
    Run(
        "vllm-133", VLLM, "rising_bursts",
        tuple(
            phase
            for per_s in (8.0, 14.0, 20.0, 26.0)
            for phase in (Phase(40.0, 1.0, "answers"), Phase(5.0, per_s, "mixed"))
        ),
        flags=("--max-num-seqs=8",),
    ),
    Run("vllm-134", VLLM, "growing_chats", (Phase(60.0, 3.0, "chats"),)),
    Run(
        "vllm-135", VLLM, "late_features",
        (Phase(140.0, 2.5, "answers"), Phase(600.0, 2.5, "features")),
    ),
    Run("vllm-136", VLLM, "open_sessions", LIGHT, Injection(None, frontend=True)),
    Run("vllm-137", VLLM, "two_caches", LIGHT, Injection(None)),
    Run(
        "vllm-138", VLLM, "touched_table", LIGHT,
        Injection(None, "requests", 640 * KIB, frontend=True),
    ),
    Run("vllm-139", VLLM, "pool_crumbs", MIXED, Injection(None)),
    Run("vllm-140", VLLM, "stream_reserves", MIXED, Injection(None), device=True),
    Run("vllm-141", VLLM, "refilled_cache", LIGHT, Injection(None), restarts=(200.0,)),
    Run(
        "vllm-142", VLLM, "morning_rush",
        (Phase(80.0, 1.0, "answers"), Phase(90.0, 0.0, "answers"), Phase(190.0, 7.0, "mixed")),
    ),
    Run("vllm-143", VLLM, "short_programs", LIGHT, Injection(None, frontend=True)),
    Run(
        "vllm-144", VLLM, "vision_cache", LIGHT, device=True,
        cause=Injection(None, "requests", 512 * KIB, 2 * MIB),
    ),
    # ---- what libraries, the kernel and torch's allocator keep, and growth that ends early
    Run(
        "vllm-151", VLLM, "receive_buffers", (Phase(60.0, 3.0, "streaming"),),
        Injection(IN_USE, "requests", 288 * KIB, frontend=True),
    ),
    Run(
        "vllm-152", VLLM, "named_loggers", LIGHT,
        Injection(OBJECTS, "requests", 192 * KIB, frontend=True),
    ),
    Run(
        "vllm-153", VLLM, "context_variables", (Phase(60.0, 4.0, "leaving"),),
        Injection(OBJECTS, "aborts", 352 * KIB, frontend=True),
    ),
    Run(
        "vllm-154", VLLM, "client_contexts", NAPS,
        Injection(IN_USE, "requests", 320 * KIB, frontend=True),
    ),
    Run(
        "vllm-155", VLLM, "pending_calls", WAVES_OF_THREE,
        Injection(IN_USE, "requests", 288 * KIB, shape="accelerating", frontend=True),
    ),
    Run(
        "vllm-156", VLLM, "thread_locals", BURSTS,
        Injection(IN_USE, "requests", 144 * KIB, frontend=True),
    ),
    Run("vllm-157", VLLM, "prefix_tree", MIXED, Injection(OBJECTS, "tokens", 12 * KIB)),
    Run("vllm-158", VLLM, "environment_values", LIGHT, Injection(IN_USE, "requests", 256 * KIB)),
    Run(
        "vllm-159", VLLM, "huge_pages", NAPS,
        Injection(OTHER, "seconds", 704 * KIB, 2 * MIB, "steps"),
    ),
    Run(
        "vllm-160", VLLM, "raw_arrays", (Phase(60.0, 4.0, "leaving"),),
        Injection(SHARED, "aborts", 320 * KIB),
    ),
    Run(
        "vllm-161", VLLM, "adapter_copies", (Phase(60.0, 4.0, "adapters"),), device=True,
        cause=Injection(TENSORS, "adapters", 4 * MIB, 2 * MIB), flags=ADAPTERS,
    ),
    Run(
        "vllm-162", VLLM, "private_pools", LIGHT, device=True,
        # Torch's allocator takes 20 MiB at once for a smaller tensor.
        cause=Injection(UNUSED, "requests", 288 * KIB, 10 * MIB),
    ),
    Run(
        "vllm-163", VLLM, "abort_storms",
        (Phase(80.0, 2.0, "answers"), Phase(6.0, 14.0, "leaving_early")),
        flags=("--max-num-seqs=8",),
    ),
    Run(
        "vllm-164", VLLM, "night_and_rush",
        (Phase(80.0, 4.0, "mixed"), Phase(60.0, 0.0, "mixed"), Phase(10.0, 12.0, "mixed")),
    ),
    Run("vllm-165", VLLM, "seesaw_prompts", (Phase(60.0, 4.0, "seesaw"),)),
    Run("vllm-166", VLLM, "features_again", (Phase(60.0, 2.5, "features"),), restarts=(150.0,)),
    Run("vllm-167", VLLM, "chats_again", (Phase(60.0, 3.0, "chats"),), restarts=(160.0,)),
    Run("vllm-168", VLLM, "staircase", LIGHT, Injection(None, bound=96 * MIB)),
    Run("vllm-169", VLLM, "uneven_stairs", LIGHT, Injection(None, frontend=True, bound=104 * MIB)),
    Run(
        "vllm-170", VLLM, "device_stairs", MIXED, Injection(None, bound=100 * MIB), device=True
    ),
    Run(
        "vllm-171", VLLM, "generational_cache", LIGHT,
        Injection(None, "requests", 352 * KIB, frontend=True, bound=96 * MIB),
    ),
    Run(
        "vllm-172", VLLM, "seen_words", LIGHT,
        Injection(None, "tokens", 16 * KIB, bound=112 * MIB),
    ),
    Run("vllm-173", VLLM, "object_spikes", MIXED, Injection(None, bound=88 * MIB)),
    Run("vllm-174", VLLM, "split_blocks", LIGHT, Injection(None, bound=100 * MIB), device=True),
)  # fmt: skip
