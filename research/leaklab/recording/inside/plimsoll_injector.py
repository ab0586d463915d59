"""Runs inside vLLM and SGLang: leaks memory as the rig's plan says, and counts what it leaked.

Both engines load their plugins in every process. Each waits for ``inject.json`` in the folder that
``PLIMSOLL_INJECTOR_DIR`` names; the process that the plan means carries it out, and appends what it
has taken so far to ``injected.jsonl`` once a second. Standard library only, with those modules of
``leaklab`` beside it that it imports, and the torch of the engine.

With ``PLIMSOLL_INJECTOR_WAITS`` set, vLLM's processes sleep while they wait for each other.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leaklab import (
    bookkeeping_leaks,
    bounded_caches,
    bounded_growth,
    device_growth,
    device_reserves,
    ended_growth,
    engine_leaks,
    library_leaks,
    mechanisms,
    runtime_leaks,
    service_leaks,
)
from leaklab.mechanisms import Take

FOLDER_ENV, WAITS_ENV = "PLIMSOLL_INJECTOR_DIR", "PLIMSOLL_INJECTOR_WAITS"
QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
PLAN, COUNTED = "inject.json", "injected.jsonl"
TICK_S, COUNT_S, LOOK_S = 0.1, 1.0, 0.0005
NOMINAL_S = 120.0
"""When growth that gets faster has the rate that its plan names."""
STEP_S = 20.0
"""Between two steps of growth by steps."""
LATE_S = 75.0
"""What a late leak waits after its plan."""

_started = False


def load() -> None:
    """The plugin. vLLM may call it more than once in a process."""
    global _started
    folder = os.environ.get(FOLDER_ENV)
    if folder and not _started:
        _started = True
        threading.Thread(target=_wait, args=(Path(folder),), daemon=True).start()


def _wait(folder: Path) -> None:
    spins = bool(os.environ.get(WAITS_ENV))
    while True:
        time.sleep(5 * TICK_S)
        spins = spins and not stop_spinning()
        try:
            plan = json.loads((folder / PLAN).read_text())
        except (OSError, ValueError):
            continue
        if plan["pid"] == os.getpid() if plan["pid"] else plan["process"] == _title():
            carry_out(plan, folder / COUNTED)
        return


def stop_spinning() -> bool:
    """Let vLLM's processes sleep between two looks into their queues, instead of yielding the
    processor; return whether it was possible yet.

    A reader looks without a pause for a second after each message. On a small machine that is all
    of the time, and a whole processor for each engine.
    """
    queues = sys.modules.get(QUEUES)
    if not hasattr(queues, "sched_yield"):
        return False
    queues.sched_yield = lambda: time.sleep(LOOK_S)  # type: ignore[union-attr]
    return True


def carry_out(plan: dict[str, Any], counted: Path) -> None:
    """Leak, or do what only looks like it, until the process ends."""
    began = time.monotonic()
    if plan["mechanism"] in HEALTHY:
        tick = HEALTHY[plan["mechanism"]]()
        while True:
            tick(plan["speed"] * (time.monotonic() - began))
            time.sleep(TICK_S)
    take, units = TAKES[plan["mechanism"]](), DRIVERS[plan["driver"]]()
    beside = HEALTHY[plan.get("beside") or "idle"]()
    due, taken, before, stepped, noted = 0.0, 0, units(), 0.0, 0.0
    while True:
        time.sleep(TICK_S)
        age, now = time.monotonic() - began, units()
        beside(age)
        due += plan["bytes"] * (now - before) * share(plan["shape"], age)
        before = now
        waits = plan["shape"] == "steps" and age - stepped < STEP_S
        if not waits:
            stepped = age
            while due >= plan["piece"]:
                take(plan["piece"])
                taken += plan["piece"]
                due -= plan["piece"]
        if age - noted >= COUNT_S:
            noted = age
            with counted.open("a") as file:
                file.write(json.dumps({"at": time.time(), "bytes": taken, "units": now}) + "\n")


def share(shape: str, age_s: float) -> float:
    """Return the share of its nominal rate at which a growth of this shape takes memory."""
    if shape == "accelerating":
        return age_s / NOMINAL_S
    return 0.0 if shape == "late" and age_s < LATE_S else 1.0


# ---- what drives it: a count that grows


def seconds() -> Callable[[], float]:
    return time.monotonic


def requests() -> Callable[[], float]:
    return lambda: _ended()["requests"]


def aborts() -> Callable[[], float]:
    return lambda: _ended()["aborts"]


def tokens() -> Callable[[], float]:
    return lambda: _ended()["tokens"]


def lengths() -> Callable[[], float]:
    """How many prompts had a length that none before had, in vLLM's core."""
    return lambda: float(_ended()["lengths"])


def adapters() -> Callable[[], float]:
    """How many adapters ever answered, in vLLM's core."""
    return lambda: float(_ended()["adapters"])


_counts: dict[str, float] = {}


def _ended() -> dict[str, float]:
    """What ended in this process so far, since somebody first asked."""
    if not _counts:
        _counts.update(requests=0.0, aborts=0.0, tokens=0.0, lengths=0.0, adapters=0.0)
        if "vllm" in sys.modules:
            _count_vllm()
        else:
            _count_sglang()
    return _counts


def _count_vllm() -> None:
    if _title() != "enginecore":
        from vllm.v1.engine.async_llm import AsyncLLM

        add, abort = AsyncLLM.add_request, AsyncLLM.abort

        def adding(engine: Any, *given: Any, **more: Any) -> Any:
            _counts["requests"] += 1
            return add(engine, *given, **more)

        def aborting(engine: Any, *given: Any, **more: Any) -> Any:
            _counts["aborts"] += 1
            return abort(engine, *given, **more)

        AsyncLLM.add_request, AsyncLLM.abort = adding, aborting
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    free, lengths, adapters = Scheduler._free_request, set[int](), set[int]()

    def freeing(scheduler: Any, request: Any, *given: Any, **more: Any) -> Any:
        _counts["requests"] += 1
        _counts["aborts"] += request.status.name == "FINISHED_ABORTED"
        _counts["tokens"] += request.num_output_tokens
        lengths.add(request.num_prompt_tokens)
        if request.lora_request is not None:
            adapters.add(request.lora_request.lora_int_id)
        _counts.update(lengths=len(lengths), adapters=len(adapters))
        return free(scheduler, request, *given, **more)

    Scheduler._free_request = freeing


def _count_sglang() -> None:
    """The scheduler has bound most of its methods to messages by now, but not this one."""
    if _title() != "scheduler":
        managers = importlib.import_module("sglang.srt.managers.tokenizer_manager")
        Manager = managers.TokenizerManager
        generate, abort = Manager.generate_request, Manager.abort_request

        def generating(manager: Any, *given: Any, **more: Any) -> Any:
            _counts["requests"] += 1
            return generate(manager, *given, **more)

        def aborting(manager: Any, *given: Any, **more: Any) -> Any:
            _counts["aborts"] += 1
            return abort(manager, *given, **more)

        Manager.generate_request, Manager.abort_request = generating, aborting
        return
    Scheduler = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
    process = Scheduler.process_batch_result

    def processing(scheduler: Any, batch: Any, *given: Any, **more: Any) -> Any:
        ended = [request for request in batch.reqs if not request.finished()]
        answer = process(scheduler, batch, *given, **more)
        ended = [request for request in ended if request.finished()]
        _counts["requests"] += len(ended)
        _counts["aborts"] += sum(
            type(request.finished_reason).__name__ == "FINISH_ABORT" for request in ended
        )
        _counts["tokens"] += len(batch.reqs)
        return answer

    Scheduler.process_batch_result = processing


HEALTHY = (
    mechanisms.HEALTHY
    | bounded_growth.HEALTHY
    | ended_growth.HEALTHY
    | device_growth.HEALTHY
    | device_reserves.HEALTHY
)
TAKES: dict[str, Callable[[], Take]] = (
    mechanisms.LEAKS
    | service_leaks.LEAKS
    | engine_leaks.LEAKS
    | runtime_leaks.LEAKS
    | library_leaks.LEAKS
    | bookkeeping_leaks.LEAKS
    | device_growth.LEAKS
    | device_reserves.LEAKS
    | bounded_caches.BOUNDED
    | device_growth.BOUNDED
)
DRIVERS = {
    function.__name__: function
    for function in (seconds, requests, aborts, tokens, lengths, adapters)
}


def _title() -> str:
    """``enginecore`` or ``worker`` of vLLM, ``scheduler`` or ``detokenizer`` of SGLang; empty for
    a process without such a title."""
    title = Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    named = re.match(r"(?:VLLM|sglang)::([A-Za-z]+)", title)
    return named[1].lower() if named else ""
