"""Load a LoRA adapter into the running engine, and take one away."""

from __future__ import annotations

import logging
from pathlib import Path

from plimsoll_engine.frontend.async_engine import AsyncEngine, NoAnswer
from plimsoll_engine.frontend.requests.adapter_registry import AdapterRefused
from plimsoll_engine.messages import worker_ipc

log = logging.getLogger(__name__)

# Gigabytes from a slow disk, on a worker that computes beside it.
TIMEOUT_S = 60.0


async def load(engine: AsyncEngine, name: str, path: Path) -> None:
    """Load an adapter, which requests can name afterwards.

    Raises AdapterRefused and NoAnswer; nothing is left then.
    """
    async with engine.adapter_changes:
        if name == engine.settings.served_model_name:
            raise AdapterRefused(f"{name!r} is the name of the model itself", "lora_name")
        adapter = engine.adapters.new(name, path)
        message, epoch = adapter.loading(), engine.epochs.current
        try:
            answer = await engine.ask(
                message, message.query_id, worker_ipc.AdapterLoaded, TIMEOUT_S
            )
        except BaseException:
            if engine.ready is not None:
                engine.workers.send(worker_ipc.UnloadAdapter(adapter.number))
            raise
        if answer.error is not None:
            raise AdapterRefused(answer.error, "lora_path")
        if engine.epochs.current != epoch:
            raise NoAnswer("the worker was replaced meanwhile")
        engine.adapters.add(adapter)
        log.info("adapter loaded", extra={"adapter": name, "path": str(path)})


def unload(engine: AsyncEngine, name: str) -> bool:
    """No new request can name it; those that use it run on. False where there is none."""
    adapter = engine.adapters.find(name)
    if adapter is None:
        return False
    engine.unload(engine.adapters.unlist(adapter))
    log.info("adapter unloaded", extra={"adapter": name})
    return True
