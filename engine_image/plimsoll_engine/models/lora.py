"""Read LoRA adapters from PEFT's files, and apply them to the decoder's projections.

An adapter changes a projection W to W + scale * B @ A. Each row of a step may use another adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from plimsoll_engine.errors import LoadError
from plimsoll_engine.kernels.quantized import Weight, product
from plimsoll_engine.kernels.step_plan import RowAdapters
from plimsoll_engine.models.decoder_parts import SCALE_SUFFIX, Part
from plimsoll_engine.models.safetensors_files import (
    find_mismatch,
    open_safetensors,
    raise_for_invalid_tensors,
)

ProductFunction = Callable[[torch.Tensor, Weight, torch.Tensor | None], torch.Tensor]

ADAPTER_CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# In PEFT's files.
TENSOR_PREFIX = "base_model.model."
DIGEST_BYTES = 16
# Hundreds of times what PEFT writes.
MAX_CONFIG_BYTES = 1 << 20


class LoraTarget(NamedTuple):
    """Projection that an adapter may change: some rows of a matrix of a layer."""

    layer: int
    matrix: str
    first: int  # first row of the projection in the matrix
    rows: int  # number of its rows
    columns: int

    def compute_nbytes(self, rank: int, dtype: torch.dtype) -> int:
        """Return the total size of A and B in bytes for the LoRA rank ``rank``."""
        return rank * (self.rows + self.columns) * dtype.itemsize


def find_targets(parts: Mapping[str, Part]) -> dict[str, LoraTarget]:
    """Return a decoder's projections by path, such as ``model.layers.0.self_attn.q_proj``."""
    targets = {}
    for name, part in parts.items():
        if not name.startswith("layers.") or len(part.shape) != 2 or name.endswith(SCALE_SUFFIX):
            continue
        if ".experts." in part.sources[0][0] or name.endswith(".router"):
            continue  # adapters of experts are not supported: each expert has rows of its own
        _, layer, matrix = name.split(".")
        first = 0
        for source, rows in part.sources:
            path = source.removesuffix(".weight")
            targets[path] = LoraTarget(int(layer), matrix, first, rows, part.shape[1])
            first += rows
    return targets


class LoraDelta(NamedTuple):
    """Low-rank matrices of a projection, in the model's dtype."""

    first: int  # first row of the projection in its matrix
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank], times the scale


@dataclass(slots=True, weakref_slot=True, eq=False)
class Adapter:
    """Loaded LoRA adapter."""

    name: str
    number: int  # unique, even if the adapter is loaded again
    deltas: dict[tuple[int, str], list[LoraDelta]]  # low-rank matrices by (layer, matrix)
    digest: bytes  # of the files

    @property
    def nbytes(self) -> int:
        """Device memory of all low-rank matrices in bytes."""
        return sum(d.a.nbytes + d.b.nbytes for deltas in self.deltas.values() for d in deltas)


class StepAdapters:
    """Adapters of a step, each with the indices int32 [n] of the rows that use it."""

    def __init__(self, rows: Sequence[tuple[Adapter, torch.Tensor]]) -> None:
        self._rows = rows

    def add_deltas(
        self, x: torch.Tensor, y: torch.Tensor, layer: int, matrix: str, first_row: int = 0
    ) -> None:
        """Add the adapters' results for ``x`` [tokens, in] to ``y`` [tokens, out] in place.

        ``y`` is the product of ``x`` and the rows of ``matrix`` from ``first_row`` on.
        """
        for adapter, rows in self._rows:
            inputs = None
            for begin, a, b in adapter.deltas.get((layer, matrix), ()):
                if not first_row <= begin < first_row + y.shape[1]:
                    continue
                if inputs is None:
                    inputs = x.index_select(0, rows)
                delta = product(product(inputs, a, None), b, None)
                y.narrow(1, begin - first_row, len(b)).index_add_(0, rows, delta)


def apply_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    adapters: RowAdapters | None,
    layer: int,
    matrix: str,
    product: ProductFunction = product,
    first_row: int = 0,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, plus the results of the step's adapters, as [tokens, out].

    ``x`` is [tokens, in]. ``weight`` [out, in] has the rows of ``matrix`` from ``first_row`` on.
    """
    y = product(x, weight, bias)
    if adapters is not None:
        adapters.add_deltas(x, y, layer, matrix, first_row)
    return y


class _AdapterConfig(msgspec.Struct):
    """Fields of ``adapter_config.json`` that change the result of an adapter."""

    r: int
    lora_alpha: float
    target_modules: list[str] | str
    peft_type: str = "LORA"
    bias: str = "none"
    use_rslora: bool = False
    layers_to_transform: Any = None
    exclude_modules: Any = None
    use_dora: Any = None
    modules_to_save: Any = None
    lora_bias: Any = None
    fan_in_fan_out: Any = None
    rank_pattern: Any = None
    alpha_pattern: Any = None
    layer_replication: Any = None
    trainable_token_indices: Any = None
    init_lora_weights: Any = True

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


UNSUPPORTED_FIELDS = (
    "use_dora", "modules_to_save", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern",
    "layer_replication", "trainable_token_indices",
)  # fmt: skip
# Prefixes of init_lora_weights values for which PEFT also changes the base model's weights. Such an
# adapter gives wrong results with the original weights (PEFT, LoraConfig).
BASE_CHANGING_INIT_PREFIXES = ("pissa", "olora", "corda", "loftq")


def _read_config(folder: Path, max_rank: int) -> _AdapterConfig:
    path = folder / ADAPTER_CONFIG_FILE
    if not path.is_file():
        raise LoadError(f"{path} does not exist, but every adapter must contain it")
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise LoadError(
                f"{path} is larger than {MAX_CONFIG_BYTES} bytes, the maximum size of an "
                "adapter's config"
            )
        config = msgspec.json.decode(path.read_bytes(), type=_AdapterConfig)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LoadError(f"{path}: {error}") from None
    if config.peft_type != "LORA":
        raise LoadError(f"{path}: field peft_type must be LORA, got {config.peft_type}")
    if config.bias != "none":
        raise LoadError(f"{path}: field bias must be 'none', got {config.bias!r}")
    for field in UNSUPPORTED_FIELDS:
        if value := getattr(config, field):
            raise LoadError(
                f"{path}: field {field} must not be set, got {value!r}: train the adapter "
                "without this field"
            )
    start = config.init_lora_weights
    if isinstance(start, str) and start.startswith(BASE_CHANGING_INIT_PREFIXES):
        raise LoadError(
            f"{path}: the value {start!r} of the field init_lora_weights also changes the "
            "base model: convert the adapter with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    if config.r < 1:
        raise LoadError(f"{path}: field r must be at least 1, got {config.r}")
    if config.r > max_rank:
        raise LoadError(
            f"{path}: field r is {config.r}, which exceeds --max-lora-rank {max_rank}: "
            "restart the engine with a higher value"
        )
    return config


def _matches_path(path: str, names: Sequence[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _list_projections(
    config: _AdapterConfig, targets: Mapping[str, LoraTarget], config_path: Path
) -> set[str]:
    # Empty if the config selects projections in another way.
    names = config.target_modules
    if isinstance(names, str):
        return set()
    for name in names:
        if not any(_matches_path(path, [name]) for path in targets):
            kinds = sorted({path.rpartition(".")[2] for path in targets})
            raise LoadError(
                f"{config_path}: field target_modules may contain only {', '.join(kinds)}, "
                f"got {name}"
            )
    if config.layers_to_transform is not None or config.exclude_modules:
        return set()
    return {path for path in targets if _matches_path(path, names)}


def read_adapter(
    folder: Path,
    targets: Mapping[str, LoraTarget],
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[dict[tuple[int, str], list[LoraDelta]], bytes]:
    """Return the low-rank matrices of the adapter in ``folder``, and its digest.

    The matrices are by (layer, matrix). Raises LoadError, naming the file and the field or tensor,
    if the adapter is not supported, and OSError if a file cannot be read.
    """
    if not folder.is_dir():
        raise LoadError(
            f"the adapter folder {folder} does not exist: an adapter is a folder with "
            f"{ADAPTER_CONFIG_FILE} and {WEIGHTS_FILE}"
        )
    config = _read_config(folder, max_rank)
    listed = _list_projections(config, targets, folder / ADAPTER_CONFIG_FILE)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise LoadError(f"{path} does not exist, but every adapter must contain it")
    halves: dict[str, dict[str, torch.Tensor]] = {}
    unexpected, mismatched = [], []
    digest = blake2b(str(config.scale).encode(), digest_size=DIGEST_BYTES)
    with open_safetensors(path) as file:
        for name in sorted(file.keys()):
            source, _, half = name.removeprefix(TENSOR_PREFIX).partition(".lora_")
            target = targets.get(source)
            if target is None or half not in ("A.weight", "B.weight"):
                unexpected.append(f"{name} in {path.name}")
                continue
            a = half.startswith("A")
            expected = (config.r, target.columns) if a else (target.rows, config.r)
            stored = file.get_slice(name)
            if mismatch := find_mismatch(name, stored, expected):
                mismatched.append(mismatch)
            elif not mismatched and not unexpected:
                tensor = file.get_tensor(name)
                digest.update(f"{name} {tensor.dtype}".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy())
                if not a:
                    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
                    tensor *= config.scale
                # Always copy, because a view would keep the file's pages mapped.
                half = half[0]
                halves.setdefault(source, {})[half] = tensor.to(device, dtype, copy=True)
    missing = [
        f"{TENSOR_PREFIX}{source}.lora_{half}.weight"
        for source in listed | halves.keys()
        for half in "AB"
        if half not in halves.get(source, {})
    ]
    raise_for_invalid_tensors(folder, unexpected=unexpected, mismatched=mismatched, missing=missing)
    if not halves:
        raise LoadError(f"{path} contains no tensors")
    deltas: dict[tuple[int, str], list[LoraDelta]] = {}
    for source, pair in halves.items():
        target = targets[source]
        place = target.layer, target.matrix
        deltas.setdefault(place, []).append(LoraDelta(target.first, pair["A"], pair["B"]))
    return deltas, digest.digest()
