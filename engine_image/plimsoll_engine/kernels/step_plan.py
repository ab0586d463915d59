"""Plan of a step: where it reads and writes the KV pool.

A step has one row per token: first the decode rows (one per sequence), then the prefill chunks. The
plan is an argument of the forward pass, so that no module or global variable refers to the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from plimsoll_engine.kernels.quantized import FP8

# Each key and each value of a head in an FP8 pool has a float32 scale.
SCALE_BYTES = 4


class KVShape(NamedTuple):
    """Shape of one token's keys, and of its values: [``layers``, ``heads``, ``dim``]."""

    layers: int
    heads: int
    dim: int

    def compute_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the size of a token's keys and values in bytes, including the scales of FP8."""
        scale_bytes = SCALE_BYTES if dtype == FP8 else 0
        return 2 * self.layers * self.heads * (self.dim * dtype.itemsize + scale_bytes)


class Pages(NamedTuple):
    """Keys, or values, of one layer."""

    rows: torch.Tensor  # [slots, kv heads, dim]
    scales: torch.Tensor | None = None  # float32 [blocks, kv heads, block size], for e4m3 rows


class RowAdapters(Protocol):
    """LoRA adapters of a step's rows."""

    def add_deltas(
        self, x: torch.Tensor, y: torch.Tensor, layer: int, matrix: str, first_row: int = 0
    ) -> None:
        """Add the adapters' results for ``x`` [tokens, in] to ``y`` [tokens, out] in place.

        ``y`` is the product of ``x`` and the rows of ``matrix`` from ``first_row`` on.
        """
        ...


@dataclass(slots=True)
class NeededPlan:
    """Rows of a step whose hidden states are needed after the step."""

    rows: torch.Tensor  # int32 [needed], their indices.
    plan: StepPlan  # For only these rows, but write_slots has the slots of all rows.


@dataclass(slots=True)
class StepPlan:
    """Plan of a step: which slots of the KV pool it reads and writes, the same in every layer."""

    # [layers, slots, kv heads, dim]; slot b * block_size + i is token i of block b.
    keys: torch.Tensor
    values: torch.Tensor  # Likewise.
    block_size: int
    # int64 [tokens], the slots of the step's tokens; negative for padding rows.
    write_slots: torch.Tensor
    tables: torch.Tensor  # int32 [sequences, width], the block numbers of each sequence.
    # int32 [sequences], their lengths with the tokens of the step; 0 for padding.
    contexts: torch.Tensor
    starts: torch.Tensor  # int32 [sequences + 1], the index of the first row of each sequence.
    decodes: int  # Number of sequences with one row each, which come first.
    longest: int = 0  # Maximum number of rows of the other sequences.
    # Ascending numbers of rows of the last sequences, whose whole context is in the step.
    fresh: tuple[int, ...] = ()
    # Data that the backend computes once per step, or keeps until attention reads it.
    derived: Any = None
    # (number of rows, encoder output) of each sequence, for cross attention.
    attended: list[tuple[int, torch.Tensor]] | None = None
    adapters: RowAdapters | None = None
    context_limit: int = 0  # Maximum number of tokens in a context, or 0 if unknown.
    # float32 [2, layers, slots, kv heads] in the order of Pages, for FP8.
    scales: torch.Tensor | None = None
    needed: NeededPlan | None = None  # Rows that the last layer computes; None means all rows.
    # Lengths of whole prompts that the backend computes together.
    joined: frozenset[int] = frozenset()

    def get_pages(self, layer: int) -> tuple[Pages, Pages]:
        """Return the keys and the values of ``layer``, as views of the pool."""
        keys, values = self.keys[layer], self.values[layer]
        if self.scales is None:
            return Pages(keys), Pages(values)
        shape = (-1, keys.shape[1], self.block_size)
        of_keys, of_values = (scales.view(shape) for scales in self.scales[:, layer])
        return Pages(keys, of_keys), Pages(values, of_values)
