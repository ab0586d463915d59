"""What a recording is of: an engine, a load, and what is injected."""

from __future__ import annotations

from dataclasses import dataclass

from leaklab.recording.loads import Load, Phase
from plimsoll_api.assessment import Segment
from plimsoll_api.engines import EngineType

KIB, MIB = 1 << 10, 1 << 20
STEADY = (Phase(60.0, 5.0, "answers"),)
CORE = {EngineType.VLLM: "enginecore", EngineType.SGLANG: "scheduler"}
"""The process that makes the steps, by the title that it sets."""
WORKER = "worker"
"""vLLM's process that runs the model, where it is not the core itself."""


@dataclass(frozen=True)
class Injection:
    """What is leaked inside vLLM or SGLang: ``bytes`` a unit of ``driver``, in pieces of ``piece``.

    ``frontend`` says whether it is in the engine's first process, and ``worker`` whether it is in
    vLLM's worker; else it is in the core. ``segment`` is null for what only looks like a leak; its
    clock runs ``speed`` times as fast, and ``bound`` is the most bytes that it holds, where that is
    stated. ``beside`` names a healthy mechanism that the same process carries out as well.
    """

    segment: Segment | None
    driver: str = "seconds"
    bytes: int = 0
    piece: int = MIB
    shape: str = "steady"
    frontend: bool = False
    speed: float = 1.0
    bound: int | None = None
    worker: bool = False
    beside: str = ""


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

    engine: EngineType
    number: int
    mechanism: str
    load: Load = STEADY
    cause: Injection | Fault | None = None
    flags: tuple[str, ...] = ()
    restarts: tuple[float, ...] = ()
    device: bool = False
    model: str = "tiny"
    seconds: float | None = None

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.number:02d}"

    @property
    def leaks(self) -> bool:
        """Whether what is injected is a leak."""
        return self.cause is not None and self.cause.segment is not None


VLLM, SGLANG, OURS = EngineType.VLLM, EngineType.SGLANG, EngineType.PLIMSOLL
IN_USE, RETAINED, OBJECTS = (
    Segment.MALLOC_IN_USE, Segment.MALLOC_RETAINED, Segment.PYTHON_OBJECTS,
)  # fmt: skip
OTHER, SHARED = Segment.ANONYMOUS_OTHER, Segment.SHARED
TENSORS, UNUSED = Segment.TORCH_ALLOCATED, Segment.TORCH_RESERVED_UNUSED
BURSTS = (Phase(40.0, 1.0, "answers"), Phase(20.0, 12.0, "answers"))
LEAVING = (Phase(60.0, 5.0, "leaving"),)
RAMP = tuple(Phase(100.0, per_s, "answers") for per_s in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
RUSH = (Phase(160.0, 0.0, "answers"), Phase(40.0, 12.0, "answers"))
WAVES = tuple(Phase(50.0, per_s, "answers") for per_s in (1.0, 3.0, 5.0, 6.0, 5.0, 3.0))
BATCH_JOBS = (Phase(90.0, 1.0, "answers"), Phase(20.0, 6.0, "mixed"), Phase(10.0, 0.0, "mixed"))
LIGHT, MIXED = (Phase(60.0, 3.0, "answers"),), (Phase(60.0, 2.5, "mixed"),)
NAPS = (Phase(70.0, 4.0, "answers"), Phase(50.0, 0.0, "answers"))
WAVES_OF_THREE = tuple(Phase(30.0, per_s, "answers") for per_s in (1.0, 3.0, 4.0, 3.0))
LONG_S = 1620.0
ADAPTERS = ("--enable-lora", "--max-loras=2", "--max-lora-rank=8")
OWN_WORKER = ("--distributed-executor-backend=mp",)
FEW_BLOCKS = ("--num-gpu-blocks-override=300", "--max-num-seqs=32")
OFFLOAD = ("--kv-offload-bytes=64Mi", "--num-blocks=96", "--max-num-seqs=8")
