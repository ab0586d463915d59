"""Diagnostics of the frontend and the worker, as text."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import io
import os
import secrets
from collections import Counter

from plimsoll_api.admin import Diagnostic
from plimsoll_engine.frontend.async_engine import AsyncEngine, NoAnswerError
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.process.allocations import MAX_RANKED_LINES

WORKER_REPLY_TIMEOUT_S = 10.0
# Only the tail of a stacks file is shown: the last dump, not older ones.
MAX_STACKS_BYTES = 256 << 10


async def run_diagnostic(engine: AsyncEngine, kind: Diagnostic) -> str:
    """Return a diagnostic of the frontend and of the worker as text."""
    frontend = _diagnose_frontend(engine, kind)
    if kind is Diagnostic.STACKS:
        worker = await _read_worker_stacks(engine)
    else:
        worker = await _diagnose_worker(engine, kind)
    return f"== frontend\n{frontend}\n== worker, epoch {engine.epochs.current}\n{worker}\n"


async def _diagnose_worker(engine: AsyncEngine, kind: Diagnostic) -> str:
    query_id = f"diagnostic-{secrets.token_hex(8)}"
    query = worker_ipc.DiagnosticQuery(query_id, str(kind))
    try:
        return (
            await engine.query_worker(
                query, query_id, worker_ipc.DiagnosticReport, WORKER_REPLY_TIMEOUT_S
            )
        ).text
    except NoAnswerError as error:
        return f"unknown: {error}"


async def _read_worker_stacks(engine: AsyncEngine) -> str:
    # A signal makes the worker write its stacks, even if it hangs.
    path = await engine.workers.dump_stacks()
    if path is None:
        return (
            "no stacks: the worker is not running, hangs in the kernel, or cannot write to the run"
            " directory; in the last case, the engine's log has the stacks"
        )
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_STACKS_BYTES))
        return file.read().decode(errors="replace")


def _format_stacks() -> str:
    # In memory, because the disk may be the problem.
    with open(os.memfd_create("stacks"), "w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        threads = file.read()
    tasks = io.StringIO()
    for task in asyncio.all_tasks():
        task.print_stack(file=tasks, limit=8)
    return f"{threads}\n-- tasks\n{tasks.getvalue()}"


def _count_objects() -> str:
    counts = Counter(
        f"{type(item).__module__}.{type(item).__qualname__}" for item in gc.get_objects()
    )
    lines = [f"{count:>9}  {name}" for name, count in counts.most_common(MAX_RANKED_LINES)]
    return "\n".join([f"gc counts {gc.get_count()}, garbage {len(gc.garbage)}", *lines]) + "\n"


def _diagnose_frontend(engine: AsyncEngine, kind: Diagnostic) -> str:
    match kind:
        case Diagnostic.STACKS:
            return _format_stacks()
        case Diagnostic.GC:
            return _count_objects()
        case Diagnostic.TRACEMALLOC:
            return engine.allocations.report()
        case Diagnostic.TORCH:
            return "the frontend does not use torch"
