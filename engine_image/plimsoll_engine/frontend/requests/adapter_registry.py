"""Registry of the LoRA adapters that every worker must load.

An unloaded adapter stays registered, but hidden, until the last request that uses it is released.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.lora_modules import LoraModule


class AdapterRefusedError(Exception):
    """The adapter cannot be loaded. ``param`` names the invalid field of the request."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(slots=True, eq=False)
class RegisteredAdapter:
    """LoRA adapter that requests can name.

    Attributes:
        number: Number of this load of the adapter.
        is_visible: Whether new requests can use the adapter.
        users: Number of admitted requests that use the adapter.
        required: Whether the engine must load the adapter at startup and has not done so yet.

    """

    name: str
    path: Path
    number: int
    is_visible: bool = True
    users: int = 0
    required: bool = False
    # Name of the adapter's base model, if it differs from the served model's name.
    parent: str | None = None

    def make_load_message(self) -> worker_ipc.LoadAdapter:
        """Return the message that tells a worker to load the adapter."""
        return worker_ipc.LoadAdapter(
            f"adapter-{self.number}", self.name, self.number, str(self.path)
        )


class AdapterRegistry:
    """Registry of up to ``max_adapters`` adapters, at first those in ``modules``."""

    def __init__(self, max_adapters: int, modules: Mapping[str, LoraModule]) -> None:
        self._max_adapters = max_adapters
        self._last = 0
        self._adapters: dict[int, RegisteredAdapter] = {}
        for name, module in modules.items():
            adapter = self.create(name, Path(module.path))
            adapter.required, adapter.parent = True, module.base_model_name
            self.add(adapter)

    def create(self, name: str, path: Path) -> RegisteredAdapter:
        """Return a new adapter without registering it. Raises AdapterRefusedError."""
        if self.find(name) is not None:
            raise AdapterRefusedError(
                f"the adapter {name!r} is already loaded: unload it first", "lora_name"
            )
        if len(self._adapters) >= self._max_adapters:
            raise AdapterRefusedError(
                f"{len(self._adapters)} adapters are loaded or still used by requests, which is "
                f"the limit of --max-loras {self._max_adapters}: unload one first",
                "lora_name",
            )
        self._last += 1
        return RegisteredAdapter(name, path, self._last)

    def add(self, adapter: RegisteredAdapter) -> None:
        """Register an adapter that the worker has loaded."""
        self._adapters[adapter.number] = adapter

    def find(self, name: str) -> RegisteredAdapter | None:
        """Return the visible adapter ``name``; None if there is none."""
        return next((adapter for adapter in self.list_visible() if adapter.name == name), None)

    def list_visible(self) -> list[RegisteredAdapter]:
        """Return the adapters that new requests can name, oldest first."""
        return [adapter for adapter in self._adapters.values() if adapter.is_visible]

    def list_for_worker(self) -> list[RegisteredAdapter]:
        """Return the adapters that a new worker must load, oldest first."""
        return list(self._adapters.values())

    def add_user(self, adapter: RegisteredAdapter | None) -> None:
        """Count an admitted request as a user of ``adapter``, if it uses one."""
        if adapter is not None:
            adapter.users += 1

    def remove_user(self, adapter: RegisteredAdapter | None) -> worker_ipc.UnloadAdapter | None:
        """Remove one user of ``adapter``, if it is not None.

        Return the message that unloads the adapter if it is hidden and has no user; else None.
        """
        if adapter is None:
            return None
        adapter.users -= 1
        return self._unregister_unused(adapter)

    def hide(self, adapter: RegisteredAdapter) -> worker_ipc.UnloadAdapter | None:
        """Hide ``adapter`` from new requests.

        Return the message that unloads the adapter if it has no user; else None.
        """
        adapter.is_visible = False
        return self._unregister_unused(adapter)

    def _unregister_unused(self, adapter: RegisteredAdapter) -> worker_ipc.UnloadAdapter | None:
        if adapter.is_visible or adapter.users or self._adapters.pop(adapter.number, None) is None:
            return None
        return worker_ipc.UnloadAdapter(adapter.number)

    def handle_load_result(self, result: worker_ipc.AdapterLoadResult) -> RegisteredAdapter | None:
        """Handle a worker's reply. Unregister and return the adapter if it failed to load."""
        adapter = self._adapters.get(result.number)
        if adapter is None:
            return None
        if result.error is None:
            adapter.required = False
            return None
        del self._adapters[adapter.number]
        adapter.is_visible = False
        return adapter

    def find_problems(self, used_adapters: Iterable[RegisteredAdapter]) -> list[str]:
        """Return a message for each adapter that has a wrong user count or should be unloaded.

        ``used_adapters`` has the adapter of each running request that uses one, with repetitions.
        """
        counted: dict[RegisteredAdapter, int] = {}
        for adapter in used_adapters:
            counted[adapter] = counted.get(adapter, 0) + 1
        return [
            f"adapter {a.name} has {a.users} registered users, but {counted.get(a, 0)} requests "
            "use it"
            for a in self._adapters.values()
            if a.users != counted.get(a, 0) or not (a.is_visible or a.users)
        ]
