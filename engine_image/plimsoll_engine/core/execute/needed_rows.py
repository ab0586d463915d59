"""Which rows of a step somebody reads after its last layer.

Those are the rows that get a token, drafts included, and those that are scored. All others only
leave their keys and values: what the last layer would compute of them beyond that, nobody reads. A
prompt of thousands of tokens has one such row, or none if it is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plimsoll_engine.messages.rank_ipc import Array, Inputs

FEWEST = 128
"""So many rows must be saved at least. Fewer cost the last layer little more than the reading of
its weights, and the shorter way has six small kernels more."""


@dataclass(slots=True)
class NeededRows:
    """The needed rows on the host, as in :class:`plimsoll_engine.kernels.step_plan.Needed`.

    ``rows`` int32 [needed] are their numbers in the step. ``sequences`` int32 are the sequences
    that have any, those with one first, and ``starts`` their first places in ``rows``; ``decodes``
    have one and ``longest`` is the most of any other. ``last`` and ``scored`` are the places in
    ``rows`` of what :class:`plimsoll_engine.messages.rank_ipc.Inputs` names so.
    """

    rows: Array
    sequences: Array
    starts: Array
    decodes: int
    longest: int
    last: Array
    scored: Array


def needed_rows(inputs: Inputs) -> NeededRows | None:
    """Return the rows that are read after a step; None where the last layer computes all.

    Of each sequence they are the last ones, from the first that is read on, so that attention finds
    them at the end of its context. Every rank of a group finds the same.
    """
    ends = inputs.starts[1:]
    read = np.concatenate([inputs.last, inputs.scored])
    begins = ends.copy()
    owners = np.searchsorted(ends, read, side="right")
    np.minimum.at(begins, owners, read)
    counts = ends - begins
    total = int(counts.sum())
    if len(inputs.ids) - total < FEWEST:
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
