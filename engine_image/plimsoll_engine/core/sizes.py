"""Choose the size and dtype of the KV pool, and the batch limits."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from plimsoll_engine.errors import SettingsError
from plimsoll_engine.kernels.quantized import FP8
from plimsoll_engine.kernels.step_plan import KVShape
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import decoder

# In tokens.
DEFAULT_BLOCK_SIZE = 16
# Fraction of the device memory that is free after loading the weights.
CUDA_KV_FRACTION = 0.8
DEFAULT_CPU_KV_BYTES = 64 << 20
# For each value of --kv-cache-dtype except ``auto``, as in vLLM.
CACHE_DTYPES = {"fp8": FP8, "fp8_e4m3": FP8}
# Older GPUs have no instructions that convert to e4m3.
MIN_FP8_COMPUTE_CAPABILITY = (8, 9)


class EngineSizes(msgspec.Struct, frozen=True):
    """Sizes and limits of one engine."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int

    def compute_kv_bytes(self, kv: KVShape, dtype: torch.dtype) -> int:
        """Return the size of one model's KV pool in bytes."""
        return self.num_blocks * self.block_size * kv.compute_bytes_per_token(dtype)


def compute_token_bytes(kv: KVShape, dtype: torch.dtype, draft: KVShape | None) -> int:
    """Return the KV pool's bytes per token, including the draft model's pool, if any."""
    return kv.compute_bytes_per_token(dtype) + (
        0 if draft is None else draft.compute_bytes_per_token(dtype)
    )


def choose_cache_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the KV pool's dtype for the value ``name`` of ``--kv-cache-dtype``.

    ``auto`` selects the model's ``dtype``. Raises SettingsError if ``name`` is unknown, or if the
    device does not support the dtype.
    """
    if name == "auto":
        return dtype
    if name not in CACHE_DTYPES:
        raise SettingsError(f"--kv-cache-dtype must be auto, {', '.join(CACHE_DTYPES)}, got {name}")
    if (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) < MIN_FP8_COMPUTE_CAPABILITY
    ):
        raise SettingsError(
            f"--kv-cache-dtype {name} requires a GPU with compute capability 8.9 or higher: "
            "omit the flag"
        )
    return CACHE_DTYPES[name]


def check_adapter_support(settings: WorkerConfig, config: Any) -> None:
    """Raise SettingsError if adapters are enabled but the model does not support them."""
    if settings.max_loras and not decoder.supports(config):
        raise SettingsError(
            f"--enable-lora is set, but models of type {config.model_type} do not support "
            "adapters: omit the flag, or use a text model of "
            f"{', '.join(decoder.SUPPORTED_MODEL_TYPES)}"
        )


# In media of the largest size. Each running request keeps its media in the cache until it ends, so
# this also limits the batch size.
MAX_ENCODER_DECODER_MEDIA = 8


def choose_encoder_budget(
    requested_tokens: int | None,
    sizes: EngineSizes,
    max_media_tokens: int,
    is_encoder_decoder: bool,
) -> int:
    """Return the budget of the encoder cache in tokens.

    Raises SettingsError if ``requested_tokens`` is less than ``max_media_tokens``.
    """
    if requested_tokens is not None and requested_tokens < max_media_tokens:
        raise SettingsError(
            f"--encoder-cache-tokens must be at least {max_media_tokens}, the maximum for "
            f"one image or audio clip of this model, got {requested_tokens}"
        )
    if requested_tokens is not None:
        return requested_tokens
    if is_encoder_decoder:
        return max_media_tokens * min(sizes.max_num_seqs, MAX_ENCODER_DECODER_MEDIA)
    return max(max_media_tokens, sizes.max_num_batched_tokens)


def resolve_sizes(
    settings: WorkerConfig,
    kv: KVShape,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    pool_bytes: int | None = None,
    free_bytes: int | None = None,
    draft: KVShape | None = None,
) -> EngineSizes:
    """Return the sizes for ``settings``. Call this after the weights are loaded.

    ``max_positions`` is the model's maximum context in tokens, and ``dtype`` the KV pool's.
    ``pool_bytes`` is the size of a KV pool that already exists. ``free_bytes`` is the device memory
    that is free on every rank; None on a CPU. Raises SettingsError if a setting is invalid, or if
    the sizes do not fit into memory.
    """
    for name in (
        "max_num_seqs", "max_model_len", "max_num_batched_tokens", "block_size", "num_blocks"
    ):  # fmt: skip
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise SettingsError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    max_model_len = settings.max_model_len or max_positions
    if max_model_len > max_positions:
        raise SettingsError(
            f"--max-model-len must be at most {max_positions}, the number of positions of "
            f"the model (max_position_embeddings), got {max_model_len}"
        )
    block_size = settings.block_size or DEFAULT_BLOCK_SIZE
    max_num_seqs = _choose_max_num_seqs(settings, device)
    # Blocks for twice the maximum number of sequences, each of maximum length. A small model's pool
    # would otherwise have millions of blocks that no request can fill, each with an entry in host
    # memory.
    useful = 2 * max_num_seqs * -(-max_model_len // block_size)
    num_blocks = settings.num_blocks
    per_token = compute_token_bytes(kv, dtype, draft)
    if pool_bytes is not None:
        num_blocks = pool_bytes // (per_token * block_size)
    elif num_blocks is None:
        room = DEFAULT_CPU_KV_BYTES if free_bytes is None else int(free_bytes * CUDA_KV_FRACTION)
        num_blocks = min(room // (per_token * block_size), useful)
    if num_blocks * block_size < max_model_len:
        if settings.max_model_len is not None and settings.num_blocks is None:
            raise SettingsError(
                f"--max-model-len is {max_model_len}, but only {num_blocks} KV blocks of "
                f"{block_size} tokens fit into memory: lower --max-model-len"
            )
        max_model_len = num_blocks * block_size
    if max_model_len < 2:
        raise SettingsError(
            "the weights leave too little memory for one KV block: use a smaller model"
        )
    return EngineSizes(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=_choose_max_batched_tokens(settings, device),
        block_size=block_size,
        num_blocks=num_blocks,
    )


def _choose_max_num_seqs(settings: WorkerConfig, device: torch.device) -> int:
    return settings.max_num_seqs or (256 if device.type == "cuda" else 32)


def _choose_max_batched_tokens(settings: WorkerConfig, device: torch.device) -> int:
    return settings.max_num_batched_tokens or (8192 if device.type == "cuda" else 1024)


def compute_max_step_rows(settings: WorkerConfig, device: torch.device) -> int:
    """Return the maximum number of rows in a step, without rows of draft tokens."""
    return max(_choose_max_num_seqs(settings, device), _choose_max_batched_tokens(settings, device))
