"""Free memory that no request needs, and report the result of each step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from plimsoll_api.admin import OperationStep
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.messages import rank_ipc
from plimsoll_engine.process import host_memory
from plimsoll_engine.process.host_memory import PythonMemoryEstimator


def trim(
    engine: EngineCore, python_memory: PythonMemoryEstimator, leader: Leader | None = None
) -> list[OperationStep]:
    """Free caches, garbage and unused allocations, and return a report for each step.

    The sizes in a report are summed over all ranks of ``leader``.
    """
    steps = [
        _run_step(f"{owner.name}_flush", flush.content, flush.nbytes, flush.free)
        for owner in engine.list_owners()
        if (flush := owner.flush) is not None
    ]
    reports = (
        []
        if leader is None
        else leader.request_replies(rank_ipc.TrimRank(), rank_ipc.RankTrimReport)
    )
    return steps + _combine_steps(
        [trim_process(engine.runner.device, python_memory), *(o.steps for o in reports)]
    )


def trim_process(device: torch.device, python_memory: PythonMemoryEstimator) -> list[OperationStep]:
    """Collect garbage and free unused allocations, and return a report for each step."""

    def read_host_in_use() -> int | None:
        in_use, _ = host_memory.read_malloc_bytes()
        return None if in_use is None else in_use + python_memory.measure()[1]

    steps = [
        _run_step("gc_collect", "malloc in use and Python objects", read_host_in_use, gc.collect)
    ]
    if device.type == "cuda":
        steps.append(
            _run_step(
                "empty_cache",
                "device memory reserved by torch",
                lambda: torch.cuda.memory_reserved(device),
                torch.cuda.empty_cache,
            )
        )
    steps.append(
        _run_step(
            "malloc_trim",
            "anonymous resident memory",
            host_memory.read_rss_anon_bytes,
            host_memory.trim_malloc,
        )
    )
    return steps


def _combine_steps(rank_steps: list[list[OperationStep]]) -> list[OperationStep]:
    # The longest duration and the sums of all sizes, which are None if one of the sizes is unknown.
    def sum_if_all_known(values: list[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    return [
        OperationStep(
            same[0].name,
            max(step.duration_s for step in same),
            sum_if_all_known([step.before_bytes for step in same]),
            sum_if_all_known([step.after_bytes for step in same]),
            same[0].detail,
        )
        for same in zip(*rank_steps, strict=True)
    ]


def _run_step(
    name: str, detail: str, measure: Callable[[], int | None], action: Callable[[], object]
) -> OperationStep:
    before = measure()
    started = time.monotonic()
    action()
    duration_s = time.monotonic() - started
    return OperationStep(name, duration_s, before, measure(), detail)
