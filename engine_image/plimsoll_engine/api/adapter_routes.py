"""LoRA adapters at run time, with vLLM's paths and bodies.

Only with ``--enable-lora``: a path in a body is one of this server's folders.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from plimsoll_engine.api.errors import ApiError, invalid
from plimsoll_engine.api.protocol import LoadAdapterRequest, UnloadAdapterRequest
from plimsoll_engine.frontend.admin import adapter_loading
from plimsoll_engine.frontend.async_engine import AsyncEngine, NoAnswer
from plimsoll_engine.frontend.requests.adapter_registry import AdapterRefused, RegisteredAdapter


async def load(engine: AsyncEngine, body: LoadAdapterRequest) -> str:
    """Load the adapter that a body names; raise ApiError where it cannot be."""
    path = Path(body.lora_path)
    if not path.is_absolute():
        raise invalid(
            f"lora_path {body.lora_path!r}: give the whole path of a folder on this server",
            "lora_path",
        )
    if await asyncio.to_thread(_missing, path):
        raise ApiError(
            404, f"lora_path {body.lora_path!r}: this server has no such folder",
            param="lora_path", code="adapter_not_found",
        )  # fmt: skip
    try:
        await adapter_loading.load(engine, body.lora_name, path)
    except AdapterRefused as error:
        raise invalid(str(error), error.param) from None
    except NoAnswer as error:
        raise ApiError(503, f"not loaded: {error}", code="unavailable", retry=True) from None
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


def _missing(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # the worker says what is wrong with it
        return False
    return False


def unload(engine: AsyncEngine, body: UnloadAdapterRequest) -> str:
    """Unload the adapter that a body names; raise ApiError where it is unknown."""
    if not adapter_loading.unload(engine, body.lora_name):
        raise ApiError(
            404, f"the adapter {body.lora_name!r} is not loaded", param="lora_name",
            code="adapter_not_found",
        )  # fmt: skip
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def card(base: dict[str, Any], adapter: RegisteredAdapter) -> dict[str, Any]:
    """Return what ``/v1/models`` says of ``adapter``; ``base`` is the model's own."""
    parent = base["id"] if adapter.parent is None else adapter.parent
    return base | {"id": adapter.name, "root": str(adapter.path), "parent": parent}
