"""Collect the integer inputs of a step, and copy them to the device in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from plimsoll_engine.core.execute.prompt_scores import ScoredRows
from plimsoll_engine.core.schedule.request import InFlight
from plimsoll_engine.messages.rank_ipc import Array, Inputs


class RequestState(Protocol):
    """Properties of a request on which the inputs of a step depend."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens that the host knows."""
        ...

    @property
    def block_ids(self) -> list[int]:
        """KV blocks, in the order of the tokens."""
        ...

    @property
    def computed(self) -> int:
        """Number of tokens whose keys and values are in the KV pool."""
        ...

    @property
    def in_flight(self) -> InFlight:
        """Tokens that only the device knows."""
        ...


class RequestRows(Protocol):
    """Rows of one request in a step."""

    @property
    def request(self) -> RequestState:
        """Request to which the rows belong."""
        ...

    @property
    def count(self) -> int:
        """Number of rows, without those of drafts."""
        ...

    @property
    def drafts(self) -> Sequence[int]:
        """Draft tokens. Each adds one row."""
        ...

    @property
    def has_newest_token(self) -> bool:
        """Whether the rows include the newest token of the request."""
        ...


def collect_inputs(
    chunks: Sequence[RequestRows],
    block_size: int,
    scored_rows: Sequence[ScoredRows] = (),
    as_decode_rows: bool = False,
) -> Inputs:
    """Return the inputs of a step. ``chunks`` must be sorted by :func:`get_row_order`.

    Each draft is a decode row that reads the blocks of its request. If ``as_decode_rows``, so is
    each prompt token. ``scored_rows`` are the rows to score.
    """
    counts = np.fromiter((chunk.count for chunk in chunks), np.int32, len(chunks))
    computed = np.fromiter((chunk.request.computed for chunk in chunks), np.int32, len(chunks))
    width = max(len(chunk.request.block_ids) for chunk in chunks)
    tables = np.zeros((len(chunks), width), np.int32)
    ends = np.fromiter((chunk.has_newest_token for chunk in chunks), np.bool_, len(chunks))
    drafts = sum(len(chunk.drafts) for chunk in chunks)
    sources = np.full(counts.sum() + drafts, -1, np.int32)
    ids: list[int] = []
    for row, chunk in enumerate(chunks):
        request = chunk.request
        tables[row, : len(request.block_ids)] = request.block_ids
        ids += request.token_ids[request.computed : request.computed + chunk.count]
        if request.in_flight.tokens and chunk.has_newest_token:
            ids.append(0)
            sources[len(ids) - 1] = request.in_flight.row
        ids += chunk.drafts
    if drafts or as_decode_rows:
        copies = np.fromiter((len(chunk.drafts) for chunk in chunks), np.int32, len(chunks))
        copies += counts if as_decode_rows else np.int32(1)
        first = np.repeat(np.cumsum(copies) - copies, copies).astype(np.int32)
        number = np.arange(len(first), dtype=np.int32) - first
        counts, computed = np.repeat(counts, copies), np.repeat(computed, copies) + number
        tables, ends = np.repeat(tables, copies, axis=0), np.repeat(ends, copies)
        if as_decode_rows:
            ends &= number >= counts - 1
            counts = np.ones_like(counts)
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    sequence = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(starts[-1], dtype=np.int32) + (computed - starts[:-1])[sequence]
    slots = tables[sequence, positions // block_size] * block_size + positions % block_size
    prompts = [] if as_decode_rows else [chunk for chunk in chunks if chunk.count > 1]
    decodes = len(counts) - len(prompts)
    return Inputs(
        ids=np.array(ids, np.int32),
        sources=sources,
        positions=positions,
        slots=slots,
        contexts=computed + counts,
        starts=starts,
        tables=tables,
        last=(starts[1:] - 1)[ends],
        decodes=decodes,
        longest=max((chunk.count for chunk in prompts), default=0),
        fresh=tuple(chunk.count for chunk in prompts if not chunk.request.computed),
        scored=_create_array(
            [part.row + i for part in scored_rows for i in range(len(part.targets))]
        ),
        targets=_create_array([target for part in scored_rows for target in part.targets]),
        most=max((part.request.sampling.prompt_logprobs or 0 for part in scored_rows), default=0),
    )


def _create_array(values: list[int]) -> Array:
    return np.array(values, np.int32)


def get_row_order(chunk: RequestRows) -> tuple[int, int]:
    """Return the sort key of a chunk within a step.

    Decode rows come first, the longest context first. Continued prompts come next. Whole prompts
    come last, the shortest first.
    """
    if chunk.count == 1:
        return 0, -chunk.request.computed
    return (1, 0) if chunk.request.computed else (2, chunk.count)


def copy_to_device(fields: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Copy the int32 ``fields`` to ``device`` in one transfer, and return views of the copy."""
    packed = copy_array_to_device(np.concatenate(fields), device)
    return list(torch.split(packed, [len(field) for field in fields]))


def copy_array_to_device(values: Array, device: torch.device) -> torch.Tensor:
    """Return a copy of the int32 ``values`` on ``device``, without waiting for it on CUDA."""
    if device.type != "cuda":
        return torch.from_numpy(values)
    pinned = torch.empty(len(values), dtype=torch.int32, pin_memory=True)
    pinned.numpy()[:] = values
    return pinned.to(device, non_blocking=True)
