"""Parser of ``--lora-modules``: NAME=PATH, or vLLM's JSON object."""

from __future__ import annotations

from typing import Annotated

import msgspec

NonEmptyText = Annotated[str, msgspec.Meta(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


class LoraModule(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """LoRA adapter that the engine loads at startup.

    ``base_model_name`` is the adapter's ``parent`` in ``/v1/models``.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    path: NonEmptyText
    base_model_name: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] | None = None


def parse_lora_module(text: str) -> LoraModule:
    """Return the adapter that NAME=PATH or a JSON object describes. Raises ValueError."""
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text, type=LoraModule)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(str(error)) from None
    name, _, path = text.partition("=")
    if not name or not path:
        raise ValueError("use NAME=PATH, or a JSON object with the fields name and path")
    return LoraModule(name, path)
