"""The rows of a step whose output of the last layer is read.

These are the rows from which a token is sampled, drafts included, and the scored ones. Of all
others only the keys and values are needed, so the last layer skips the rest of their computation. A
prompt of thousands of tokens has one needed row, or none if it is computed in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plimsoll_engine.messages.rank_ipc import Array, Inputs

MIN_ROWS_SAVED = 128
"""Minimum number of rows to skip. Fewer cost little more than reading the layer's weights, and
skipping launches six more small kernels."""


@dataclass(slots=True)
class NeededRows:
    """The needed rows on the host, as in :class:`plimsoll_engine.kernels.step_plan.Needed`.

    ``rows`` int32 [needed] are their indices in the step. ``sequences`` int32 are the sequences
    with needed rows, those with a single one first, and ``starts`` their offsets in ``rows``;
    ``decodes`` is the number with a single one, ``longest`` the most rows of any other. ``last``
    and ``scored`` are the indices in ``rows`` of those fields of
    :class:`plimsoll_engine.messages.rank_ipc.Inputs`.
    """

    rows: Array
    sequences: Array
    starts: Array
    decodes: int
    longest: int
    last: Array
    scored: Array


def needed_rows(inputs: Inputs) -> NeededRows | None:
    """Return the needed rows; None if the last layer should compute all rows.

    In each sequence they reach from the first one that is read to the end, because attention
    expects the query rows at the end of the context. Every rank computes the same.
    """
    ends = inputs.starts[1:]
    read = np.concatenate([inputs.last, inputs.scored])
    begins = ends.copy()
    owners = np.searchsorted(ends, read, side="right")
    np.minimum.at(begins, owners, read)
    counts = ends - begins
    total = int(counts.sum())
    if len(inputs.ids) - total < MIN_ROWS_SAVED:
        return None
    some = np.flatnonzero(counts)
    sequences = some[np.argsort(counts[some] > 1, kind="stable")].astype(np.int32)
    own = counts[sequences]
    starts = np.zeros(len(own) + 1, np.int32)
    np.cumsum(own, out=starts[1:])
    rows = np.arange(total, dtype=np.int32) + np.repeat(begins[sequences] - starts[:-1], own)
    places = np.zeros(len(inputs.ids), np.int32)
    places[rows] = np.arange(total, dtype=np.int32)
    return NeededRows(
        rows=rows,
        sequences=sequences,
        starts=starts,
        decodes=int((own == 1).sum()),
        longest=int(own.max(initial=0, where=own > 1)),
        last=places[inputs.last],
        scored=places[inputs.scored],
    )
