"""Plan of a step: where the step reads and writes the KV pool.

The rows of a step are one sequence of tokens: first the decode rows (one token each), then the
prefill chunks. Each layer writes the new keys and values to their slots in the KV pool, and reads
the context of each sequence through its block table. The plan is passed through the forward pass,
so that no module and no global holds the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from plimsoll_engine.kernels.quantized import FP8

SCALE_BYTES = 4
"""Size of the float32 scale of one head's keys, or values, of a token in an FP8 pool."""


class KVShape(NamedTuple):
    """Shape of one token's keys, and of its values: ``layers`` x ``heads`` x ``dim`` elements."""

    layers: int
    heads: int
    dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of keys and values, including their scales if ``dtype`` is FP8."""
        scale_bytes = SCALE_BYTES if dtype == FP8 else 0
        return 2 * self.layers * self.heads * (self.dim * dtype.itemsize + scale_bytes)


class Pages(NamedTuple):
    """Keys, or values, of one layer: ``rows`` [slots, kv heads, dim].

    ``scales`` float32 [blocks, kv heads, block size] are the factors of e4m3 rows; None for other
    dtypes. The scales of one head in a block are contiguous, in the order in which attention reads
    them.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None = None


class RowAdapters(Protocol):
    """LoRA adapters of a step's rows."""

    def add(
        self, x: torch.Tensor, y: torch.Tensor, layer: int, matrix: str, first: int = 0
    ) -> None:
        """Add the adapters' contributions for ``matrix`` of ``layer`` to ``y`` [tokens, out].

        ``y`` is the product of ``x`` [tokens, in] and the matrix's rows from ``first`` on. Both
        have the model's dtype.
        """
        ...


@dataclass(slots=True)
class Needed:
    """Rows of a step whose hidden states are needed after the step.

    ``rows`` int32 [needed] are their indices. In ``plan``, each sequence has only these rows, which
    are its last rows, or none. ``plan.write_slots`` has the slots of all rows of the step, because
    the keys and values of every row are stored.
    """

    rows: torch.Tensor
    plan: StepPlan


@dataclass(slots=True)
class StepPlan:
    """Places in the KV pool that a step reads and writes, the same in every layer.

    ``keys`` and ``values`` are [layers, slots, kv heads, dim]. Slot ``b * block_size + i`` is token
    i of block b. ``write_slots`` int64 [tokens] are the slots of the step's tokens; negative for
    padding rows. ``tables`` int32 [sequences, width] are the block numbers of each sequence.
    ``contexts`` int32 [sequences] is its number of tokens, including those of the step (0 for
    padding). ``starts`` int32 [sequences + 1] is its first row. The first ``decodes`` sequences
    have one row each. ``longest`` is the maximum number of rows of the others.

    ``fresh`` are the row counts of the last sequences, whose whole context is in the step, in
    ascending order. ``derived`` belongs to the backend: it holds results that the backend computes
    once per step or keeps until attention reads them. ``attended`` has the encoder output that each
    sequence attends to, in models with cross attention. ``adapters`` are the adapters of the
    requests, if any. ``needed`` are the rows that the last layer computes; None means all rows.
    ``context_limit`` is the maximum number of tokens in a context; 0 if unknown. ``scales`` float32
    [2, layers, slots, kv heads] are the scales of an FP8 pool in the order of :class:`Pages`, else
    None. ``joined`` are lengths of whole prompts. The backend computes prompts of the same length
    among them in one call.
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

    def pages(self, layer: int) -> tuple[Pages, Pages]:
        """Return the keys and the values of ``layer``."""
        keys, values = self.keys[layer], self.values[layer]
        if self.scales is None:
            return Pages(keys), Pages(values)
        shape = (-1, keys.shape[1], self.block_size)
        of_keys, of_values = (scales.view(shape) for scales in self.scales[:, layer])
        return Pages(keys, of_keys), Pages(values, of_values)
