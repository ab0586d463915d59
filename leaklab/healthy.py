"""What only looks like a leak: the families of false positives, each split's by their names."""

from __future__ import annotations

from leaklab import (
    healthy_known,
    seen_clients,
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
    seen_tenants,
    seen_tensors,
    seen_tools,
    seen_work,
    seen_workspaces,
    unseen_accelerator,
    unseen_askers,
    unseen_heaps,
    unseen_pods,
    unseen_steps,
    unseen_tables,
)
from leaklab.cases import Build, Split, watched
from leaklab.editions import NINTH, TENTH

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
    unseen_heaps.FAMILIES
    | unseen_tables.FAMILIES
    | unseen_askers.FAMILIES
    | unseen_accelerator.FAMILIES
    | unseen_pods.FAMILIES
    | unseen_steps.FAMILIES
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
    | watched(NINTH, _NINTH),
    Split.TEST: watched(TENTH, _TENTH),
}
