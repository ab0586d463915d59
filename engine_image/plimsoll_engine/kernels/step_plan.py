"""Where a step reads and writes the KV pool.

A step's rows are flattened into one sequence of tokens: first the decode rows (one token each),
then the prefill chunks. Each layer writes its new keys and values to their slots in the KV pool and
reads every sequence's context back by its block table. The plan of a step is handed through the
forward pass, so no module and no global holds the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from plimsoll_engine.kernels.quantized import FP8

SCALE_BYTES = 4
"""Of the float32 scale that each token's keys of a head have in an FP8 pool, and its values too."""


class KVShape(NamedTuple):
    """What one token's keys (and its values) are: ``layers`` x ``heads`` x ``dim`` elements."""

    layers: int
    heads: int
    dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values together, and their scales where ``dtype`` is FP8."""
        scale_bytes = SCALE_BYTES if dtype == FP8 else 0
        return 2 * self.layers * self.heads * (self.dim * dtype.itemsize + scale_bytes)


class Pages(NamedTuple):
    """The keys, or the values, of one layer: ``rows`` [slots, kv heads, dim].

    ``scales`` float32 [blocks, kv heads, block size] are what e4m3 rows are multiplied with, None
    for others. A head's scales of a block lie together, as attention reads them.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None = None


class RowAdapters(Protocol):
    """The LoRA adapters of a step's rows."""

    def add(
        self, x: torch.Tensor, y: torch.Tensor, layer: int, matrix: str, first: int = 0
    ) -> None:
        """Add to ``y`` [tokens, out] what the adapters change in ``matrix`` of ``layer``.

        ``y`` is the product of ``x`` [tokens, in] with the rows of the matrix from ``first`` on;
        both have the model's dtype.
        """
        ...


@dataclass(slots=True)
class Needed:
    """The rows of a step whose hidden states are read after it.

    ``rows`` int32 [needed] are their numbers in the step. ``plan`` is the step's, but its sequences
    have these rows alone: the last ones of each, none of a sequence without any. Its
    ``write_slots`` are those of all rows of the step, since every row's keys and values are stored.
    """

    rows: torch.Tensor
    plan: StepPlan


@dataclass(slots=True)
class StepPlan:
    """Where a step reads and writes the pool, the same for every layer.

    ``keys`` and ``values`` are [layers, slots, kv heads, dim]; slot ``b * block_size + i`` is token
    i of block b. ``write_slots`` int64 [tokens] are the slots of the step's tokens, negative for
    padding rows. ``tables`` int32 [sequences, width] are the block numbers of each sequence,
    ``contexts`` int32 [sequences] its tokens, the step's included (0 for padding), and ``starts``
    int32 [sequences + 1] its first row. The first ``decodes`` sequences have one row each;
    ``longest`` is the most rows of any other. ``fresh`` are the rows of the last sequences, those
    whose whole context is in the step, shortest first. ``derived`` is the backend's own: what it
    computes once a step, or has of a layer's rows until it attends to them. ``attended`` holds for
    each sequence what its rows attend to beside the pool, in models with an encoder for that;
    ``adapters`` are those of its requests, if any. ``needed`` are the rows that the last layer
    computes, None where it computes all of them. ``context_limit`` is the most tokens that a
    context of this engine may have, 0 where nobody has said. ``scales`` float32 [2, layers, slots,
    kv heads] are those of keys and values in an FP8 pool, else None: of each block together, in the
    order of :class:`Pages`. ``joined`` are the lengths of whole prompts of which the backend
    computes the equal ones in one call.
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
    needed: Needed | None = None
    joined: frozenset[int] = frozenset()

    def of(self, layer: int) -> tuple[Pages, Pages]:
        """Return the keys and the values of ``layer``."""
        keys, values = self.keys[layer], self.values[layer]
        if self.scales is None:
            return Pages(keys), Pages(values)
        shape = (-1, keys.shape[1], self.block_size)
        of_keys, of_values = (scales.view(shape) for scales in self.scales[:, layer])
        return Pages(keys, of_keys), Pages(values, of_values)
