"""Sample the next token of each row of logits.

The random noise for output token i of a request depends only on (seed, i) and on token IDs. The
same request therefore gets the same tokens in any batch, on any device, and after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import unpack
from typing import NamedTuple

import torch

from plimsoll_engine.core.execute.logit_edits import LogitEdits
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.token_rules import TokenCounts
from plimsoll_engine.kernels.choose import choose_ops
from plimsoll_engine.kernels.draw import compute_noise
from plimsoll_engine.messages.worker_ipc import Logprobs, Sampling

# Maximum number of logits to filter at once. Filtering needs several float64 copies of them.
MAX_WORKSPACE_ELEMENTS = 1 << 23
INT32_BITS = 32
# For a row without a finite and allowed logit.
NO_TOKEN = -1
# Sampling is greedy below this temperature, as in vLLM. Dividing by it could overflow.
MIN_SAMPLING_TEMPERATURE = 1e-5


class SamplingRow(NamedTuple):
    """Sampling parameters and state of one row."""

    sampling: Sampling
    position: int  # number of output tokens so far
    counts: TokenCounts | None = None  # for penalties
    # Token t may be sampled if bit t % 32 of the little-endian int32 word t // 32 is set.
    allowed: bytes | None = None
    banned: tuple[int, ...] = ()  # tokens that would complete a bad word


def create_sampling_row(request: Request, drafts: Sequence[int] = ()) -> SamplingRow:
    """Return the row that samples the next token after the output of ``request`` and ``drafts``."""
    allowed = request.allowed if request.matcher is None else request.matcher.mask
    counts = request.counts
    if counts is not None and drafts:
        counts = counts.copy_with_outputs(drafts)
    position = request.num_outputs + request.in_flight.tokens + len(drafts)
    return SamplingRow(
        request.sampling, position, counts, allowed, request.list_banned_tokens(drafts)
    )


@dataclass(slots=True)
class _RandomRows:
    rows: list[int] = field(default_factory=list)
    # (1 / temperature, top_k, top_p, min_p).
    parameters: list[tuple[float, float, float, float]] = field(default_factory=list)
    keys: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class SamplingPlan:
    """Rows of a step, grouped by sampling method."""

    edits: LogitEdits = field(default_factory=LogitEdits)
    plain: _RandomRows = field(default_factory=_RandomRows)
    filtered: _RandomRows = field(default_factory=_RandomRows)
    masked_rows: list[int] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)
    logprob_rows: list[int] = field(default_factory=list)
    logprob_counts: list[int] = field(default_factory=list)
    named_rows: list[int] = field(default_factory=list)
    named: list[list[int]] = field(default_factory=list)

    @property
    def is_greedy(self) -> bool:
        """Whether all rows take the argmax of unedited logits and need no log probabilities."""
        wanted = self.edits, self.plain.rows, self.filtered.rows, self.masks, self.logprob_rows
        return not any(wanted)


@dataclass(slots=True)
class SampledTokens:
    """Sampled tokens, and the requested log probabilities."""

    tokens: torch.Tensor  # int64 [rows], with NO_TOKEN for rows without a token
    logprob_rows: list[int] = field(default_factory=list)  # n rows
    logprob_counts: list[int] = field(default_factory=list)
    chosen: torch.Tensor | None = None  # float32 [n], those of the sampled tokens
    top_ids: torch.Tensor | None = None  # int64 [n, largest requested number], the likeliest tokens
    top: torch.Tensor | None = None  # float32, of the same shape
    named_rows: list[int] = field(default_factory=list)  # m rows whose request lists token IDs
    named: list[list[int]] = field(default_factory=list)
    named_values: torch.Tensor | None = None  # float32 [m, length of the longest list]

    def copy_to_host(self) -> SampledTokens:
        """Return a copy in host memory, which is valid once the stream has completed it."""

        def copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to("cpu", non_blocking=True)

        return SampledTokens(
            self.tokens.to("cpu", non_blocking=True), self.logprob_rows, self.logprob_counts,
            copy(self.chosen), copy(self.top_ids), copy(self.top),
            self.named_rows, self.named, copy(self.named_values),
        )  # fmt: skip

    def get_logprobs(self) -> dict[int, Logprobs]:
        """Return the log probabilities by row index. The tensors must be in host memory."""
        if self.chosen is None or self.top_ids is None or self.top is None:
            return {}
        columns = self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist()
        rows = zip(self.logprob_rows, self.logprob_counts, *columns, strict=True)
        found = {
            row: Logprobs(chosen, ids[:count], top[:count]) for row, count, chosen, ids, top in rows
        }
        if self.named_values is not None:
            named = zip(self.named_rows, self.named, self.named_values.tolist(), strict=True)
            for row, ids, values in named:
                found[row] = _create_named_logprobs(
                    int(self.tokens[row]), found[row].chosen, ids, values
                )
        return found


def _create_named_logprobs(
    token: int, chosen: float, ids: list[int], values: list[float]
) -> Logprobs:
    values = values[: len(ids)]
    if token in ids:
        return Logprobs(chosen, ids, values)
    return Logprobs(chosen, [token, *ids], [chosen, *values])


def create_noise_key(seed: int, position: int) -> tuple[int, int]:
    """Return the two int32 words of the noise key for the output token with index ``position``."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    first, second = unpack("<ii", digest)
    return first, second


def plan_sampling(rows: Sequence[SamplingRow]) -> SamplingPlan:
    """Return the sampling plan for ``rows``."""
    sampling_plan = SamplingPlan()
    for number, (sampling, position, counts, allowed, banned) in enumerate(rows):
        sampling_plan.edits.add_row_edits(number, sampling, position, counts, banned)
        if allowed is not None:
            sampling_plan.masked_rows.append(number)
            sampling_plan.masks.append(allowed)
        if sampling.logprobs is not None:
            sampling_plan.logprob_rows.append(number)
            named = sampling.logprob_token_ids
            sampling_plan.logprob_counts.append(0 if named else sampling.logprobs)
            if named:
                sampling_plan.named_rows.append(number)
                sampling_plan.named.append(named)
        if sampling.temperature >= MIN_SAMPLING_TEMPERATURE:
            whole = not sampling.top_k and sampling.top_p >= 1 and not sampling.min_p
            draws = sampling_plan.plain if whole else sampling_plan.filtered
            draws.rows.append(number)
            draws.parameters.append(
                (
                    1 / sampling.temperature,
                    sampling.top_k or float("inf"),
                    sampling.top_p,
                    sampling.min_p,
                )
            )
            draws.keys.append(create_noise_key(sampling.seed, position))
    return sampling_plan


def sample(logits: torch.Tensor, sampling_plan: SamplingPlan) -> SampledTokens:
    """Sample the next token of each row of ``logits`` [rows, vocabulary].

    ``logits`` may be overwritten.
    """
    raw = None
    if sampling_plan.logprob_rows:
        raw = logits[sampling_plan.logprob_rows].float().log_softmax(dim=-1)
    if sampling_plan.edits or sampling_plan.masked_rows:
        logits = logits.float()
        sampling_plan.edits.apply(logits)
        _apply_masks(logits, sampling_plan)
    tokens = logits.argmax(dim=-1)
    for draws, draw in ((sampling_plan.plain, _draw), (sampling_plan.filtered, _draw_filtered)):
        at_once = max(1, MAX_WORKSPACE_ELEMENTS // logits.shape[-1])
        for start in range(0, len(draws.rows), at_once):
            rows: list[int] | slice = draws.rows[start : start + at_once]
            if len(draws.rows) == len(logits):  # a slice avoids a copy
                rows = slice(start, start + at_once)
            parameters = torch.tensor(draws.parameters[start : start + at_once])
            keys = torch.tensor(draws.keys[start : start + at_once], dtype=torch.int32)
            parameters, keys = (
                one.to(logits.device, non_blocking=True) for one in (parameters, keys)
            )
            tokens[rows] = draw(logits[rows], parameters, keys)
    best = logits.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    tokens = torch.where(best.isfinite(), tokens, NO_TOKEN)
    sampled = SampledTokens(tokens, sampling_plan.logprob_rows, sampling_plan.logprob_counts)
    if raw is not None:
        places = tokens[sampling_plan.logprob_rows].clamp(min=0).unsqueeze(-1)
        sampled.chosen = raw.gather(-1, places).squeeze(-1)
        sampled.top, sampled.top_ids = raw.topk(max(sampling_plan.logprob_counts), dim=-1)
        _add_named_logprobs(sampled, raw, sampling_plan)
    return sampled


def _add_named_logprobs(
    sampled: SampledTokens, raw: torch.Tensor, sampling_plan: SamplingPlan
) -> None:
    # ``raw`` are the log probabilities of all tokens, in the rows that request log probabilities.
    if not sampling_plan.named_rows:
        return
    most = max(map(len, sampling_plan.named))
    padded = [ids + [0] * (most - len(ids)) for ids in sampling_plan.named]
    place = {row: number for number, row in enumerate(sampling_plan.logprob_rows)}
    rows = torch.tensor([place[row] for row in sampling_plan.named_rows]).to(
        raw.device, non_blocking=True
    )
    columns = torch.tensor(padded).to(raw.device, non_blocking=True)
    sampled.named_rows, sampled.named = sampling_plan.named_rows, sampling_plan.named
    sampled.named_values = raw[rows].gather(-1, columns)


def _apply_masks(logits: torch.Tensor, sampling_plan: SamplingPlan) -> None:
    if not sampling_plan.masked_rows:
        return
    # A shorter mask does not allow the tokens beyond its end.
    width = max(4, *map(len, sampling_plan.masks))
    masks = b"".join(mask.ljust(width, b"\0") for mask in sampling_plan.masks)
    words = torch.frombuffer(bytearray(masks), dtype=torch.int32)
    words = words.view(len(sampling_plan.masks), -1, 1).to(logits.device, non_blocking=True)
    bits = (words >> torch.arange(INT32_BITS, dtype=torch.int32, device=logits.device)) & 1
    allowed = bits.flatten(start_dim=1)[:, : logits.shape[-1]].bool()
    # Logits beyond the tokenizer's vocabulary are padding: no grammar allows them.
    padding = logits.shape[-1] - allowed.shape[-1]
    allowed = torch.nn.functional.pad(allowed, (0, padding))
    rows = logits[sampling_plan.masked_rows]
    logits[sampling_plan.masked_rows] = rows.masked_fill(~allowed, float("-inf"))


def _draw(logits: torch.Tensor, parameters: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return choose_ops(logits.device).draw(logits, parameters[:, 0].contiguous(), keys)


def _draw_filtered(
    logits: torch.Tensor, parameters: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    # As in vLLM, top_p is a share of the probability that remains after top_k and min_p.
    scale, top_k, top_p, min_p = parameters.unsqueeze(-1).unbind(dim=1)
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    scores = ordered.float() * scale
    probabilities = torch.softmax(scores.double(), dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    rank = torch.arange(logits.shape[-1], device=logits.device)
    kept = (rank < top_k) & (probabilities >= min_p * probabilities[:, :1])
    kept &= before < top_p * (probabilities * kept).sum(dim=-1, keepdim=True)
    kept[:, 0] = True
    scores -= compute_noise(keys, logits.shape[-1]).gather(-1, tokens)
    best = scores.masked_fill_(~kept, float("-inf")).argmax(dim=-1)
    return tokens.gather(-1, best.unsqueeze(-1)).squeeze(-1)
