"""Encoder cache and receiver cache of a worker: their sizes and their ledger entries."""

from __future__ import annotations

from plimsoll_api.admin import MemoryKind
from plimsoll_engine.core import sizes
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.schedule.encoder_cache import EncoderCache
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models.model import MediaModel, Model


def encoder_cache(
    model: Model, requested: WorkerConfig, settings: sizes.EngineSizes
) -> EncoderCache | None:
    """Return the scheduler's ledger of encoder outputs; None for a text-only model."""
    if not isinstance(model, MediaModel):
        return None
    budget = sizes.encoder_tokens(
        requested.encoder_cache_tokens, settings, model.example().tokens, model.lifelong
    )
    return EncoderCache(budget, model.lifelong)


def register_owners(ledger: Ledger, engine: EngineCore, model: Model, tensors: MemoryKind) -> None:
    """Register the receiver cache, and the encoder cache as ``tensors`` memory."""
    outputs, cache = engine.runner.outputs, engine.scheduler.encoder
    if not isinstance(model, MediaModel) or outputs is None or cache is None:
        return
    capacity = engine.receiver.capacity
    ledger.register("receiver_cache", MemoryKind.HOST, lambda: engine.receiver.bytes, capacity)
    ledger.register(
        "encoder_cache", tensors, lambda: outputs.nbytes, cache.budget * model.output_bytes
    )
