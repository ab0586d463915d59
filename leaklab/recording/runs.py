"""The recordings that the rig can make: engine, load, and what is injected.

``name`` is the recording's and says nothing about it. ``mechanism`` is how memory is held, or what
the load of a healthy run does; ``split.py`` divides the runs by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from leaklab.recording.loads import Load, Phase
from plimsoll_api.assessment import Segment
from plimsoll_api.engines import EngineType

KIB, MIB = 1 << 10, 1 << 20
STEADY = (Phase(60.0, 5.0, "answers"),)
CORE = {EngineType.VLLM: "enginecore", EngineType.SGLANG: "scheduler"}
"""The process that makes the steps, by the title that it sets."""


@dataclass(frozen=True)
class Injection:
    """What is leaked inside vLLM or SGLang: ``bytes`` a unit of ``driver``, in pieces of ``piece``.

    ``frontend`` says whether it is in the engine's first process; else it is in the core.
    ``segment`` is null for what only looks like a leak; its clock runs ``speed`` times as fast.
    """

    segment: Segment | None
    driver: str = "seconds"
    bytes: int = 0
    piece: int = MIB
    shape: str = "steady"
    frontend: bool = False
    speed: float = 1.0


@dataclass(frozen=True)
class Fault:
    """A fault of our engine: each unit of ``counter``, in the engine's status, holds ``bytes``."""

    text: str
    segment: Segment | None
    bytes: int = 0
    counter: str = "requests_total"


@dataclass(frozen=True)
class Run:
    """``flags`` are the engine's. ``restarts`` are seconds at which the engine is ended and starts
    again. ``device`` is set where only a device can show it. ``model`` is a tiny one of ours.
    ``seconds`` is the recording's length where it is not that of its batch."""

    name: str
    engine: EngineType
    mechanism: str
    load: Load = STEADY
    cause: Injection | Fault | None = None
    flags: tuple[str, ...] = ()
    restarts: tuple[float, ...] = ()
    device: bool = False
    model: str = "tiny"
    seconds: float | None = None

    @property
    def leaks(self) -> bool:
        """Whether what is injected is a leak."""
        return self.cause is not None and self.cause.segment is not None


VLLM, SGLANG, OURS = EngineType.VLLM, EngineType.SGLANG, EngineType.PLIMSOLL
IN_USE, RETAINED, OBJECTS = (
    Segment.MALLOC_IN_USE, Segment.MALLOC_RETAINED, Segment.PYTHON_OBJECTS,
)  # fmt: skip
OTHER, SHARED, TENSORS = Segment.ANONYMOUS_OTHER, Segment.SHARED, Segment.TORCH_ALLOCATED
BURSTS = (Phase(40.0, 1.0, "answers"), Phase(20.0, 12.0, "answers"))
LEAVING = (Phase(60.0, 5.0, "leaving"),)
RAMP = tuple(Phase(100.0, per_s, "answers") for per_s in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
RUSH = (Phase(160.0, 0.0, "answers"), Phase(40.0, 12.0, "answers"))
WAVES = tuple(Phase(50.0, per_s, "answers") for per_s in (1.0, 3.0, 5.0, 6.0, 5.0, 3.0))
BATCH_JOBS = (Phase(90.0, 1.0, "answers"), Phase(15.0, 4.0, "long"), Phase(15.0, 0.0, "answers"))
LONG_S = 1620.0
FEW_BLOCKS = ("--num-gpu-blocks-override=300", "--max-num-seqs=32")
OFFLOAD = ("--kv-offload-bytes=64Mi", "--num-blocks=96", "--max-num-seqs=8")

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
        flags=("--enable-lora", "--max-loras=2", "--max-lora-rank=8"),
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
    Run("vllm-35", VLLM, "logprobs", (Phase(60.0, 3.0, "logprobs"),)),
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
    # ---- leaks of our engine
    Run(
        "plimsoll-01", OURS, "device_dict", device=True,
        cause=Fault("device_dict:bytes_per_request=128Ki", TENSORS, 128 * KIB),
    ),
    Run(
        "plimsoll-02", OURS, "request_cycle",
        cause=Fault("request_cycle:payload_bytes=192Ki", IN_USE, 192 * KIB),
    ),
    Run(
        "plimsoll-03", OURS, "ipc_unreleased", BURSTS, device=True,
        cause=Fault("ipc_unreleased:bytes_per_request=256Ki", TENSORS, 256 * KIB),
    ),
    Run(
        "plimsoll-04", OURS, "shared_growth",
        cause=Fault("shared_growth:bytes_per_request=96Ki", SHARED, 96 * KIB),
    ),
    # ---- our engine, healthy
    Run(
        "plimsoll-05", OURS, "images", (Phase(60.0, 2.0, "albums"),),
        flags=("--media-cache-mib=64",), model="llava",
    ),
    Run("plimsoll-06", OURS, "returning_prefixes", (Phase(60.0, 8.0, "returning"),), flags=OFFLOAD),
    Run(
        "plimsoll-07", OURS, "declared_cache",
        cause=Fault("cache_fills:text_bytes=8Ki,bound=true", None),
    ),
    Run(
        "plimsoll-08", OURS, "idle_gaps",
        (Phase(30.0, 6.0, "answers"), Phase(60.0, 0.0, "answers")),
    ),
    # ---- our engine, more of both: what leaks on its device there is in malloc's memory on a CPU
    Run(
        "plimsoll-09", OURS, "append_list",
        cause=Fault("append_list:bytes_per_request=96Ki", OBJECTS, 96 * KIB),
    ),
    Run(
        "plimsoll-10", OURS, "stored_exception", BURSTS,
        Fault("stored_exception:bytes_per_request=96Ki", IN_USE, 96 * KIB),
    ),
    Run(
        "plimsoll-11", OURS, "method_cache", (Phase(60.0, 4.0, "growing"),),
        Fault("method_cache:bytes_per_request=128Ki", IN_USE, 128 * KIB),
    ),
    Run(
        "plimsoll-12", OURS, "mmap_growth",
        cause=Fault("mmap_growth:bytes_per_request=96Ki", OTHER, 96 * KIB),
    ),
    Run(
        "plimsoll-13", OURS, "tokenizer_cache", (Phase(60.0, 5.0, "wordy"),),
        # A list has 8 bytes for each token.
        Fault("tokenizer_cache:repeat=64", IN_USE, 64 * 8, "prompt_tokens_total"),
    ),
    Run(
        "plimsoll-14", OURS, "grammar_cache_growth",
        # Measured with mallinfo2: 60 grammars of this length took 80,548 bytes each.
        cause=Fault("grammar_cache_growth:text_bytes=4Ki", IN_USE, 80_548),
    ),
    Run(
        "plimsoll-15", OURS, "abort_unregistered", (Phase(60.0, 4.0, "leaving_early"),),
        Fault("abort_unregistered:payload_bytes=224Ki", IN_USE, 224 * KIB, "aborted_total"),
        flags=("--max-num-batched-tokens=16",),
    ),
    Run(
        "plimsoll-16", OURS, "pinned_buffers",
        (Phase(40.0, 3.0, "answers"), Phase(40.0, 0.0, "answers"), Phase(40.0, 9.0, "answers")),
        Fault("pinned_buffers:bytes_per_request=128Ki", IN_USE, 128 * KIB),
    ),
    Run(
        "plimsoll-17", OURS, "device_dict", (Phase(60.0, 4.0, "growing"),),
        Fault("device_dict:bytes_per_request=112Ki", IN_USE, 112 * KIB),
    ),
    Run(
        "plimsoll-18", OURS, "choices", (Phase(60.0, 2.0, "choices"),),
        flags=("--num-blocks=512",),
    ),
    Run("plimsoll-19", OURS, "steady"),
    Run(
        "plimsoll-20", OURS, "ramp",
        tuple(Phase(100.0, per_s, "answers") for per_s in (1.0, 2.0, 4.0, 6.0, 8.0, 10.0)),
    ),
)  # fmt: skip
