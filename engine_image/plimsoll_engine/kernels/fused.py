"""Decoder operations in Triton, for CUDA."""

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
from plimsoll_engine.kernels.sizes import MAX_FEW_ROWS, NUM_COUNTERS
from plimsoll_engine.kernels.step_plan import StepPlan
from plimsoll_engine.kernels.whole_prompts import (
    FreshRows,
    PromptJoinPolicy,
    append_tail,
    attend_whole_prompts,
    count_rows_of_smallest_call,
    count_tail_rows,
    get_whole_prompts,
    select_fastest_backend,
)

# Minimum number of output elements for which whole prompts are projected in a separate launch. Such
# a launch fills an H200 twice, and reads the library's attention output without a copy.
MIN_SEPARATE_OUTPUTS = 1 << 23


class FusedOps:
    """Implementation of :class:`Ops` in Triton."""

    min_add_rows = 1024

    def __init__(self) -> None:
        self._equal = PromptJoinPolicy()
        self._counters: torch.Tensor | None = None

    def _get_arrival_counters(self, device: torch.device) -> torch.Tensor:
        # They show which program of a shared result finishes last. The kernels of a step run one
        # after another, and each resets the counters to 0.
        if self._counters is None:
            self._counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
        return self._counters

    def get_max_projection_rows(self, weight: Weight) -> int:
        several = isinstance(weight, torch.Tensor) and few_rows.supports(weight)
        return MAX_FEW_ROWS if several else 1

    def create_step_context(self, plan: StepPlan) -> AbstractContextManager[None]:
        plan.joined = self._equal.count_step(get_whole_prompts(plan))
        return select_fastest_backend(plan)

    def gather_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return by_row.gather_rows(x, index)

    def take_token_ids(
        self, ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor
    ) -> torch.Tensor:
        return by_row.take_token_ids(ids, sources, newest)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm.rms_norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return norm.rms_norm(x, residual, weight, eps)

    def compute_rotary_table(self, positions: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        return rotary.compute_rotary_table(positions, inverse)

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
        keys, values = plan.get_pages(layer)
        query, pairs = rotary.rotate_and_store(
            qkv,
            rotary_table,
            norms,
            eps,
            plan.write_slots,
            keys,
            values,
            count_tail_rows(plan),
            out,
        )
        plan.derived = None if pairs is None else FreshRows(pairs, query)
        return query[: qkv.shape[0]]

    def normalize_and_rotate(
        self, query: torch.Tensor, rotary_table: torch.Tensor, norm: torch.Tensor | None,
        eps: float, dim: int,
    ) -> torch.Tensor:  # fmt: skip
        return rotary.normalize_and_rotate(query, rotary_table, norm, eps, dim)

    def store(self, key: torch.Tensor, value: torch.Tensor, plan: StepPlan, layer: int) -> None:
        # Also keeps keys and values for the attention of prompts.
        for pages, rows in zip(plan.get_pages(layer), (key, value), strict=True):
            if pages.scales is None:
                pages.rows.index_copy_(0, plan.write_slots, rows)
            else:
                narrow, scales = quantize(rows.flatten(0, 1))
                shape = rows.shape[:2]
                write_quantized(
                    pages, plan.write_slots, narrow.unflatten(0, shape), scales.unflatten(0, shape)
                )
        tail = count_tail_rows(plan)
        plan.derived = (
            None if tail is None else FreshRows(append_tail(torch.stack((key, value)), tail))
        )

    def _attend_paged(
        self, query: torch.Tensor, plan: StepPlan, layer: int, scale: float, window: int | None,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        # In ``query`` [tokens, heads, dim] and in ``out``, these rows come before those of whole
        # prompts, which the library computes.
        end = len(plan.contexts) - len(get_whole_prompts(plan, window))
        if not end:
            return
        keys, values = plan.get_pages(layer)
        if plan.decodes:
            decode_attention(
                query[: plan.decodes], keys, values, plan.tables, plan.contexts, plan.block_size,
                scale, window, out, self._get_arrival_counters(query.device), plan.context_limit,
            )  # fmt: skip
        if plan.decodes < end:
            prefill_attention(
                query, keys, values, plan.tables, plan.contexts[:end], plan.starts, plan.decodes,
                plan.longest, plan.block_size, scale, window, out,
            )  # fmt: skip

    def attend(
        self,
        query: torch.Tensor,
        plan: StepPlan,
        layer: int,
        scale: float,
        window: int | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(query) if out is None else out
        self._attend_paged(query, plan, layer, scale, window, out)
        for first, prompts in attend_whole_prompts(query, plan, scale, window):
            # A prompt's rows are contiguous on both sides, so the copy runs at memory bandwidth.
            for number, rows in enumerate(prompts):
                begin = first + number * len(rows)
                out[begin : begin + len(rows)].copy_(rows)
        return out

    def add_attention(
        self,
        query: torch.Tensor,
        plan: StepPlan,
        layer: int,
        scale: float,
        window: int | None,
        weight: torch.Tensor,
        into: torch.Tensor,
    ) -> None:
        # The attention of long prompts is not copied.
        if count_rows_of_smallest_call(plan, window) * weight.shape[0] < MIN_SEPARATE_OUTPUTS:
            attended = self.attend(query, plan, layer, scale, window)
            return self.add_product(attended.flatten(1), weight, into)
        if before := query.shape[0] - sum(get_whole_prompts(plan, window)):
            out = torch.empty_like(query[:before])
            self._attend_paged(query, plan, layer, scale, window, out)
            self.add_product(out.flatten(1), weight, into[:before])
        for first, prompts in attend_whole_prompts(query, plan, scale, window):
            count, rows = prompts.shape[:2]
            own = into[first : first + count * rows].unflatten(0, (count, rows))
            own.baddbmm_(prompts.flatten(2), weight.t().expand(count, -1, -1))
        return None

    def add_product(self, x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor) -> None:
        # cuBLAS rounds only once.
        into.addmm_(x, weight.t())

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
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
        if x.shape[0] == 1:
            return project(x, weight, bias, norm, eps, silu, into)
        assert isinstance(weight, torch.Tensor)
        if norm is not None:
            x = self.rms_norm(x, norm, eps)
        return few_rows.multiply_few_rows(
            x, weight, self._get_arrival_counters(x.device), bias, silu, into
        )

    def compute_experts(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        top_k: int,
        normalised: bool,
    ) -> torch.Tensor:
        return mixture.compute_experts(x, router, gate_up, down, top_k, normalised)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return argmax.argmax(logits)

    def draw(self, logits: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return argmax.draw(logits.contiguous(), scales, keys)

    def compute_argmax_keys(self, x: torch.Tensor, first_column: int) -> torch.Tensor:
        return argmax.compute_argmax_keys(x, first_column)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return activation.silu_mul(gate_up)

    def gated_linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if isinstance(weight, torch.Tensor) and gated_product.supports(x, weight, bias):
            if gated_product.is_faster(x, weight):
                return gated_product.gated_product(x, weight)
            gated_product.load_kernel(x, weight)
        return self.silu_mul(self.linear(x, weight, bias))
