"""The operations by Triton kernels, for CUDA. What they compute is said in ``interface``."""

from __future__ import annotations

from bisect import bisect_left
from itertools import groupby
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from plimsoll_engine.kernels import activation, argmax, norm, rotary
from plimsoll_engine.kernels import experts as mixture
from plimsoll_engine.kernels import rows as by_row
from plimsoll_engine.kernels.decode_attention import decode_attention
from plimsoll_engine.kernels.prefill_attention import prefill_attention
from plimsoll_engine.kernels.project import project
from plimsoll_engine.kernels.quantized import Weight
from plimsoll_engine.kernels.reference import write_quantized
from plimsoll_engine.kernels.scaled_product import quantize, scaled_product
from plimsoll_engine.kernels.step_plan import StepPlan

LIBRARY_ROWS = 1024
"""From so many rows on a whole prompt, which needs no part of the pool, is the library's: 530 to
580 TFLOP/s on an H200 at 4096 rows and 128 dimensions, where ours has 307 (bench/kernels.py)."""
LIBRARY_STEP = 256
"""Such prompts are padded to a multiple: the library keeps a plan for each length that it meets."""
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def _whole(plan: StepPlan) -> tuple[int, ...]:
    """Return the rows of the prompts that are the library's, the last ones of the step."""
    return plan.fresh[bisect_left(plan.fresh, LIBRARY_ROWS) :]


def _padded(rows: int) -> int:
    return -(-rows // LIBRARY_STEP) * LIBRARY_STEP


class Fresh(NamedTuple):
    """A step's own rows in one layer.

    ``pairs`` [2, tokens + tail, kv heads, dim] are its keys and values, ``query`` [tokens + tail,
    heads, dim] where it has a tail already; all of the model's dtype.
    """

    pairs: torch.Tensor
    query: torch.Tensor | None = None


def _tail(plan: StepPlan) -> int | None:
    """Rows of padding behind the step's last prompt; None where none is the library's."""
    whole = _whole(plan)
    return _padded(whole[-1]) - whole[-1] if whole else None


def _with_tail(x: torch.Tensor, tail: int) -> torch.Tensor:
    return pad(x, (0, 0, 0, 0, 0, tail))


def _causal(
    query: torch.Tensor, pairs: torch.Tensor, first: int, count: int, rows: int, scale: float
) -> torch.Tensor:
    """Return causal attention within each of ``count`` prompts of ``rows`` tokens.

    The prompts begin at row ``first``; the result is [count, rows, heads, dim] in the model's
    dtype.

    The padding of a prompt are the rows behind it, the next one's or zeros: no row of its own
    attends to them. So nothing is copied.
    """

    def prompts(x: torch.Tensor) -> torch.Tensor:
        heads, dim = x.shape[1:]
        row = heads * dim
        return x.as_strided(
            (count, heads, _padded(rows), dim),
            (rows * row, dim, row, 1),
            x.storage_offset() + first * row,
        )

    with sdpa_kernel(BACKENDS, set_priority=True):
        found = scaled_dot_product_attention(
            prompts(query), prompts(pairs[0]), prompts(pairs[1]),
            is_causal=True, scale=scale, enable_gqa=True,
        )  # fmt: skip
    return found[:, :, :rows].transpose(1, 2)


class FusedOps:
    """See :class:`plimsoll_engine.kernels.ops.Ops`."""

    projects = True

    def rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return rows ``index`` int [tokens] of ``x`` [rows, columns] as [tokens, columns].

        One kernel does it.
        """
        return by_row.rows(x, index)

    def take(self, ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """Return ``ids`` int32 [rows], with ``newest[sources]`` where that is not negative.

        The result is int64 [rows]; ``newest`` is int64, ``sources`` int32 [rows].
        """
        return by_row.take(ids, sources, newest)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x`` [rows, columns] normalised in float32 and scaled by ``weight`` [columns].

        The result has the dtype of ``x``.
        """
        return norm.rms_norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add ``x`` to ``residual`` [rows, columns] in place and normalise the sum, in one pass."""
        return norm.rms_norm(x, residual, weight, eps)

    def rotary(self, positions: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        """Return the cosines and sines of ``positions`` [tokens] by ``inverse`` [dim / 2].

        The result is float32 [tokens, dim].
        """
        return rotary.table(positions, inverse)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotary_table: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        plan: StepPlan,
        layer: int,
    ) -> torch.Tensor:
        """Norm, rotate and store ``qkv`` by one kernel; return the queries.

        ``qkv`` is [tokens, (heads + 2 kv heads) * dim], the queries are [tokens, heads, dim] of its
        dtype.
        """
        keys, values = plan.of(layer)
        query, pairs = rotary.rotate_and_store(
            qkv, rotary_table, norms, eps, plan.write_slots, keys, values, _tail(plan)
        )
        plan.derived = None if pairs is None else Fresh(pairs, query)
        return query[: len(qkv)]

    def store(self, key: torch.Tensor, value: torch.Tensor, plan: StepPlan, layer: int) -> None:
        """Write ``key`` and ``value`` [tokens, kv heads, dim] to their slots of ``layer``.

        They are also kept together for prompts that attend to nothing else.
        """
        for pages, rows in zip(plan.of(layer), (key, value), strict=True):
            if pages.scales is None:
                pages.rows.index_copy_(0, plan.write_slots, rows)
            else:
                narrow, scales = quantize(rows.flatten(0, 1))
                shape = rows.shape[:2]
                write_quantized(
                    pages, plan.write_slots, narrow.unflatten(0, shape), scales.unflatten(0, shape)
                )
        tail = _tail(plan)
        plan.derived = None if tail is None else Fresh(_with_tail(torch.stack((key, value)), tail))

    def attend(
        self, query: torch.Tensor, plan: StepPlan, layer: int, scale: float, window: int | None
    ) -> torch.Tensor:
        """Return the attention of ``query`` [tokens, heads, dim]; same shape and dtype.

        Decoding rows and prompts have kernels of their own.
        """
        keys, values = plan.of(layer)
        out = torch.empty_like(query)
        if plan.decodes:
            decode_attention(
                query[: plan.decodes], keys, values, plan.tables, plan.contexts, plan.block_size,
                scale, window, out, plan.context_limit,
            )  # fmt: skip
        whole = _whole(plan) if window is None else ()
        end = len(plan.contexts) - len(whole)
        if plan.decodes < end:
            prefill_attention(
                query, keys, values, plan.tables, plan.contexts[:end], plan.starts, plan.decodes,
                plan.longest, plan.block_size, scale, window, out,
            )  # fmt: skip
        first = len(query) - sum(whole)
        fresh: Fresh = plan.derived
        if whole:
            tail = fresh.pairs.shape[1] - len(query)
            query = fresh.query if fresh.query is not None else _with_tail(query, tail)
        for rows, equal in groupby(whole):
            count = len(list(equal))
            part = out[first : first + count * rows].unflatten(0, (count, rows))
            found = _causal(query, fresh.pairs, first, count, rows, scale)
            # One prompt's rows lie together on both sides: a plain copy, at the memory's speed.
            for to, prompt in zip(part, found, strict=True):
                to.copy_(prompt)
            first += count * rows
        return out

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``x`` [rows, columns] times ``weight`` [size, columns]; [rows, size].

        The library computes it, in either format.
        """
        if isinstance(weight, torch.Tensor):
            return linear(x, weight, bias)
        return scaled_product(x, weight, bias)

    def project(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        silu: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return one row ``x`` [1, columns] times ``weight`` [size, columns]; [1, size].

        Norm and activation are in the same kernel. The row is not quantized.
        """
        return project(x, weight, bias, norm, eps, silu, into)

    def experts(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        chosen: int,
        normalised: bool,
    ) -> torch.Tensor:
        """Return the sum of each row's experts, of the shape and dtype of ``x`` [tokens, hidden].

        Rows are sorted by expert on the device; the host never waits.
        """
        return mixture.experts(x, router, gate_up, down, chosen, normalised)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 [rows]: the best column of ``logits`` [rows, columns], of equal ones the first."""
        return argmax.argmax(logits)

    def best_keys(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """int64 [rows]: a key of the best column of each row of ``x`` [rows, columns].

        ``first`` is the number of its first column in the whole row.
        """
        return argmax.best_keys(x, first)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, size] of ``gate_up`` [rows, 2 * size], in its dtype."""
        return activation.silu_mul(gate_up)
