"""Whether an engine gives every byte back, in one process, over and over.

    python -m bench.shutdown --name shutdown-h200            # a GPU
    python -m bench.shutdown --cycles 20                     # a CPU

Each cycle starts a tiny engine (weights, KV pool, warm-up), serves some requests and shuts it down.
``allocated_left_bytes`` is the most that torch still had allocated after any shutdown, above the
baseline; ``drift_bytes`` what it had after the last cycle above that after the first;
``nvml_left_mib`` the device's memory in use after the last cycle above that before the first. A
cycle that is not counted comes before: it loads the kernels, which stay with the CUDA context. On a
CPU the device's figures are absent, and ``host_drift_bytes`` is
what malloc and Python hold more after the last cycle than after the tenth part of them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import pynvml
import torch

from bench.result import arguments_of, publish
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.process import host_memory
from plimsoll_engine.process.host_memory import PythonMemoryEstimator
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_engine.worker.parts import measure_baseline_bytes
from plimsoll_faults.models.tiny import write_checkpoint

MIB = 1 << 20
REQUESTS, PROMPT, NEW = 4, 40, 4


def cycle(config: WorkerConfig) -> tuple[int | None, int | None, int]:
    """(allocated after shutdown, its baseline, the largest allocation while it served)."""
    lifecycle = CoreLifecycle(config)
    engine = lifecycle.start()
    for number in range(REQUESTS):
        engine.submit(Submit(f"r{number}", [7 + number] * PROMPT, Sampling(max_tokens=NEW)))
    while engine.has_work:
        output = engine.step()
        assert not output.dropped, output.dropped
    peak = lifecycle.measure_allocated_device_bytes() or 0
    del engine
    lifecycle.shut_down()
    return lifecycle.measure_allocated_device_bytes(), lifecycle.device.baseline, peak


def nvml_used(device: torch.device) -> int | None:
    """Bytes in use on ``device`` by all processes; None where NVML does not answer."""
    if device.type != "cuda":
        return None
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()))
        return int(memory.used)
    except pynvml.NVMLError:
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)


def host_bytes(python: PythonMemoryEstimator) -> int | None:
    in_use, _ = host_memory.read_malloc_bytes()
    return None if in_use is None else in_use + python.measure()[1]


def main() -> None:
    parser = arguments_of(__doc__, "shutdown")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=4096, help="KV blocks of 16 tokens")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    measure_baseline_bytes(device, torch.float32)
    python = PythonMemoryEstimator()
    left: list[int] = []
    after: list[int] = []
    host: list[int | None] = []
    peaks: list[int] = []
    times: list[float] = []
    with tempfile.TemporaryDirectory(prefix="plb-") as folder:
        write_checkpoint(Path(folder))
        config = WorkerConfig(
            folder, folder, "unused", "float32", device.type, max_num_seqs=8, max_model_len=512,
            num_blocks=flags.blocks,
        )  # fmt: skip
        cycle(config)
        before = nvml_used(device)
        for _ in range(flags.cycles):
            began = time.monotonic()
            allocated, baseline, peak = cycle(config)
            times.append(time.monotonic() - began)
            peaks.append(peak)
            if allocated is not None and baseline is not None:
                left.append(allocated - baseline)
                after.append(allocated)
            host.append(host_bytes(python))
    now = nvml_used(device)
    early = host[len(host) // 10] if len(host) > 1 else None
    figures: dict[str, float | int | None] = {
        "cycles_count": flags.cycles,
        "allocated_left_bytes": max(left) if left else None,
        "drift_bytes": after[-1] - after[0] if after else None,
        "peak_allocated_bytes": max(peaks) if after else None,
        "nvml_left_mib": (
            None if now is None or before is None else round((now - before) / MIB, 1)
        ),
        "host_drift_bytes": (None if host[-1] is None or early is None else host[-1] - early),
        "cycle_p50_s": round(statistics.median(times), 4),
    }
    publish(flags.name, figures, folder=flags.out)


if __name__ == "__main__":
    main()
