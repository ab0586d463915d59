"""Edits of single logits before sampling: bias, banned tokens, penalties.

Most rows have none, and others change few of their logits. So the edits of a step are lists of
(row, token) pairs gathered on the host. The device keeps no state that could leak or be wrong after
a preemption.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from plimsoll_engine.messages.worker_ipc import Sampling

BANNED = -1e30
"""Added to a banned token's logit. Finite, so that it can follow where nothing else is allowed."""

TOKEN_BYTES = 90
"""Memory of a counted token: two array items and a dictionary entry with its key (CPython 3.11)."""


class TokenCounts:
    """How often each token of a request occurs in its output; 0 if only in the prompt."""

    __slots__ = ("_places", "outputs", "tokens")

    def __init__(self, prompt_ids: Iterable[int], output_ids: Iterable[int]) -> None:
        self.tokens = array("q")
        self.outputs = array("d")
        self._places: dict[int, int] = {}
        for token in prompt_ids:
            self._place(token)
        for token in output_ids:
            self.add(token)

    @classmethod
    def wanted(
        cls, sampling: Sampling, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> TokenCounts | None:
        """Return the counts that ``sampling`` needs; None without a penalty."""
        if sampling.repetition_penalty != 1.0:
            return cls(prompt_ids, output_ids)
        if sampling.presence_penalty or sampling.frequency_penalty:
            return cls((), output_ids)
        return None

    def __len__(self) -> int:
        return len(self.tokens)

    def with_outputs(self, tokens: Iterable[int]) -> TokenCounts:
        """Return a copy of the counts after ``tokens``. It supports reading only."""
        made = TokenCounts((), ())
        made.tokens, made.outputs = self.tokens[:], self.outputs[:]
        for token, times in Counter(tokens).items():
            place = self._places.get(token)
            if place is None:
                made.tokens.append(token)
                made.outputs.append(times)
            else:
                made.outputs[place] += times
        return made

    def add(self, token: int) -> None:
        """Count one more occurrence of ``token`` in the output."""
        self.outputs[self._place(token)] += 1

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self.tokens))
        if place == len(self.tokens):
            self.tokens.append(token)
            self.outputs.append(0)
        return place


@dataclass(slots=True)
class Edits:
    """The edits of one step, collected row by row on the host."""

    bias_rows: list[int] = field(default_factory=list)
    bias_tokens: list[int] = field(default_factory=list)
    biases: list[float] = field(default_factory=list)
    penalized: list[tuple[int, Sampling, TokenCounts]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.bias_rows or self.penalized)

    def collect(
        self,
        row: int,
        sampling: Sampling,
        position: int,
        counts: TokenCounts | None,
        banned: Sequence[int] = (),
    ) -> None:
        """Add the edits of ``row``, which samples output token ``position``, none of ``banned``."""
        if sampling.logit_bias:
            self._bias(row, sampling.logit_bias.keys(), sampling.logit_bias.values())
        if position < sampling.min_tokens and (stops := set(sampling.stop_token_ids)):
            self._bias(row, stops, [BANNED] * len(stops))
        if banned:
            self._bias(row, banned, [BANNED] * len(banned))
        if counts is not None and len(counts):
            self.penalized.append((row, sampling, counts))

    def _bias(self, row: int, tokens: Iterable[int], values: Iterable[float]) -> None:
        before = len(self.bias_tokens)
        self.bias_tokens += tokens
        self.biases += values
        self.bias_rows += [row] * (len(self.bias_tokens) - before)

    def apply(self, logits: torch.Tensor) -> None:
        """Edit ``logits`` [rows, vocabulary], float32, in place.

        Bias first, then the repetition penalty (a positive logit divided, another multiplied), then
        frequency and presence taken off: OpenAI's definitions in vLLM's order.
        """
        flat, size, device = logits.view(-1), logits.shape[-1], logits.device
        if self.bias_rows:
            tokens = torch.tensor(self.bias_tokens)
            known = tokens < size  # others would be in the next row
            places = (torch.tensor(self.bias_rows) * size + tokens)[known]
            places = places.to(device, non_blocking=True)
            biases = torch.tensor(self.biases, dtype=torch.float32)[known]
            biases = biases.to(device, non_blocking=True)
            flat.index_put_((places,), biases, accumulate=True)
        if not self.penalized:
            return
        lengths = torch.tensor([len(counts) for _, _, counts in self.penalized])
        starts = torch.tensor([row * size for row, _, _ in self.penalized])
        counted, outputs = array("q"), array("d")
        for _, _, counts in self.penalized:
            counted += counts.tokens
            outputs += counts.outputs
        knobs = torch.tensor(
            [
                (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
                for _, s, _ in self.penalized
            ],
            dtype=torch.float32,
        ).repeat_interleave(lengths, dim=0)
        count = torch.frombuffer(outputs, dtype=torch.float64).float()
        taken_off = knobs[:, 1] * count + knobs[:, 2] * (count > 0)
        places = torch.frombuffer(counted, dtype=torch.int64) + starts.repeat_interleave(lengths)
        places = places.to(device, non_blocking=True)
        packed = torch.stack([knobs[:, 0], taken_off]).to(device, non_blocking=True)
        values = flat[places]
        values = torch.where(values > 0, values / packed[0], values * packed[0]) - packed[1]
        flat[places] = values
