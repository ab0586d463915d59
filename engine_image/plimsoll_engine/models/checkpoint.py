"""The safetensors files of a checkpoint folder: which tensor is in which file, read in place.

A file is mapped into memory, not read into it: a tensor that is copied to the model costs no second
host copy, and its pages belong to the page cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class LoadError(Exception):
    """The checkpoint cannot be served; the message names the file, tensor or field."""


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: the one file, those of the index, or all there are."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        if not (found := sorted(folder.glob("*.safetensors"))):
            raise LoadError(
                f"{folder}: no *.safetensors file; weights in other formats are not read"
            )
        return found
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{index}: no readable field weight_map: {error!r}") from None
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise LoadError(f"{index}: names {missing[0]}, which is missing in {folder}")
    return [folder / name for name in names]


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file's tensors, mapped; a broken file is an error that names it."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path}: {error}") from None


def check_files(folder: Path) -> None:
    """Read each weights file's header, so that the error of a broken one names it."""
    for path in weight_files(folder):
        with opened(path):
            pass
