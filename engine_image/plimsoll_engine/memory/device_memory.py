"""Read the memory usage of the worker's device from the driver and from torch."""

from __future__ import annotations

import torch

from plimsoll_api.admin import DeviceMemory


def read_device_memory(device: torch.device) -> list[DeviceMemory]:
    """Return the memory usage of ``device``, or an empty list for a CPU."""
    if device.type != "cuda":
        return []
    index = device.index or 0
    free, total = torch.cuda.mem_get_info(device)
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return [
        DeviceMemory(
            index=index,
            uuid=None if uuid is None else f"GPU-{uuid}",
            used=total - free,
            total=total,
            torch_allocated=torch.cuda.memory_allocated(device),
            torch_reserved=torch.cuda.memory_reserved(device),
        )
    ]
