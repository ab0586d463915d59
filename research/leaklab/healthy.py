"""What only looks like a leak: the families of false positives, each split's by their names."""

from __future__ import annotations

from leaklab import (
    healthy_known,
    seen_accelerator,
    seen_askers,
    seen_clients,
    seen_collectors,
    seen_demands,
    seen_device,
    seen_files,
    seen_heaps,
    seen_host,
    seen_kernels,
    seen_libraries,
    seen_memory,
    seen_moments,
    seen_operations,
    seen_peers,
    seen_pods,
    seen_pools,
    seen_processes,
    seen_queues,
    seen_runtimes,
    seen_service,
    seen_silence,
    seen_slots,
    seen_steps,
    seen_stores,
    seen_surroundings,
    seen_tables,
    seen_tenants,
    seen_tensors,
    seen_tools,
    seen_waits,
    seen_work,
    seen_workspaces,
    unseen_cards,
    unseen_neighbours,
    unseen_retention,
    unseen_runtimes,
    unseen_turns,
    unseen_waits,
    unseen_work,
)
from leaklab.cases import Build, Split, watched
from leaklab.editions import ELEVENTH, NINTH, TENTH

_NINTH = (
    seen_kernels.FAMILIES
    | seen_queues.FAMILIES
    | seen_files.FAMILIES
    | seen_tenants.FAMILIES
    | seen_demands.FAMILIES
    | seen_moments.FAMILIES
    | seen_steps.FAMILIES
)
_TENTH = (
    seen_collectors.FAMILIES
    | seen_tables.FAMILIES
    | seen_askers.FAMILIES
    | seen_accelerator.FAMILIES
    | seen_pods.FAMILIES
    | seen_waits.FAMILIES
)
_ELEVENTH = (
    unseen_runtimes.FAMILIES
    | unseen_retention.FAMILIES
    | unseen_work.FAMILIES
    | unseen_neighbours.FAMILIES
    | unseen_cards.FAMILIES
    | unseen_waits.FAMILIES
    | unseen_turns.FAMILIES
)
FAMILIES: dict[Split, dict[str, Build]] = {
    Split.DEVELOPMENT: healthy_known.DEVELOPMENT,
    Split.SEEN: healthy_known.SEEN
    | seen_memory.FAMILIES
    | seen_work.FAMILIES
    | seen_silence.FAMILIES
    | seen_host.FAMILIES
    | seen_device.FAMILIES
    | seen_service.FAMILIES
    | seen_processes.FAMILIES
    | seen_workspaces.FAMILIES
    | seen_operations.FAMILIES
    | seen_heaps.FAMILIES
    | seen_tensors.FAMILIES
    | seen_surroundings.FAMILIES
    | seen_libraries.FAMILIES
    | seen_pools.FAMILIES
    | seen_clients.FAMILIES
    | seen_peers.FAMILIES
    | seen_runtimes.FAMILIES
    | seen_stores.FAMILIES
    | seen_slots.FAMILIES
    | seen_tools.FAMILIES
    | watched(NINTH, _NINTH)
    | watched(TENTH, _TENTH),
    Split.TEST: watched(ELEVENTH, _ELEVENTH),
}
