"""Which split each family of the leak lab is in.

The detector's constants may be chosen on the development split, and on what was seen: the earlier
test splits, which are no test any more since they were looked at, and are kept for their figures.
No mechanism is in two splits: a family such as "garbage collection" has another one in each.
"""

from __future__ import annotations

from enum import StrEnum

from leaklab import editions
from leaklab.editions import ELEVENTH, NINTH, TENTH, watched
from leaklab.healthy import basics
from leaklab.healthy.device import (
    accelerator,
    cards,
    pools,
    slots,
    tenants,
    tensors,
    transient,
    workspaces,
)
from leaklab.healthy.host import (
    allocators,
    collectors,
    engines,
    files,
    heaps,
    kernels,
    libraries,
    processes,
    retention,
    runtimes,
    threads,
)
from leaklab.healthy.service import (
    askers,
    clients,
    control,
    demands,
    neighbours,
    operations,
    peers,
    people,
    pods,
    queues,
    stores,
    surroundings,
    tables,
    tools,
    work,
)
from leaklab.healthy.steps import few, moments, pauses, silence, turns, waits
from leaklab.series import Build


class Split(StrEnum):
    DEVELOPMENT = "development"
    SEEN = "seen"
    TEST = "test"


EDITIONS = {
    Split.DEVELOPMENT: (editions.DEVELOPMENT,),
    Split.SEEN: (editions.EARLIER, editions.NINTH, editions.TENTH),
    Split.TEST: (editions.ELEVENTH,),
}
LEAKS = {
    split: tuple(mechanism for edition in of for mechanism in edition.mechanisms)
    for split, of in EDITIONS.items()
}
HANGS = {
    split: {name for edition in of for name in edition.hangs} for split, of in EDITIONS.items()
}
"""Their names."""

_NINTH = (
    kernels.FAMILIES
    | queues.FAMILIES
    | files.FAMILIES
    | tenants.FAMILIES
    | demands.FAMILIES
    | moments.FAMILIES
    | few.FAMILIES
)
_TENTH = (
    collectors.FAMILIES
    | tables.FAMILIES
    | askers.FAMILIES
    | accelerator.FAMILIES
    | pods.FAMILIES
    | waits.FAMILIES
)
_ELEVENTH = (
    runtimes.FAMILIES
    | retention.FAMILIES
    | people.FAMILIES
    | neighbours.FAMILIES
    | cards.FAMILIES
    | pauses.FAMILIES
    | turns.FAMILIES
)
FAMILIES: dict[Split, dict[str, Build]] = {
    Split.DEVELOPMENT: basics.DEVELOPMENT,
    Split.SEEN: basics.SEEN
    | engines.FAMILIES
    | work.FAMILIES
    | silence.FAMILIES
    | processes.FAMILIES
    | transient.FAMILIES
    | control.FAMILIES
    | threads.FAMILIES
    | workspaces.FAMILIES
    | operations.FAMILIES
    | heaps.FAMILIES
    | tensors.FAMILIES
    | surroundings.FAMILIES
    | libraries.FAMILIES
    | pools.FAMILIES
    | clients.FAMILIES
    | peers.FAMILIES
    | allocators.FAMILIES
    | stores.FAMILIES
    | slots.FAMILIES
    | tools.FAMILIES
    | watched(NINTH, _NINTH)
    | watched(TENTH, _TENTH),
    Split.TEST: watched(ELEVENTH, _ELEVENTH),
}
"""What only looks like a leak, by name."""
