"""Select the rows for which the last layer computes its output.

These are the rows that are sampled, verified or scored. For all other rows, the last layer computes
only keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plimsoll_engine.messages.rank_ipc import Array, Inputs

# With fewer rows to skip, all rows are computed. Skipping needs six more small kernels, and a few
# rows add little to the time for reading weights.
MIN_SKIPPED_ROWS = 128


@dataclass(slots=True)
class NeededRows:
    """Rows of a step whose hidden states are needed after the step, as arrays on the host."""

    rows: Array  # int32 [needed], the indices of the needed rows.
    sequences: Array  # int32, the sequences with needed rows, those with one such row first.
    starts: Array  # Offsets of the sequences in rows.
    decodes: int  # Number of sequences with one needed row.
    longest: int  # Maximum number of needed rows of the other sequences.
    last: Array  # As in rank_ipc.Inputs, but as indices into rows.
    scored: Array  # As in rank_ipc.Inputs, but as indices into rows.


def find_needed_rows(inputs: Inputs) -> NeededRows | None:
    """Return the rows for which the last layer computes its output; None means all rows.

    All rows of a sequence after its first needed row are included, because attention expects query
    rows at the end of the context.
    """
    ends = inputs.starts[1:]
    read = np.concatenate([inputs.last, inputs.scored])
    begins = ends.copy()
    owners = np.searchsorted(ends, read, side="right")
    np.minimum.at(begins, owners, read)
    counts = ends - begins
    total = int(counts.sum())
    if len(inputs.ids) - total < MIN_SKIPPED_ROWS:
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
