"""Load and unload LoRA adapters while the engine runs."""

from __future__ import annotations

import logging
from pathlib import Path

from plimsoll_engine.frontend.async_engine import AsyncEngine, NoAnswerError
from plimsoll_engine.frontend.requests.adapter_registry import AdapterRefusedError
from plimsoll_engine.messages import worker_ipc

log = logging.getLogger(__name__)

# Enough for gigabytes from a slow disk, while the worker also runs requests.
ADAPTER_LOAD_TIMEOUT_S = 60.0


async def load_adapter(engine: AsyncEngine, name: str, path: Path) -> None:
    """Load an adapter, and let requests use it.

    Raises AdapterRefusedError or NoAnswerError if the adapter was not loaded.
    """
    async with engine.adapter_changes:
        if name == engine.settings.served_model_name:
            raise AdapterRefusedError(
                f"{name!r} is the name of the served model: choose another name", "lora_name"
            )
        adapter = engine.adapters.create(name, path)
        message, epoch = adapter.make_load_message(), engine.epochs.current
        try:
            answer = await engine.query_worker(
                message, message.query_id, worker_ipc.AdapterLoadResult, ADAPTER_LOAD_TIMEOUT_S
            )
        except BaseException:
            if engine.ready is not None:
                engine.workers.send(worker_ipc.UnloadAdapter(adapter.number))
            raise
        if answer.error is not None:
            raise AdapterRefusedError(answer.error, "lora_path")
        if engine.epochs.current != epoch:
            raise NoAnswerError(
                f"the worker was replaced while it loaded the adapter {name!r}: load it again"
            )
        engine.adapters.add(adapter)
        log.info("adapter loaded", extra={"adapter": name, "path": str(path)})


def unload_adapter(engine: AsyncEngine, name: str) -> bool:
    """Unload an adapter once no request uses it, and hide it until then.

    Return False if no adapter has this name.
    """
    adapter = engine.adapters.find(name)
    if adapter is None:
        return False
    engine.send_unload(engine.adapters.hide(adapter))
    log.info("adapter unloaded", extra={"adapter": name})
    return True
