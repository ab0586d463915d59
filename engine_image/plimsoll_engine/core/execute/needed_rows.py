"""Rows of a step whose output of the last layer is needed.

These are the rows that sample a token, including drafts, and the scored rows. Other rows need only
keys and values, so the last layer skips the rest of their computation. A prompt of thousands of
tokens has one needed row, or none if it is computed in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plimsoll_engine.messages.rank_ipc import Array, Inputs

MIN_ROWS_SAVED = 128
"""Minimum number of rows to skip.

Fewer rows cost little more than reading the weights of the layer, and skipping launches six more
small kernels.
"""


@dataclass(slots=True)
class NeededRows:
    """Needed rows on the host, as in :class:`plimsoll_engine.kernels.step_plan.Needed`.

    ``rows`` int32 [needed] are the indices of the needed rows in the step. ``sequences`` int32 are
    the sequences with needed rows; those with a single needed row come first. ``starts`` are their
    offsets in ``rows``. ``decodes`` is the number of sequences with a single needed row, and
    ``longest`` the maximum number of needed rows of any other sequence. ``last`` and ``scored`` are
    the fields of :class:`plimsoll_engine.messages.rank_ipc.Inputs` as indices in ``rows``.
    """

    rows: Array
    sequences: Array
    starts: Array
    decodes: int
    longest: int
    last: Array
    scored: Array


def find_needed_rows(inputs: Inputs) -> NeededRows | None:
    """Return the needed rows; None if the last layer should compute all rows.

    The needed rows of a sequence include all rows after its first needed row, because attention
    expects the query rows at the end of the context. Every rank computes the same result.
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
