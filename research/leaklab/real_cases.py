"""The cases with real processes: which fault, under which load, and what must be found and done.

On a CPU: what leaks on the device there is in ``malloc_in_use`` here. A leak of our frontend shows
in ``anonymous_other``, for the allocator's account is the worker's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from leaklab.replicas import Policy
from plimsoll_api.assessment import Segment
from plimsoll_api.incident_record import Reason
from plimsoll_api.incidents import IncidentKind

IN_USE, OTHER, SHARED = Segment.MALLOC_IN_USE, Segment.ANONYMOUS_OTHER, Segment.SHARED
OBJECTS = Segment.PYTHON_OBJECTS
WORKER, ENGINE, TRIM = Reason.WORKER_RESTART, Reason.ENGINE_RESTART, Reason.TRIM


@dataclass(frozen=True)
class RealCase:
    """``segment`` is null where memory is not what is short. ``model`` names a tiny checkpoint.
    ``busy_s`` and ``rest_s`` are of the clients. ``gap`` says why the supervisor does not find it
    today; null where it does."""

    name: str
    fault: str
    kind: IncidentKind = IncidentKind.HOST_GROWTH
    segment: Segment | None = IN_USE
    process: str = "worker"
    cure: Reason = WORKER
    shape: str = "short"
    per_s: float = 8.0
    long_streams: int = 2
    busy_s: float | None = None
    rest_s: float = 0.0
    flags: tuple[str, ...] = ()
    model: str = "tiny"
    policy: Policy = field(default_factory=lambda: Policy(warmup="8s"))
    limit_s: float = 120.0
    gap: str | None = None


def _capacity(name: str, fault: str, **changes: object) -> RealCase:
    values: dict[str, object] = {"kind": IncidentKind.CAPACITY_LOSS, "segment": None}
    return RealCase(name, fault, **{**values, **changes})  # type: ignore[arg-type]


def _frontend(name: str, fault: str, shape: str, **changes: object) -> RealCase:
    values: dict[str, object] = {"segment": OTHER, "process": "frontend", "cure": ENGINE}
    return RealCase(name, fault, **{**values, "shape": shape, **changes})  # type: ignore[arg-type]


ENGINE_CASES = (
    RealCase("request_cycle", "request_cycle:payload_bytes=400Ki"),
    RealCase(
        "request_cycle_uncollected",
        "request_cycle:payload_bytes=400Ki,freeze_every=0",
        cure=TRIM,
        gap="a trim that helped is not tried again when the garbage is back: the worker restarts",
    ),
    RealCase("stored_exception", "stored_exception:bytes_per_request=400Ki"),
    _capacity(
        "abort_choices", "abort_choices", shape="choices", per_s=2.0, long_streams=0,
        flags=("--num-blocks=512",),
    ),
    _frontend(
        "abort_unregistered", "abort_unregistered:payload_bytes=400Ki", "leaving",
        flags=("--max-num-seqs=1",),
    ),
    RealCase("append_list", "append_list:bytes_per_request=400Ki", segment=OBJECTS),
    RealCase("method_cache", "method_cache:bytes_per_request=400Ki"),
    RealCase("grammar_cache_growth", "grammar_cache_growth:text_bytes=8Ki"),
    RealCase("mmap_growth", "mmap_growth:bytes_per_request=400Ki", segment=OTHER),
    RealCase("mmap_growth_idle", "mmap_growth:bytes_per_s=3Mi", segment=OTHER, per_s=0.2),
    RealCase("shared_growth", "shared_growth:bytes_per_request=400Ki", segment=SHARED),
    RealCase("pinned_buffers", "pinned_buffers:bytes_per_request=400Ki"),
    _frontend("tokenizer_cache", "tokenizer_cache:repeat=200", "wordy"),
    RealCase("device_dict", "device_dict:bytes_per_request=400Ki"),
    RealCase(
        "eviction_loop", "eviction_loop:after_requests=60", kind=IncidentKind.STALL, segment=None
    ),
    _capacity(
        "pinned_items", "pinned_items:blocks_per_request=1",
        flags=("--num-blocks=96", "--max-num-seqs=4"), shape="wordy", long_streams=1,
    ),
    _capacity(
        "encoder_freed_early", "encoder_freed_early", shape="albums", model="llava",
        flags=("--media-cache-mib=8",),
    ),
    _capacity(
        "encoder_budget_held", "encoder_budget_held", shape="albums_left", per_s=3.0,
        model="llava", long_streams=1,
        flags=(
            "--media-cache-mib=8", "--encoder-cache-tokens=160", "--max-num-batched-tokens=8",
            "--max-num-seqs=4",
        ),
    ),
    _capacity(
        "offload_unpolled", "offload_unpolled", cure=TRIM,
        flags=("--kv-offload-bytes=64Mi", "--num-blocks=96", "--max-num-seqs=4"),
        shape="returning", per_s=40.0, long_streams=0, busy_s=1.5, rest_s=16.0, limit_s=180.0,
    ),
    _capacity(
        "offload_abandoned", "offload_abandoned:blocks_per_abort=2",
        flags=("--kv-offload-bytes=64Mi", "--num-blocks=96", "--max-num-seqs=2"),
        shape="leaving", per_s=4.0, long_streams=1,
    ),
    _capacity(
        "offload_pinned", "offload_pinned",
        flags=("--kv-offload-bytes=2Mi", "--num-blocks=96", "--max-num-seqs=4"),
        shape="returning", per_s=12.0, long_streams=0,
    ),
)  # fmt: skip
SOUND_CASES = (
    RealCase("sound", ""),
    RealCase(
        "sound_full", "", shape="returning", per_s=12.0, long_streams=6,
        flags=("--kv-offload-bytes=64Mi", "--num-blocks=96", "--max-num-seqs=8"),
    ),
    RealCase("sound_choices", "", shape="choices", per_s=2.0, flags=("--num-blocks=512",)),
    RealCase(
        "sound_cache_fills", "cache_fills:text_bytes=8Ki,bound=true",
        policy=Policy(growth_mib=256, warmup="8s"),
    ),
    RealCase(
        "sound_bound_too_low", "cache_fills:text_bytes=8Ki,bound=low",
        policy=Policy(growth_mib=256, warmup="8s"),
    ),
    RealCase(
        "sound_images", "", shape="albums_left", per_s=3.0, long_streams=1, model="llava",
        flags=(
            "--media-cache-mib=8", "--encoder-cache-tokens=160", "--max-num-batched-tokens=8",
            "--max-num-seqs=4",
        ),
    ),
)  # fmt: skip
"""Engines without a fault: a full pool with preemptions, long prompts, prefixes that come and go to
host memory; aborts without end; a cache that fills, and one that does so beyond the bound that it
declares; an encoder cache that is short. Nothing may be done to them."""
NOT_HERE = {
    "device_raw": "needs a CUDA device",
    "kept_kv": "shows in the worker's last message about its device; a CPU's worker has none",
    "ipc_unreleased": "needs a CUDA device",
    "graph_per_key": "needs a CUDA device",
    "failed_capture": "needs a CUDA device",
    "grammar_masks": "needs a CUDA device",
    "collective_scratch": "needs two CUDA devices",
    "swapped_growth": "needs swap",
    "shared_orphan": "is looked for in a pod's own /dev/shm alone",
    "slice_kept": "grows by some KiB a prompt with the tiny model",
    "metric_labels": "grows by some KiB a request",
    "lora_residue": "grows with each adapter that is loaded; the clients load none",
    "descriptor_growth": "is no memory: the supervisor shows it in metrics alone",
    "cache_fills": "is no fault: see SOUND_CASES",
}


def _plain(name: str, growth_mib: int = 64, **changes: object) -> RealCase:
    # An engine that tells no load is given ten times its warm-up to do so.
    policy = Policy(growth_mib=growth_mib, warmup="1s")
    values: dict[str, object] = {"segment": OTHER, "process": "main process", "cure": ENGINE}
    values["policy"] = policy
    return RealCase(f"plain_{name}", name, **{**values, **changes})  # type: ignore[arg-type]


PLAIN_CASES = (
    _plain("small_objects"),
    _plain("heap_blocks"),
    _plain("fragmentation"),
    _plain("cycles"),
    _plain("mappings"),
    _plain("shared", segment=SHARED),
    _plain("locked"),
    _plain("growing_helper", process="other"),
    # Resident sums count what a forked helper shares with its parent once more.
    _plain("helpers_left", growth_mib=512, process="other"),
)
