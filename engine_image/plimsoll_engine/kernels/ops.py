"""Operations of a decoder layer, implemented in torch for CPUs and in Triton for CUDA."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from plimsoll_engine.kernels.quantized import Weight
from plimsoll_engine.kernels.step_plan import StepPlan


class Ops(Protocol):
    """Operations on rows, one for each token. Methods allocate their result and keep their inputs.

    Exceptions say so. From ``adds_from`` rows on, :meth:`add_product` and :meth:`add_attended` are
    faster than separate operations.
    """

    adds_from: int

    def max_project_rows(self, weight: Weight) -> int:
        """Return the largest number of rows for which :meth:`project` by ``weight`` pays."""
        ...

    def step_context(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Return the context in which a step of ``plan`` runs fastest."""
        ...

    def rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``x`` [n, size] at ``index`` int32 or int64 [rows] as [rows, size]."""
        ...

    def take(self, ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """Return the token IDs of a step, int64 [tokens].

        An ID comes from ``ids`` int32 [tokens], or from ``newest`` int64 at the row in ``sources``
        int32 [tokens] unless that is negative. Negative values of ``newest``, which are not tokens,
        become 0.
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
        """Add ``x`` to ``residual`` in place and return the sum's :meth:`rms_norm`.

        All three are [rows, size] of one dtype; ``weight`` is [size].
        """
        ...

    def rotary(self, positions: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        """Return cosines, then sines, of ``positions`` [tokens] x ``inverse`` float32 [dim / 2].

        The result is float32 [tokens, dim].
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
        """Normalise and rotate queries and keys, store keys and values, and return the queries.

        ``qkv`` is [tokens, (heads + 2 kv heads) * dim]. ``norms``, if given, are the norms of each
        head's queries and keys. Keys and values go to their slots of ``layer``. The queries are
        [tokens, heads, dim] of the dtype of ``qkv``; ``heads`` may be 0. They are written to
        ``out`` if that is given.
        """
        ...

    def rotate(
        self, query: torch.Tensor, rotary: torch.Tensor, norm: torch.Tensor | None, eps: float,
        dim: int,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``query`` [tokens, heads * dim], normalised by ``norm`` if given, and rotated.

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
        """Return the causal attention of ``query`` [tokens, heads, dim] to each row's own context.

        A row sees the last ``window`` tokens up to itself, or all if that is None. The result has
        the shape and dtype of ``query``, and is written to ``out`` if that is given.
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

        There may be at most :meth:`max_project_rows` rows. ``norm`` applies :meth:`rms_norm` to
        ``x`` first, and ``silu`` applies :meth:`silu_mul` to the product. If ``into`` is given,
        the result is added to it in place. Rows need not be quantized for a quantized weight.
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

        ``x`` is [tokens, hidden]. ``router`` [experts, hidden] scores the experts. Their weights
        are its softmax, divided by the sum over the chosen ones if ``normalised``. An expert is an
        MLP: ``gate_up`` [experts * 2 * width, hidden] stacks their gate and up projections,
        ``down`` [experts * hidden, width] their down projections. Rows are quantized for products
        with quantized weights. The result has the shape and dtype of ``x``.
        """
        ...

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the best column of each row of ``logits``, int64 [rows]. Ties go to the first."""
        ...

    def draw(self, logits: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Sample a column of each row from its softmax, int64 [rows], equally on all devices.

        ``logits`` is [rows, columns], ``scales`` float32 [rows] the inverse temperatures, and
        ``keys`` int32 [rows, 2].
        """
        ...

    def best_keys(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Return a key of the best column of each row of ``x`` [rows, columns], int64 [rows].

        ``x`` has the columns from ``first`` on of the whole row. The largest key of all parts of a
        row is that of its best column, of equal ones the first; :func:`column_of` decodes it.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(first half) x second half of ``gate_up`` [rows, 2 * size] as [rows, size]."""
        ...

    def gated(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return :meth:`silu_mul` of :meth:`linear` as [rows, size].

        ``x`` is [rows, columns], ``weight`` [2 * size, columns]. The intermediate need not be
        rounded.
        """
        ...


KEY_LOWER = (1 << 32) - 1


def column_of(keys: torch.Tensor) -> torch.Tensor:
    """Return the columns, int64 [rows], that ``keys`` int64 [rows] encode."""
    return KEY_LOWER - (keys & KEY_LOWER)
