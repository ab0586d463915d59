"""Edit logits before sampling: biases, banned tokens and penalties.

Most rows need no edits, so the host collects the edits of each step as (row, token) pairs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from plimsoll_engine.core.schedule.token_rules import TokenCounts
from plimsoll_engine.messages.worker_ipc import Sampling

# Finite, so that a banned token can still be sampled if no other token is allowed.
BANNED_BIAS = -1e30


@dataclass(slots=True)
class LogitEdits:
    """Edits of the logits of one step."""

    bias_rows: list[int] = field(default_factory=list)
    bias_tokens: list[int] = field(default_factory=list)
    # Added to the logits of bias_tokens in bias_rows.
    biases: list[float] = field(default_factory=list)
    penalized: list[tuple[int, Sampling, TokenCounts]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.bias_rows or self.penalized)

    def add_row_edits(
        self,
        row: int,
        sampling: Sampling,
        position: int,
        counts: TokenCounts | None,
        banned: Sequence[int] = (),
    ) -> None:
        """Add the edits for ``row``, which samples the output token with index ``position``."""
        if sampling.logit_bias:
            self._add_bias(row, sampling.logit_bias.keys(), sampling.logit_bias.values())
        if position < sampling.min_tokens and (stops := set(sampling.stop_token_ids)):
            self._add_bias(row, stops, [BANNED_BIAS] * len(stops))
        if banned:
            self._add_bias(row, banned, [BANNED_BIAS] * len(banned))
        if counts is not None and len(counts):
            self.penalized.append((row, sampling, counts))

    def _add_bias(self, row: int, tokens: Iterable[int], values: Iterable[float]) -> None:
        before = len(self.bias_tokens)
        self.bias_tokens += tokens
        self.biases += values
        self.bias_rows += [row] * (len(self.bias_tokens) - before)

    def apply(self, logits: torch.Tensor) -> None:
        """Edit ``logits`` float32 [rows, vocabulary] in place, in the same order as vLLM."""
        flat, size, device = logits.view(-1), logits.shape[-1], logits.device
        if self.bias_rows:
            tokens = torch.tensor(self.bias_tokens)
            known = tokens < size  # a larger token ID would address the next row
            indices = (torch.tensor(self.bias_rows) * size + tokens)[known]
            indices = indices.to(device, non_blocking=True)
            biases = torch.tensor(self.biases, dtype=torch.float32)[known]
            biases = biases.to(device, non_blocking=True)
            flat.index_put_((indices,), biases, accumulate=True)
        if not self.penalized:
            return
        lengths = torch.tensor([len(counts) for _, _, counts in self.penalized])
        starts = torch.tensor([row * size for row, _, _ in self.penalized])
        counted, outputs = array("q"), array("d")
        for _, _, counts in self.penalized:
            counted += counts.tokens
            outputs += counts.outputs
        parameters = torch.tensor(
            [
                (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
                for _, s, _ in self.penalized
            ],
            dtype=torch.float32,
        ).repeat_interleave(lengths, dim=0)
        count = torch.frombuffer(outputs, dtype=torch.float64).float()
        penalties = parameters[:, 1] * count + parameters[:, 2] * (count > 0)
        indices = torch.frombuffer(counted, dtype=torch.int64) + starts.repeat_interleave(lengths)
        indices = indices.to(device, non_blocking=True)
        packed = torch.stack([parameters[:, 0], penalties]).to(device, non_blocking=True)
        values = flat[indices]
        values = torch.where(values > 0, values / packed[0], values * packed[0]) - packed[1]
        flat[indices] = values
