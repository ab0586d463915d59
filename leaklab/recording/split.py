"""Which recordings may be looked at, and which are run once: fixed before there were any.

The split is by mechanism, so that no held-out recording is of a kind that the detector was tuned
on. The mechanism of a leak is how it holds its memory; that of a healthy run is its load. The names
of the leaks, ordered by their SHA-256, are seen and held out in turn, and so are those of the
healthy runs. A mechanism is in the same part on each engine. One that comes later is added by hand,
before its first recording.
"""

from __future__ import annotations

SEEN, HELD_OUT = "seen", "held-out"
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


def part(mechanism: str) -> str:
    """Return :data:`SEEN` or :data:`HELD_OUT`; KeyError for a mechanism without one."""
    return PARTS[mechanism]
