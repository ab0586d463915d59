"""Find the safetensors files of a checkpoint, read them through mmap, and check their tensors."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from plimsoll_engine.errors import LoadError

log = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Converted to the model's dtype without scales.
FLOAT_DTYPES = ("F32", "BF16", "F16", "F64")
# Including the implicit bit.
SIGNIFICANT_BITS = {"BF16": 8, "F16": 11, "F32": 24, "F64": 53}
# Quantized matrices. Their scales are separate tensors.
FP8_DTYPES = ("F8_E4M3",)


def list_weight_files(folder: Path) -> list[Path]:
    """Return the weight files in ``folder``. Raises LoadError if one of them is missing.

    These are ``model.safetensors`` if it exists, otherwise the files in the index, otherwise all
    ``*.safetensors`` files.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        if not (files := sorted(folder.glob("*.safetensors"))):
            raise LoadError(
                f"{folder} contains no *.safetensors file: convert the weights to safetensors"
            )
        return files
    names = sorted(set(read_weight_map(folder).values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise LoadError(
            f"{folder / INDEX_FILE} lists {missing[0]}, which does not exist in {folder}"
        )
    return [folder / name for name in names]


def read_weight_map(folder: Path) -> dict[str, str]:
    """Return the weight file of each tensor, as listed in the index; empty if no index is used.

    Raises LoadError if the index is invalid.
    """
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file() or not index.is_file():
        return {}
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        if not weight_map or not all(Path(n).name == n for n in weight_map.values()):
            raise ValueError(
                "the field must map tensors to names of files in the folder of the index"
            )
        return dict(weight_map)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"cannot read the field weight_map of {index}: {error!r}") from None


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open the file at ``path`` and yield it. Raises LoadError if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path}: {error}") from None


def count_tensor_dtypes(folder: Path) -> Counter[str]:
    """Return the number of tensors in ``folder`` by safetensors dtype.

    Raises LoadError, naming the file, if a header cannot be read.
    """
    types: Counter[str] = Counter()
    for path in list_weight_files(folder):
        with open_safetensors(path) as file:
            types.update(file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118
    return types


def loses_precision(file_dtype: str, dtype: torch.dtype) -> bool:
    """Report whether values of the safetensors dtype ``file_dtype`` are rounded to ``dtype``."""
    if file_dtype not in SIGNIFICANT_BITS or not dtype.is_floating_point:
        return False
    return SIGNIFICANT_BITS[file_dtype] > 1 - round(math.log2(torch.finfo(dtype).eps))


def warn_about_rounding(folder: Path, counts: Mapping[str, int]) -> None:
    """Log a warning for each dtype in ``counts``, the numbers of rounded tensors by dtype."""
    for kind, count in sorted(counts.items()):
        log.warning(
            "weights were rounded: --dtype float32 avoids this, but needs more memory",
            extra={"model": str(folder), "tensors": count, "type": kind},
        )


def raise_for_invalid_tensors(folder: Path, **names_by_problem: Collection[str]) -> None:
    """Raise LoadError, naming the tensors, if any list in ``names_by_problem`` is not empty."""
    for problem, tensors in names_by_problem.items():
        if names := sorted(tensors):
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise LoadError(f"{folder} has {len(names)} {problem} tensors: {shown}")


def find_mismatch(
    name: str,
    tensor: Any,
    expected_shape: tuple[int, ...],
    allowed_dtypes: Sequence[str] = FLOAT_DTYPES,
) -> str | None:
    """Return an error message if ``tensor`` has a wrong shape or dtype, otherwise None.

    ``tensor`` is a slice of a safetensors file.
    """
    if tuple(tensor.get_shape()) != expected_shape:
        return format_shape_mismatch(name, tensor.get_shape(), expected_shape)
    if tensor.get_dtype() not in allowed_dtypes:
        return f"{name} must have the dtype {' or '.join(allowed_dtypes)}, got {tensor.get_dtype()}"
    return None


def format_shape_mismatch(name: str, file_shape: Sequence[int], model_shape: Sequence[int]) -> str:
    """Return the error message for a tensor with a wrong shape."""
    shapes = f"{tuple(file_shape)} in the file, but {tuple(model_shape)} in the model"
    return f"{name} has the shape {shapes}"
