"""What only looks like a leak: the families of false positives, each split's by their names."""

from __future__ import annotations

import healthy_known
import seen_device
import seen_host
import seen_memory
import seen_operations
import seen_processes
import seen_service
import seen_silence
import seen_work
import seen_workspaces
import unseen_device
import unseen_host
import unseen_service
from cases import Build, Split

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
    | seen_operations.FAMILIES,
    Split.TEST: unseen_host.FAMILIES | unseen_device.FAMILIES | unseen_service.FAMILIES,
}
