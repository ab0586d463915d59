"""Which recordings may be looked at, and which are run once: fixed before there were any.

The split is by mechanism, so that no held-out recording is of a kind that the detector was tuned
on. The mechanism of a leak is how it holds its memory; that of a healthy run is its load. The names
of the leaks, ordered by their SHA-256, are seen and held out in turn, and so are those of the
healthy runs. A mechanism is in the same part on each engine.

The held-out part has been read again and again since. Of the mechanisms that came later,
:data:`LOTS`, a lot draws a third, before the first recording of any; the others are seen. Of the
lots in :data:`WHOLE`, all are drawn. What a lot drew is judged once. Once it is no longer in
:data:`UNREAD`, it may be read like all held-out ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

SEEN, HELD_OUT, DRAWN = "seen", "held-out", "drawn"
PARTS = {
    # leaks: of the first recordings, then of later ones
    "pinned_buffers": SEEN,
    "retained_slices": HELD_OUT,
    "request_cycle": SEEN,
    "shared_growth": HELD_OUT,
    "mappings": SEEN,
    "retained_tensors": HELD_OUT,
    "fragmentation": SEEN,
    "memory_files": HELD_OUT,
    "ipc_unreleased": SEEN,
    "device_dict": HELD_OUT,
    "small_objects": SEEN,
    "heap_blocks": HELD_OUT,
    "threads_left": SEEN,
    "abort_unregistered": SEEN,
    "locked": HELD_OUT,
    "grammar_cache_growth": SEEN,
    "append_list": HELD_OUT,
    "cycles": SEEN,
    "tokenizer_cache": HELD_OUT,
    "stored_exception": SEEN,
    "helpers_left": HELD_OUT,
    "mmap_growth": SEEN,
    "shared": HELD_OUT,
    "method_cache": SEEN,
    "streams_left": SEEN,
    "thread_arenas": HELD_OUT,
    "kept_logits": SEEN,
    "histories": HELD_OUT,
    "unread_queues": SEEN,
    "private_copies": HELD_OUT,
    "open_compressors": SEEN,
    "kept_bodies": HELD_OUT,
    "request_table": SEEN,
    "open_connections": HELD_OUT,
    "log_buffer": SEEN,
    "ledger": HELD_OUT,
    # healthy: of the first recordings, then of later ones
    "declared_cache": SEEN,
    "images": HELD_OUT,
    "restart": SEEN,
    "bursts": HELD_OUT,
    "saturation": SEEN,
    "returning_prefixes": HELD_OUT,
    "idle_gaps": SEEN,
    "growing_prompts": HELD_OUT,
    "cache_fill": SEEN,
    "lora": HELD_OUT,
    "grammar": SEEN,
    "preemption": HELD_OUT,
    "choices": SEEN,
    "steady": HELD_OUT,
    "tide": SEEN,
    "retention": HELD_OUT,
    "sawtooth": SEEN,
    "leaving": HELD_OUT,
    "file_cache": SEEN,
    "ramp": HELD_OUT,
    "rush": SEEN,
    "batch_jobs": HELD_OUT,
    "mixed_lengths": SEEN,
    "logprobs": HELD_OUT,
    "streaming": SEEN,
    "waves": HELD_OUT,
    "few_grammars": SEEN,
    "long_answers": HELD_OUT,
}
LOTS = {
    20261126: (
        (
            "abandoned_results", "autograd_history", "device_workspaces", "finalizers",
            "grown_mapping", "helper_heap", "label_sets", "memory_bios", "memory_database",
            "registered_buffers", "sysv_segments", "tasks_left", "thread_stacks", "user_vectors",
            "written_snapshots",
        ),
        (
            "backlogs", "deep_queue", "device_cache", "device_high_water", "documents",
            "doubling_table", "even_cache", "high_water", "idle_restart", "large_cache",
            "late_adapters", "late_choices", "late_grammars", "late_logprobs", "naps", "night",
            "night_jobs", "prompt_cache", "quiet", "stepped_prompts", "two_restarts",
        ),
    ),
    20261127: (
        (
            "captured_tensors", "code_pages", "guarded_stacks", "kept_tracebacks", "kv_copies",
            "parsed_documents", "pinned_outputs", "registered_callbacks", "shared_arenas",
            "token_records", "transcripts", "unflushed_files",
        ),
        (
            "answer_cache", "arena_spread", "audit_ring", "compile_cache", "feature_tour",
            "flushed_log", "known_users", "lazy_models", "pinned_pool", "resized_dict",
            "shape_workspaces", "weight_reload",
        ),
    ),
    20261128: (
        (
            "distant_timers", "dlpack_capsules", "dynamic_classes", "frozen_cycles",
            "growing_channel", "interned_strings", "kept_uploads", "log_records",
            "shared_tensors", "sparse_table", "unsent_messages", "wrapped_handlers",
        ),
        (
            "growing_chats", "late_features", "morning_rush", "open_sessions", "pool_crumbs",
            "refilled_cache", "rising_bursts", "short_programs", "stream_reserves",
            "touched_table", "two_caches", "vision_cache",
        ),
    ),
    20261129: (
        (
            "adapter_copies", "client_contexts", "context_variables", "environment_values",
            "huge_pages", "named_loggers", "pending_calls", "prefix_tree", "private_pools",
            "raw_arrays", "receive_buffers", "thread_locals",
        ),
        (
            "abort_storms", "chats_again", "device_stairs", "features_again",
            "generational_cache", "night_and_rush", "object_spikes", "seen_words",
            "seesaw_prompts", "split_blocks", "staircase", "uneven_stairs",
        ),
    ),
    20261130: (
        (
            "aligned_buffers", "attached_blocks", "committed_slabs", "compiled_patterns",
            "hooked_outputs", "lost_references", "source_lines", "trace_spans",
            "transfer_regions", "unread_socket", "weak_table",
        ),
        (
            "batch_buffers", "blended", "busy_restart", "expiring_entries", "late_articles",
            "lulls", "lunch_rush", "pooled_buffers", "recent_prefixes", "report_builds", "scored",
            "streams_cut",
        ),
    ),
    20261201: (
        (
            "chained_errors", "failed_batches", "memory_streams", "pointer_types",
            "sealed_messages", "session_cookies", "starved_jobs", "stream_states", "turn_copies",
            "unacknowledged_events", "unread_outputs", "untrimmed_mappings",
        ),
        (
            "clock_frames", "deferred_frees", "drained_backlog", "filter_layers", "late_burst",
            "late_prompt_scores", "merged_runs", "message_buffers", "regrown_workspace",
            "rising_volumes", "segmented_cache", "shared_ring",
        ),
    ),
}  # fmt: skip
"""The mechanisms of each lot, leaks and healthy ones, by the seed that drew a third of both."""
WHOLE = (20261130, 20261201)
"""Lots of which all are drawn, because the eight leaks that the two lots before them drew are too
few for an interval. Nobody looks at any recording of these, and they are judged once."""
UNREAD = (20261128, 20261129, 20261130, 20261201)
"""Lots of which nobody reads what was drawn. That of 20261128 was judged on 27 November 2026;
nothing was chosen on it."""


def _lot(seed: int, names: Iterable[str]) -> dict[str, str]:
    every = sorted(names)
    most = len(every) if seed in WHOLE else len(every) // 3
    drawn = random.Random(seed).sample(every, most)
    part = DRAWN if seed in UNREAD else HELD_OUT
    return {name: part if name in drawn else SEEN for name in every}


for _seed, (_leaks, _healthy) in LOTS.items():
    PARTS |= _lot(_seed, _leaks) | _lot(_seed, _healthy)


def part(mechanism: str) -> str:
    """Return the part of a mechanism; KeyError for one that has none."""
    return PARTS[mechanism]
