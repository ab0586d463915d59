"""Load and unload LoRA adapters, within the limit of ``--max-loras``.

An unloaded adapter stays in memory until the last request that uses it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from weakref import WeakSet

import numpy as np
import torch

from plimsoll_engine.core.execute.inputs import copy_array_to_device
from plimsoll_engine.core.schedule.scheduler import Chunk
from plimsoll_engine.errors import LoadError
from plimsoll_engine.messages.rank_ipc import Array
from plimsoll_engine.models import lora
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.models.lora import Adapter, StepAdapters


class LoadedAdapters:
    """Adapters by number: at most ``max_adapters``, each with a rank of at most ``max_rank``."""

    def __init__(self, model: Decoder, max_adapters: int, max_rank: int) -> None:
        self._targets = lora.find_targets(model.parts)
        self._dtype, self._device = model.dtype, model.device
        self._max_adapters, self._max_rank = max_adapters, max_rank
        self._loaded: dict[int, Adapter] = {}
        # Loaded adapters, and unloaded ones that requests still use.
        self.living: WeakSet[Adapter] = WeakSet()
        self.bytes_bound = max_adapters * sum(
            target.compute_nbytes(max_rank, self._dtype) for target in self._targets.values()
        )

    @property
    def bytes(self) -> int:
        """Device memory of all adapters in :attr:`living`, in bytes."""
        return sum(adapter.nbytes for adapter in self.living)

    def load(self, name: str, adapter_number: int, folder: Path) -> None:
        """Load the adapter in ``folder`` under ``adapter_number``.

        Raises LoadError if too many adapters are in memory, LoadError or OSError if a file is
        invalid, and torch's OutOfMemoryError.
        """
        if len(self.living) >= self._max_adapters:
            raise LoadError(
                f"cannot load adapter {name}: {len(self.living)} adapters are loaded or still in"
                " use, as many as --max-loras allows; unload one first"
            )
        read = lora.read_adapter(folder, self._targets, self._max_rank, self._dtype, self._device)
        self._loaded[adapter_number] = adapter = Adapter(name, adapter_number, *read)
        self.living.add(adapter)

    def get(self, adapter_number: int) -> Adapter | None:
        """Return the adapter with this ``adapter_number``; None if it is not loaded."""
        return self._loaded.get(adapter_number)

    def unload(self, adapter_number: int) -> None:
        """Unload an adapter, which stays in memory until no request uses it."""
        self._loaded.pop(adapter_number, None)

    def find_problems(self, used: Sequence[Adapter]) -> list[str]:
        """Return an audit message if there are adapters that are neither loaded nor in ``used``."""
        held = {*self._loaded.values(), *used}
        lost = sorted(adapter.name for adapter in self.living if adapter not in held)
        return (
            [f"{len(lost)} adapters are in memory, but not loaded or used: {', '.join(lost)}"]
            if lost
            else []
        )

    def close(self) -> None:
        """Unload all adapters. Idempotent."""
        self._loaded.clear()


def collect_step_adapters(
    chunks: Sequence[Chunk], device: torch.device, selected_rows: Array | None = None
) -> StepAdapters | None:
    """Return the adapters of ``chunks`` with their rows; None if no chunk has an adapter.

    ``chunks`` must be in the order of their rows. If ``selected_rows`` (int32) is given, index i
    means row ``selected_rows[i]``, and other rows do not count.
    """
    rows: dict[Adapter, list[Array]] = {}
    row = 0
    for chunk in chunks:
        if (adapter := chunk.request.adapter) is not None:
            rows.setdefault(adapter, []).append(np.arange(row, row + chunk.rows, dtype=np.int32))
        row += chunk.rows
    found = []
    for adapter, parts in rows.items():
        own = np.concatenate(parts)
        if selected_rows is not None:
            own = np.flatnonzero(np.isin(selected_rows, own)).astype(np.int32)
        if len(own):
            found.append((adapter, copy_array_to_device(own, device)))
    return StepAdapters(found) if found else None
