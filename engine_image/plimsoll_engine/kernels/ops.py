"""The operations that a decoder layer is made of, in torch for a CPU and in Triton for CUDA."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from plimsoll_engine.kernels.quantized import Weight
from plimsoll_engine.kernels.step_plan import StepPlan


class Ops(Protocol):
    """Rows are tokens. Every method allocates its result; inputs stay as they are, unless said.

    From ``adds_from`` rows on :meth:`add_product` and :meth:`add_attended` are faster than their
    parts.
    """

    adds_from: int

    def projects(self, weight: Weight) -> int:
        """Return up to how many rows :meth:`project` by ``weight`` is faster than its parts."""
        ...

    def computing(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Return the context to compute a step of ``plan`` in. Without it, attention is slower."""
        ...

    def rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``x`` [n, size] at ``index`` int32 or int64 [rows]; [rows, size]."""
        ...

    def take(self, ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """Return the tokens of a step, int64 [tokens].

        They are ``ids`` int32 [tokens], but row ``sources`` int32 [tokens] of ``newest`` int64
        where that is not negative. A negative one of ``newest``, which is no token, counts as 0.
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x`` [rows, size] over its root mean square, times ``weight`` [size].

        The same shape and dtype as ``x``.
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place and return the sum's :meth:`rms_norm`.

        All three are [rows, size] of one dtype, ``weight`` [size].
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
        """Normalise and rotate queries and keys, store keys and values; return the queries.

        ``qkv`` [tokens, (heads + 2 kv heads) * dim] is split; queries and keys are normalised per
        head by ``norms`` where given. Keys and values go to their slots of ``layer``. The queries
        are [tokens, heads, dim] of the dtype of ``qkv``, and may be none. They are in ``out`` where
        that is given.
        """
        ...

    def rotate(
        self, query: torch.Tensor, rotary: torch.Tensor, norm: torch.Tensor | None, eps: float,
        dim: int,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``query`` [tokens, heads * dim] normalised by ``norm`` where given, and rotated.

        The result is [tokens, heads, dim] of its dtype.
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

        At most the last ``window`` tokens of it, the row itself included; the same shape and dtype,
        in ``out`` where that is given.
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
        """Return ``x`` [rows, columns] times ``weight`` [size, columns]; [rows, size].

        With a quantized weight the rows of ``x`` are quantized as well.
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
        """Return ``x`` [rows, columns] times ``weight`` [size, columns]; [rows, size].

        At most as many rows as :meth:`projects` says. With ``norm`` it is :meth:`rms_norm` of ``x``
        times ``weight``; with ``silu`` :meth:`silu_mul` follows. Added to ``into`` in place where
        given. A quantized weight may leave the rows as they are.
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
        """Return what the ``chosen`` best experts of each row of ``x`` [tokens, hidden] make of it.

        ``router`` [experts, hidden] scores the experts; the shares are its softmax, over the sum of
        the chosen ones where ``normalised``. An expert is an MLP: ``gate_up`` [experts * 2 * width,
        hidden] holds each one's gates and values, ``down`` [experts * hidden, width] its output.
        With a quantized weight the rows that it is multiplied with are quantized as well.
        The result is the sum of the experts by their shares, of the shape and dtype of ``x``.
        """
        ...

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 [rows]: the best column of each row, of equal ones the first."""
        ...

    def draw(self, logits: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Draw a column of each row from its softmax, int64 [rows]: the same on each device.

        ``logits`` are [rows, columns], ``scales`` float32 [rows] one over the temperatures, and
        ``keys`` int32 [rows, 2].
        """
        ...

    def best_keys(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """int64 [rows]: a key of the best column of each row of ``x`` [rows, columns].

        ``x`` are columns ``first`` and on of a row. The largest of the keys of all parts of a row
        is that of its best column, of equal ones the first; :func:`column_of` tells which it is.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half) x second half of ``gate_up`` [rows, 2 * size]; [rows, size]."""
        ...

    def gated(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return :meth:`silu_mul` of :meth:`linear` of the same; [rows, size].

        ``x`` is [rows, columns], ``weight`` [2 * size, columns]. What is between the two may not
        be rounded.
        """
        ...


KEY_LOWER = (1 << 32) - 1


def column_of(keys: torch.Tensor) -> torch.Tensor:
    """Return the columns, int64 [rows], of which ``keys`` int64 [rows] are the best."""
    return KEY_LOWER - (keys & KEY_LOWER)
