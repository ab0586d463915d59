"""Find the rows of a step whose output of the last layer is needed.

These are the rows whose next token is sampled or verified, and the scored rows. For all other rows,
the last layer computes only keys and values. A prompt of thousands of tokens has one needed row,
and a chunk that does not end the prompt has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plimsoll_engine.messages.rank_ipc import Array, Inputs

MIN_ROWS_SAVED = 128
"""Minimum number of rows that the last layer skips.

Computing fewer rows takes little more time than reading the layer's weights, and skipping needs six
more small kernels.
"""


@dataclass(slots=True)
class NeededRows:
    """Rows of a step whose hidden states are needed after the step, as arrays on the host.

    See :class:`plimsoll_engine.kernels.step_plan.NeededPlan`.

    ``rows`` int32 [needed] are the indices of the needed rows in the step. ``sequences`` int32 are
    the sequences with needed rows; sequences with one needed row come first. ``starts`` are the
    offsets of the sequences in ``rows``. ``decodes`` is the number of sequences with one needed
    row. ``longest`` is the maximum number of needed rows of a sequence with more than one.
    ``last`` and ``scored`` are the fields of
    :class:`plimsoll_engine.messages.rank_ipc.Inputs`, but as indices into ``rows``.
    """

    rows: Array
    sequences: Array
    starts: Array
    decodes: int
    longest: int
    last: Array
    scored: Array


def find_needed_rows(inputs: Inputs) -> NeededRows | None:
    """Return the rows whose output of the last layer is needed.

    None if the last layer should compute all rows, because it could skip too few of them. If a row
    of a sequence is needed, all later rows of the sequence are included, because attention expects
    the query rows at the end of the context. Every rank computes the same result.
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
