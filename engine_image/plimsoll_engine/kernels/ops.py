"""Interface of the decoder operations."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from plimsoll_engine.kernels.quantized import Weight
from plimsoll_engine.kernels.step_plan import StepPlan


class Ops(Protocol):
    """Operations on tensors with one row per token.

    Unless documented otherwise, methods allocate their result and do not modify their arguments.
    From ``min_add_rows`` rows on, :meth:`add_product` and :meth:`add_attention` are faster than a
    product and a separate addition.
    """

    min_add_rows: int

    def get_max_projection_rows(self, weight: Weight) -> int:
        """Return the maximum number of rows for which :meth:`project` is faster with ``weight``.

        It is 0 if separate operations are always faster.
        """
        ...

    def create_step_context(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Return the context manager in which the step of ``plan`` must run."""
        ...

    def gather_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``x`` [n, size] at ``index``, int32 or int64 [rows]."""
        ...

    def take_token_ids(
        self, ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor
    ) -> torch.Tensor:
        """Return the input token IDs of a step, int64 [tokens].

        Token i is ``ids[i]`` int32 if ``sources[i]`` int32 is negative, otherwise
        ``newest[sources[i]]`` int64, with 0 for negative values.
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x`` [rows, size], divided by its root mean square, times ``weight`` [size]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place, and return :meth:`rms_norm` of the sum.

        All are [rows, size] of the same dtype. ``weight`` is [size].
        """
        ...

    def compute_rotary_table(self, positions: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        """Return the cosines, then the sines, of the rotary angles, as float32 [tokens, dim].

        The angles are ``positions`` [tokens] times the frequencies ``inverse`` float32 [dim / 2].
        """
        ...

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotary: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        plan: StepPlan,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate queries and keys, store keys and values in the KV pool, and return the queries.

        ``qkv`` is [tokens, (heads + 2 * kv heads) * dim]; there may be no query heads. ``norms``
        are the weights [dim] of the query norm and the key norm, applied to each head before the
        rotation. The queries are [tokens, heads, dim], written to ``out`` if given.
        """
        ...

    def normalize_and_rotate(
        self, query: torch.Tensor, rotary: torch.Tensor, norm: torch.Tensor | None, eps: float,
        dim: int,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``query`` [tokens, heads * dim] after the rotation, as [tokens, heads, dim].

        If ``norm`` [dim] is given, each head is first normalised by RMSNorm.
        """
        ...

    def store(self, key: torch.Tensor, value: torch.Tensor, plan: StepPlan, layer: int) -> None:
        """Write ``key`` and ``value`` [tokens, kv heads, dim] to their slots in ``layer``."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        plan: StepPlan,
        layer: int,
        scale: float,
        window: int | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the causal attention of ``query`` [tokens, heads, dim] over each row's context.

        With a ``window``, a row attends to itself and to the ``window`` - 1 tokens before it. The
        result is written to ``out`` if given.
        """
        ...

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
        """Add ``attended @ weight.T`` to ``into`` [tokens, size] in place.

        ``attended`` is the result of :meth:`attend`, and ``weight`` is [size, heads * dim].
        """
        ...

    def add_product(self, x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor) -> None:
        """Add ``x @ weight.T`` to ``into`` [rows, size] in place.

        ``x`` is [rows, columns], and ``weight`` [size, columns].
        """
        ...

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` as [rows, size].

        ``x`` is [rows, columns], and ``weight`` [size, columns]. If ``weight`` is quantized, the
        rows of ``x`` are quantized as well.
        """
        ...

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
        """Return ``x @ weight.T + bias`` for a few rows, fused with other operations.

        ``x`` is [rows, columns] with up to :meth:`get_max_projection_rows` rows, and ``weight``
        [size, columns]. If ``norm`` [columns] is given, ``x`` is first normalised by
        :meth:`rms_norm`. With ``silu``, :meth:`silu_mul` is applied to the product. If ``into`` is
        given, the result is added to it in place.
        """
        ...

    def compute_experts(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        top_k: int,
        normalised: bool,
    ) -> torch.Tensor:
        """Return the weighted sum of the ``top_k`` best experts of each row.

        ``x`` is [tokens, hidden], and ``router`` [experts, hidden] scores the experts. The weights
        of the sum are the softmax of the scores, scaled to add up to 1 if ``normalised``.

        ``gate_up`` [experts * 2 * width, hidden] and ``down`` [experts * hidden, width] stack the
        projections of all experts.
        """
        ...

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the column of each row's maximum in ``logits``, as int64 [rows].

        If several columns have the maximum, the first is returned.
        """
        ...

    def draw(self, logits: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Sample a column of each row from the row's softmax, as int64 [rows].

        ``logits`` is [rows, columns]. ``scales`` float32 [rows] are the inverse temperatures, and
        ``keys`` int32 [rows, 2] the noise keys.
        """
        ...

    def compute_argmax_keys(self, x: torch.Tensor, first_column: int) -> torch.Tensor:
        """Return a key for each row's maximum in ``x`` [rows, columns], as int64 [rows].

        Each row of ``x`` is the part of a wider row from ``first_column`` on. The largest key of
        all parts gives the column of the wider row's maximum (:func:`decode_argmax_keys`).
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(first half) * second half of ``gate_up`` [rows, 2 * size] as [rows, size]."""
        ...

    def gated_linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return :meth:`silu_mul` of the result of :meth:`linear`, as [rows, size].

        ``x`` is [rows, columns], and ``weight`` [2 * size, columns].
        """
        ...


KEY_LOWER_MASK = (1 << 32) - 1
# For a row of only NaN and minus infinity.
UPPER_KEY_HALF_OF_MINUS_INFINITY = -0x7F800001


def decode_argmax_keys(keys: torch.Tensor) -> torch.Tensor:
    """Return the columns that ``keys`` int64 [rows] encode, as int64 [rows].

    The column is -1 for a row of only NaN and minus infinity.
    """
    columns = KEY_LOWER_MASK - (keys & KEY_LOWER_MASK)
    return columns.masked_fill_(keys >> 32 == UPPER_KEY_HALF_OF_MINUS_INFINITY, -1)
