"""The operations by Triton kernels, for CUDA. What they compute is said in ``interface``."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.nn.functional import linear

from plimsoll_engine.kernels import activation, argmax, few_rows, gated_product, norm, rotary
from plimsoll_engine.kernels import experts as mixture
from plimsoll_engine.kernels import rows as by_row
from plimsoll_engine.kernels.decode_attention import decode_attention
from plimsoll_engine.kernels.prefill_attention import prefill_attention
from plimsoll_engine.kernels.project import project
from plimsoll_engine.kernels.quantized import Weight
from plimsoll_engine.kernels.reference import write_quantized
from plimsoll_engine.kernels.scaled_product import quantize, scaled_product
from plimsoll_engine.kernels.sizes import FEW_ROWS
from plimsoll_engine.kernels.step_plan import StepPlan
from plimsoll_engine.kernels.whole_prompts import (
    EqualPrompts,
    Fresh,
    attend_whole,
    fastest_first,
    fewest_rows,
    tail_rows,
    whole_prompts,
    with_tail,
)

APART = 1 << 23
"""From so many results on, the product after the attention of equal prompts fills an H200 twice. It
then has a launch of its own, and reads them where the library's attention left them."""


def _attend_paged(
    query: torch.Tensor, plan: StepPlan, layer: int, scale: float, window: int | None,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Write to ``out`` the attention of the rows that are not the library's.

    They come first in ``query`` [tokens, heads, dim] and have the same places in ``out``.
    """
    end = len(plan.contexts) - len(whole_prompts(plan, window))
    if not end:
        return
    keys, values = plan.of(layer)
    if plan.decodes:
        decode_attention(
            query[: plan.decodes], keys, values, plan.tables, plan.contexts, plan.block_size,
            scale, window, out, plan.context_limit,
        )  # fmt: skip
    if plan.decodes < end:
        prefill_attention(
            query, keys, values, plan.tables, plan.contexts[:end], plan.starts, plan.decodes,
            plan.longest, plan.block_size, scale, window, out,
        )  # fmt: skip


class FusedOps:
    """See :class:`plimsoll_engine.kernels.ops.Ops`."""

    adds_from = 1024

    def __init__(self) -> None:
        self._equal = EqualPrompts()

    def projects(self, weight: Weight) -> int:
        """Return how many rows there are kernels for: one, or some where ``weight`` allows it."""
        several = isinstance(weight, torch.Tensor) and few_rows.fits(weight)
        return FEW_ROWS if several else 1

    def computing(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Return a context in which the library's attention is the fastest that it has."""
        plan.joined = self._equal.joined(whole_prompts(plan))
        return fastest_first(plan)

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
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm, rotate and store ``qkv`` by one kernel; return the queries.

        ``qkv`` is [tokens, (heads + 2 kv heads) * dim], the queries are [tokens, heads, dim] of its
        dtype, in ``out`` where that is given.
        """
        keys, values = plan.of(layer)
        query, pairs = rotary.rotate_and_store(
            qkv, rotary_table, norms, eps, plan.write_slots, keys, values, tail_rows(plan), out
        )
        plan.derived = None if pairs is None else Fresh(pairs, query)
        return query[: qkv.shape[0]]

    def rotate(
        self, query: torch.Tensor, rotary_table: torch.Tensor, norm: torch.Tensor | None,
        eps: float, dim: int,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``query`` [tokens, heads * dim], normalised where ``norm`` is given, rotated.

        The result is [tokens, heads, dim] of its dtype.
        """
        return rotary.rotate(query, rotary_table, norm, eps, dim)

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
        tail = tail_rows(plan)
        plan.derived = None if tail is None else Fresh(with_tail(torch.stack((key, value)), tail))

    def attend(
        self,
        query: torch.Tensor,
        plan: StepPlan,
        layer: int,
        scale: float,
        window: int | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of ``query`` [tokens, heads, dim]; same shape and dtype.

        It is in ``out`` where that is given. Decoding rows and prompts have kernels of their own.
        """
        out = torch.empty_like(query) if out is None else out
        _attend_paged(query, plan, layer, scale, window, out)
        for first, prompts in attend_whole(query, plan, scale, window):
            # One prompt's rows lie together on both sides: a plain copy, at the memory's speed.
            for number, rows in enumerate(prompts):
                begin = first + number * len(rows)
                out[begin : begin + len(rows)].copy_(rows)
        return out

    def add_attended(
        self,
        query: torch.Tensor,
        plan: StepPlan,
        layer: int,
        scale: float,
        window: int | None,
        weight: torch.Tensor,
        into: torch.Tensor,
    ) -> None:
        """Add the attention of ``query`` times ``weight`` to ``into`` [tokens, size].

        The product reads long prompts where the library's attention left them, without a copy.
        """
        if fewest_rows(plan, window) * weight.shape[0] < APART:
            attended = self.attend(query, plan, layer, scale, window)
            return self.add_product(attended.flatten(1), weight, into)
        if before := query.shape[0] - sum(whole_prompts(plan, window)):
            out = torch.empty_like(query[:before])
            _attend_paged(query, plan, layer, scale, window, out)
            self.add_product(out.flatten(1), weight, into[:before])
        for first, prompts in attend_whole(query, plan, scale, window):
            count, rows = prompts.shape[:2]
            own = into[first : first + count * rows].unflatten(0, (count, rows))
            own.baddbmm_(prompts.flatten(2), weight.t().expand(count, -1, -1))
        return None

    def add_product(self, x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor) -> None:
        """Add ``x`` [rows, columns] times ``weight`` [size, columns] to ``into`` [rows, size].

        The library adds within the product, and rounds once.
        """
        into.addmm_(x, weight.t())

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
        """Return ``x`` [rows, columns] times ``weight`` [size, columns]; [rows, size].

        Activation and addition are in the same kernel; for one row the norm is, too. Rows are not
        quantized.
        """
        if x.shape[0] == 1:
            return project(x, weight, bias, norm, eps, silu, into)
        assert isinstance(weight, torch.Tensor)
        if norm is not None:
            x = self.rms_norm(x, norm, eps)
        return few_rows.few_rows(x, weight, bias, silu, into)

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

    def draw(self, logits: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Draw a column of each row from its softmax, int64 [rows]: the same on each device.

        ``logits`` are [rows, columns], ``scales`` float32 [rows] one over the temperatures, and
        ``keys`` int32 [rows, 2].
        """
        return argmax.draw(logits.contiguous(), scales, keys)

    def best_keys(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """int64 [rows]: a key of the best column of each row of ``x`` [rows, columns].

        ``first`` is the number of its first column in the whole row.
        """
        return argmax.best_keys(x, first)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, size] of ``gate_up`` [rows, 2 * size], in its dtype."""
        return activation.silu_mul(gate_up)

    def gated(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return :meth:`silu_mul` of :meth:`linear`, [rows, size].

        ``x`` is [rows, columns], ``weight`` [2 * size, columns]. One kernel does both for many
        rows.
        """
        if isinstance(weight, torch.Tensor) and gated_product.fits(x, weight, bias):
            if gated_product.pays(x, weight):
                return gated_product.gated_product(x, weight)
            gated_product.load(x, weight)
        return self.silu_mul(self.linear(x, weight, bias))
