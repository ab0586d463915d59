"""Load and unload LoRA adapters at run time, with vLLM's paths and bodies (``--enable-lora``)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from plimsoll_engine.api.errors import ApiError, make_invalid_error
from plimsoll_engine.api.protocol import LoadAdapterRequest, UnloadAdapterRequest
from plimsoll_engine.frontend.admin import adapter_loading
from plimsoll_engine.frontend.async_engine import AsyncEngine, NoAnswerError
from plimsoll_engine.frontend.requests.adapter_registry import (
    AdapterRefusedError,
    RegisteredAdapter,
)


async def load_adapter(engine: AsyncEngine, body: LoadAdapterRequest) -> str:
    """Load the adapter in ``body``, and return vLLM's success message. Raises ApiError."""
    path = Path(body.lora_path)
    if not path.is_absolute():
        raise make_invalid_error(
            f"lora_path must be an absolute path, got {body.lora_path!r}: give the path of a "
            "folder on the server",
            "lora_path",
        )
    if await asyncio.to_thread(_is_missing, path):
        raise ApiError(
            404, f"lora_path {body.lora_path!r} does not exist on this server: give the path of a"
            " folder on the server", param="lora_path", code="adapter_not_found",
        )  # fmt: skip
    try:
        await adapter_loading.load_adapter(engine, body.lora_name, path)
    except AdapterRefusedError as error:
        raise make_invalid_error(str(error), error.param) from None
    except NoAnswerError as error:
        raise ApiError(
            503, f"failed to load the adapter: {error}", code="unavailable", should_retry=True
        ) from None
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # the worker reports the error
        return False
    return False


def unload_adapter(engine: AsyncEngine, body: UnloadAdapterRequest) -> str:
    """Unload the adapter in ``body``, and return vLLM's success message. Raises ApiError."""
    if not adapter_loading.unload_adapter(engine, body.lora_name):
        raise ApiError(
            404, f"the adapter {body.lora_name!r} is not loaded: use a name in /v1/models",
            param="lora_name", code="adapter_not_found",
        )  # fmt: skip
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def make_model_card(base: dict[str, Any], adapter: RegisteredAdapter) -> dict[str, Any]:
    """Return the entry of ``adapter`` in ``/v1/models``. ``base`` is the served model's entry."""
    parent = base["id"] if adapter.parent is None else adapter.parent
    return base | {"id": adapter.name, "root": str(adapter.path), "parent": parent}
