"""What a person wants to see of a sick engine; each answer is text and comes within seconds."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import io
import os
import secrets
from collections import Counter

from plimsoll_api.admin import Diagnostic
from plimsoll_engine.frontend.async_engine import AsyncEngine, NoAnswer
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.process.allocations import TOP

WORKER_TIMEOUT_S = 10.0
# The tail of a stacks file: the last dump, not those of hours ago.
STACKS_BYTES = 256 << 10


async def diagnose(engine: AsyncEngine, kind: Diagnostic) -> str:
    """Frontend first, then the worker. What the worker cannot say is said so."""
    own = _own(engine, kind)
    if kind is Diagnostic.STACKS:
        worker = await _worker_stacks(engine)
    else:
        worker = await _ask(engine, kind)
    return f"== frontend\n{own}\n== worker, epoch {engine.epochs.current}\n{worker}\n"


async def _ask(engine: AsyncEngine, kind: Diagnostic) -> str:
    query_id = f"diagnostic-{secrets.token_hex(8)}"
    query = worker_ipc.DiagnosticQuery(query_id, str(kind))
    try:
        return (
            await engine.ask(query, query_id, worker_ipc.DiagnosticReport, WORKER_TIMEOUT_S)
        ).text
    except NoAnswer as error:
        return f"unknown: {error}"


async def _worker_stacks(engine: AsyncEngine) -> str:
    """By a signal, not by a message: a hung worker reads none."""
    path = await engine.workers.dump_stacks()
    if path is None:
        return (
            "unknown: the worker is not there, hangs in the kernel, or has no room for its stacks"
            " in the run directory; without a writable one they go to its log"
        )
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - STACKS_BYTES))
        return file.read().decode(errors="replace")


def _stacks() -> str:
    # In memory: the disk may be what is sick.
    with open(os.memfd_create("stacks"), "w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        threads = file.read()
    tasks = io.StringIO()
    for task in asyncio.all_tasks():
        task.print_stack(file=tasks, limit=8)
    return f"{threads}\n-- tasks\n{tasks.getvalue()}"


def _objects() -> str:
    counts = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    lines = [f"{count:>9}  {name}" for name, count in counts.most_common(TOP)]
    return "\n".join([f"gc counts {gc.get_count()}, garbage {len(gc.garbage)}", *lines]) + "\n"


def _own(engine: AsyncEngine, kind: Diagnostic) -> str:
    match kind:
        case Diagnostic.STACKS:
            return _stacks()
        case Diagnostic.GC:
            return _objects()
        case Diagnostic.TRACEMALLOC:
            return engine.allocations.report()
        case Diagnostic.TORCH:
            return "the frontend holds no torch"
