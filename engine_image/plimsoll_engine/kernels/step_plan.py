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
    """Keys, or values, of one layer: ``rows`` [slots, kv heads, dim].

    ``scales`` float32 [blocks, kv heads, block size] are the scales of e4m3 rows, else None.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None = None


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
    """Rows of a step whose hidden states are needed after the step.

    ``rows`` int32 [needed] are their indices. ``plan`` is the plan for only these rows, except that
    ``plan.write_slots`` has the slots of all rows.
    """

    rows: torch.Tensor
    plan: StepPlan


@dataclass(slots=True)
class StepPlan:
    """Plan of a step: which slots of the KV pool it reads and writes, the same in every layer.

    Attributes:
        keys, values: [layers, slots, kv heads, dim]. Slot ``b * block_size + i`` is token i of
            block b.
        write_slots: int64 [tokens], the slots of the step's tokens; negative for padding rows.
        tables: int32 [sequences, width], the block numbers of each sequence.
        contexts: int32 [sequences], the number of tokens of each sequence, including those of the
            step; 0 for padding.
        starts: int32 [sequences + 1], the index of the first row of each sequence.
        decodes: Number of sequences with one row each. These come first.
        longest: Maximum number of rows of a sequence with more than one row.
        fresh: Numbers of rows, in ascending order, of the sequences whose whole context is in the
            step. These come last.
        derived: Data that the backend computes once per step, or keeps until attention reads it.
        attended: In models with cross attention, (number of rows, encoder output) for each
            sequence.
        adapters: LoRA adapters of the step's rows; None without adapters.
        context_limit: Maximum number of tokens in a context, or 0 if unknown.
        scales: float32 [2, layers, slots, kv heads], the scales of an FP8 pool in the order of
            :class:`Pages`; None for other pools.
        needed: Rows that the last layer computes; None means all rows.
        joined: Lengths of whole prompts for which the backend computes all prompts of equal length
            in one call.

    """

    keys: torch.Tensor
    values: torch.Tensor
    block_size: int
    write_slots: torch.Tensor
    tables: torch.Tensor
    contexts: torch.Tensor
    starts: torch.Tensor
    decodes: int
    longest: int = 0
    fresh: tuple[int, ...] = ()
    derived: Any = None
    attended: list[tuple[int, torch.Tensor]] | None = None
    adapters: RowAdapters | None = None
    context_limit: int = 0
    scales: torch.Tensor | None = None
    needed: NeededPlan | None = None
    joined: frozenset[int] = frozenset()

    def get_pages(self, layer: int) -> tuple[Pages, Pages]:
        """Return the keys and the values of ``layer``, as views of the pool."""
        keys, values = self.keys[layer], self.values[layer]
        if self.scales is None:
            return Pages(keys), Pages(values)
        shape = (-1, keys.shape[1], self.block_size)
        of_keys, of_values = (scales.view(shape) for scales in self.scales[:, layer])
        return Pages(keys, of_keys), Pages(values, of_values)
