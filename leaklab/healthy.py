"""What only looks like a leak: the families of false positives, each split's by their names."""

from __future__ import annotations

from leaklab import (
    healthy_known,
    seen_clients,
    seen_device,
    seen_heaps,
    seen_host,
    seen_libraries,
    seen_memory,
    seen_operations,
    seen_peers,
    seen_pools,
    seen_processes,
    seen_runtimes,
    seen_service,
    seen_silence,
    seen_slots,
    seen_stores,
    seen_surroundings,
    seen_tensors,
    seen_tools,
    seen_work,
    seen_workspaces,
    unseen_device,
    unseen_files,
    unseen_host,
    unseen_moments,
    unseen_service,
    unseen_steps,
    unseen_stores,
)
from leaklab.cases import Build, Split

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
    | seen_tools.FAMILIES,
    Split.TEST: unseen_host.FAMILIES
    | unseen_stores.FAMILIES
    | unseen_files.FAMILIES
    | unseen_device.FAMILIES
    | unseen_service.FAMILIES
    | unseen_moments.FAMILIES
    | unseen_steps.FAMILIES,
}
