"""The owners of images and sounds in a worker: their sizes and their place in the ledger."""

from __future__ import annotations

from plimsoll_api.admin import MemoryKind
from plimsoll_engine.core import settings as sizes
from plimsoll_engine.core.encoder_cache import EncoderCache
from plimsoll_engine.core.engine import Engine
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.models.interface import MediaModel, Model
from plimsoll_engine.zygote_ipc import WorkerConfig


def encoder_cache(
    model: Model, asked: WorkerConfig, settings: sizes.Settings
) -> EncoderCache | None:
    """The scheduler's ledger of encoder outputs; None for a model that takes text alone."""
    if not isinstance(model, MediaModel):
        return None
    budget = sizes.encoder_tokens(
        asked.encoder_cache_tokens, settings, model.example().tokens, model.lifelong
    )
    return EncoderCache(budget, model.lifelong)


def register_owners(ledger: Ledger, engine: Engine, model: Model, tensors: MemoryKind) -> None:
    """The receiver cache and the encoder's outputs; ``tensors`` is where the latter are."""
    outputs, cache = engine.runner.outputs, engine.scheduler.encoder
    if not isinstance(model, MediaModel) or outputs is None or cache is None:
        return
    capacity = engine.receiver.capacity
    ledger.register("receiver_cache", MemoryKind.HOST, lambda: engine.receiver.bytes, capacity)
    ledger.register(
        "encoder_cache", tensors, lambda: outputs.nbytes, cache.budget * model.output_bytes
    )
