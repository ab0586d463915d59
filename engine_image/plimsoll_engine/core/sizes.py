"""Resolve the sizes of one engine from its settings and the machine's memory."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from plimsoll_engine.errors import SettingsError
from plimsoll_engine.kernels.quantized import FP8
from plimsoll_engine.kernels.step_plan import KVShape
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import decoder

BLOCK_SIZE = 16
"""Default number of tokens in a KV block."""
CUDA_KV_FRACTION = 0.8
"""Share of the KV pool in the free device memory after loading. Activations use the rest."""
CPU_KV_BYTES = 64 << 20
"""Default size of the KV pool on a CPU."""
CACHE_DTYPES = {"fp8": FP8, "fp8_e4m3": FP8}
"""Values of ``--kv-cache-dtype``, as in vLLM."""
FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that can convert e4m3 (PTX ISA, ``cvt``)."""


class EngineSizes(msgspec.Struct, frozen=True):
    """Limits of one engine. A limit without a flag is derived from the device's memory."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int

    def compute_kv_bytes(
        self, kv: KVShape, dtype: torch.dtype, draft: KVShape | None = None
    ) -> int:
        """Return the size of the KV pool in bytes, including that of a draft model, if any."""
        return self.num_blocks * self.block_size * compute_token_bytes(kv, dtype, draft)


def compute_token_bytes(kv: KVShape, dtype: torch.dtype, draft: KVShape | None) -> int:
    """Return the bytes of one token in the KV pools of a model and of its draft model, if any."""
    return kv.bytes_per_token(dtype) + (0 if draft is None else draft.bytes_per_token(dtype))


def choose_cache_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the KV pool for ``--kv-cache-dtype``. ``auto`` means ``dtype``.

    Raises :class:`SettingsError` if ``name`` is unknown or the device does not support it.
    """
    if name == "auto":
        return dtype
    if name not in CACHE_DTYPES:
        raise SettingsError(f"--kv-cache-dtype {name}: use auto, {', '.join(CACHE_DTYPES)}")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise SettingsError(
            f"--kv-cache-dtype {name} needs a GPU with compute capability 8.9 or higher: omit"
            " the flag"
        )
    return CACHE_DTYPES[name]


def check_adapters(requested: WorkerConfig, config: Any) -> None:
    """Raise :class:`SettingsError` if adapters are enabled and the model does not support them."""
    if requested.max_loras and not decoder.supports(config):
        raise SettingsError(
            f"--enable-lora: models of type {config.model_type} do not support adapters. Omit the"
            f" flag, or use a text model of {', '.join(decoder.FAMILY)}"
        )


ENCODER_CACHE_MEDIA = 8
"""Number of the largest media in the encoder cache of an encoder-decoder model.

Requests of such a model hold their media until they end, so a smaller number would limit the batch.
Each medium takes as much memory as a long context.
"""


def choose_encoder_budget(
    requested: int | None, settings: EngineSizes, largest: int, lifelong: bool
) -> int:
    """Return the encoder cache's budget in tokens. The largest medium takes ``largest`` tokens.

    ``lifelong`` means that a request needs its media until it ends. Raises :class:`SettingsError`
    if ``requested`` is less than ``largest``.
    """
    if requested is not None and requested < largest:
        raise SettingsError(
            f"--encoder-cache-tokens {requested} is too small: one image or sound of this model"
            f" takes {largest} tokens"
        )
    if requested is not None:
        return requested
    if lifelong:
        return largest * min(settings.max_num_seqs, ENCODER_CACHE_MEDIA)
    return max(largest, settings.max_num_batched_tokens)


def resolve_sizes(
    requested: WorkerConfig,
    kv: KVShape,
    positions: int,
    dtype: torch.dtype,
    device: torch.device,
    pool_bytes: int | None = None,
    free: int | None = None,
    draft: KVShape | None = None,
) -> EngineSizes:
    """Return the sizes for the ``requested`` settings. Call this after the weights are loaded.

    ``dtype`` is the KV pool's dtype, and ``positions`` the model's longest context in tokens.
    ``pool_bytes`` is the size of an existing KV pool. ``free`` is the device memory in bytes that
    is free on every rank; None on a CPU. ``draft`` is the shape of the draft model's part of the
    pool. Raises :class:`SettingsError` for values that are invalid or do not fit into memory.
    """
    for name in (
        "max_num_seqs", "max_model_len", "max_num_batched_tokens", "block_size", "num_blocks"
    ):  # fmt: skip
        value = getattr(requested, name)
        if value is not None and value < 1:
            raise SettingsError(
                f"--{name.replace('_', '-')} {value} is too small; it must be at least 1"
            )
    max_model_len = requested.max_model_len or positions
    if max_model_len > positions:
        raise SettingsError(
            f"--max-model-len {max_model_len} is too large: the model supports {positions}"
            " positions (max_position_embeddings)"
        )
    block_size = requested.block_size or BLOCK_SIZE
    max_num_seqs = _choose_max_num_seqs(requested, device)
    # Twice all sequences at their longest. A small model's pool would otherwise have millions of
    # blocks that no request can fill, each with an entry in host memory.
    useful = 2 * max_num_seqs * -(-max_model_len // block_size)
    num_blocks = requested.num_blocks
    per_token = compute_token_bytes(kv, dtype, draft)
    if pool_bytes is not None:
        num_blocks = pool_bytes // (per_token * block_size)
    elif num_blocks is None:
        room = CPU_KV_BYTES if free is None else int(free * CUDA_KV_FRACTION)
        num_blocks = min(room // (per_token * block_size), useful)
    if num_blocks * block_size < max_model_len:
        if requested.max_model_len is not None and requested.num_blocks is None:
            raise SettingsError(
                f"--max-model-len {max_model_len} is too large: only {num_blocks} KV blocks of"
                f" {block_size} tokens fit into memory; lower --max-model-len"
            )
        max_model_len = num_blocks * block_size
    if max_model_len < 2:
        raise SettingsError("the weights leave too little memory for one KV block")
    return EngineSizes(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=_choose_max_batched_tokens(requested, device),
        block_size=block_size,
        num_blocks=num_blocks,
    )


def _choose_max_num_seqs(requested: WorkerConfig, device: torch.device) -> int:
    return requested.max_num_seqs or (256 if device.type == "cuda" else 32)


def _choose_max_batched_tokens(requested: WorkerConfig, device: torch.device) -> int:
    return requested.max_num_batched_tokens or (8192 if device.type == "cuda" else 1024)


def compute_max_step_rows(requested: WorkerConfig, device: torch.device) -> int:
    """Return the maximum number of rows of a step without drafts."""
    return max(
        _choose_max_num_seqs(requested, device), _choose_max_batched_tokens(requested, device)
    )
