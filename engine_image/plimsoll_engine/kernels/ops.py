"""Operations of a decoder layer, implemented in torch for CPUs and in Triton for CUDA."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from plimsoll_engine.kernels.quantized import Weight
from plimsoll_engine.kernels.step_plan import StepPlan


class Ops(Protocol):
    """Operations on rows, one per token.

    Methods allocate their result and do not change their inputs. Exceptions are documented. From
    ``min_add_rows`` rows on, :meth:`add_product` and :meth:`add_attended` are faster than separate
    operations.
    """

    min_add_rows: int

    def max_project_rows(self, weight: Weight) -> int:
        """Return the maximum number of rows for which :meth:`project` by ``weight`` is faster."""
        ...

    def step_context(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Return the context in which a step of ``plan`` runs fastest."""
        ...

    def gather_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``x`` [n, size] at ``index`` int [rows], as [rows, size]."""
        ...

    def take_token_ids(
        self, ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor
    ) -> torch.Tensor:
        """Return the token IDs of a step, int64 [tokens].

        If the item of ``sources`` int32 [tokens] is negative, the ID comes from ``ids`` int32
        [tokens]. Otherwise, the item is the row of the ID in ``newest`` int64. Negative values of
        ``newest``, which are not tokens, become 0.
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x`` [rows, size] divided by its root mean square, times ``weight`` [size].

        The result has the shape and dtype of ``x``.
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place. Return :meth:`rms_norm` of the sum.

        All three are [rows, size] of the same dtype; ``weight`` is [size].
        """
        ...

    def compute_rotary_table(self, positions: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        """Return cosines, then sines, of ``positions`` [tokens] x ``inverse`` float32 [dim / 2].

        ``inverse`` are the inverse frequencies. The result is float32 [tokens, dim].
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
        """Normalise and rotate queries and keys. Store keys and values, and return the queries.

        ``qkv`` is [tokens, (heads + 2 kv heads) * dim]. ``norms``, if given, are the norms of each
        head's queries and keys. Keys and values go to their slots of ``layer``. The queries are
        [tokens, heads, dim] of the dtype of ``qkv``; ``heads`` may be 0. If ``out`` is given, they
        are written there.
        """
        ...

    def rotate(
        self, query: torch.Tensor, rotary: torch.Tensor, norm: torch.Tensor | None, eps: float,
        dim: int,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``query`` [tokens, heads * dim], normalised if ``norm`` is given, and rotated.

        The result is [tokens, heads, dim] of the same dtype.
        """
        ...

    def store(self, key: torch.Tensor, value: torch.Tensor, plan: StepPlan, layer: int) -> None:
        """Write ``key`` and ``value`` [tokens, kv heads, dim] to their slots of ``layer``."""
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

        A row sees the last ``window`` tokens up to itself, or all tokens if that is None. The
        result has the shape and dtype of ``query``. If ``out`` is given, the result is written
        there.
        """
        ...

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
        """Add :meth:`attend` times ``weight`` [size, heads * dim] to ``into`` [tokens, size]."""
        ...

    def add_product(self, x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor) -> None:
        """Add ``x`` [rows, columns] times ``weight`` [size, columns] to ``into`` [rows, size]."""
        ...

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``x`` [rows, columns] times ``weight`` [size, columns] as [rows, size].

        For a quantized weight, the rows of ``x`` are quantized as well.
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
        """Return ``x`` [rows, columns] times ``weight`` [size, columns] as [rows, size].

        The maximum number of rows is :meth:`max_project_rows`. If ``norm`` is given,
        :meth:`rms_norm` is first applied to ``x``. With ``silu``, :meth:`silu_mul` is applied to
        the product. If ``into`` is given, the result is added to it in place. Rows need not be
        quantized for a quantized weight.
        """
        ...

    def experts(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        chosen: int,
        normalised: bool,
    ) -> torch.Tensor:
        """Return the weighted sum of each row's ``chosen`` best experts.

        ``x`` is [tokens, hidden]. ``router`` [experts, hidden] scores the experts. The weights of
        the experts are the softmax of the scores, divided by their sum over the chosen experts if
        ``normalised``. An expert is an MLP: ``gate_up`` [experts * 2 * width, hidden] stacks the
        gate and up projections of all experts, and ``down`` [experts * hidden, width] their down
        projections. Rows are quantized for products with quantized weights. The result has the
        shape and dtype of ``x``.
        """
        ...

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the best column of each row of ``logits``, int64 [rows].

        Ties go to the first column.
        """
        ...

    def draw(self, logits: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Sample a column of each row from its softmax, int64 [rows], equally on all devices.

        ``logits`` is [rows, columns], ``scales`` float32 [rows] are the inverse temperatures, and
        ``keys`` is int32 [rows, 2].
        """
        ...

    def find_best_keys(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Return a key of the best column of each row of ``x`` [rows, columns], int64 [rows].

        ``x`` has the columns of the whole row from ``first`` on. The largest key among all parts of
        a row belongs to the best column of the row, and to the first one of equal columns.
        :func:`decode_columns` decodes a key.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(first half) x second half of ``gate_up`` [rows, 2 * size] as [rows, size]."""
        ...

    def gated_linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return :meth:`silu_mul` of :meth:`linear` as [rows, size].

        ``x`` is [rows, columns], and ``weight`` [2 * size, columns]. The intermediate result need
        not be rounded.
        """
        ...


KEY_LOWER = (1 << 32) - 1
KEY_OF_MINUS_INFINITY = -0x7F800001
"""Upper half of the key of a row whose values are all NaN or minus infinity."""


def decode_columns(keys: torch.Tensor) -> torch.Tensor:
    """Return the columns, int64 [rows], that ``keys``, int64 [rows], encode.

    As with the fused :meth:`Ops.argmax`, a row of only NaN or minus infinity has no column: -1.
    """
    columns = KEY_LOWER - (keys & KEY_LOWER)
    return columns.masked_fill_(keys >> 32 == KEY_OF_MINUS_INFINITY, -1)
