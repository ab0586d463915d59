"""Registry of the LoRA adapters that every worker must load. Pure.

Unloading hides an adapter at once. It stays registered until the last request that uses it is
released, so that this request can be carried over to another worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.lora_modules import LoraModule


class AdapterRefused(Exception):
    """The adapter cannot be loaded; ``param`` names the request field that is wrong."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(slots=True, eq=False)
class RegisteredAdapter:
    """A LoRA adapter that requests can name.

    ``number`` identifies this loading of it. ``users`` counts the admitted requests that use it.
    ``required`` means that the engine was started with it and has not loaded it yet.
    """

    name: str
    path: Path
    number: int
    listed: bool = True
    users: int = 0
    required: bool = False
    parent: str | None = None
    """Name of its base model, if that is not the served model."""

    def loading(self) -> worker_ipc.LoadAdapter:
        """Return the message that lets a worker load it."""
        return worker_ipc.LoadAdapter(
            f"adapter-{self.number}", self.name, self.number, str(self.path)
        )


class AdapterRegistry:
    """Registry of at max_adapters ``max_adapters`` adapters, at first those of ``modules``.

    ``max_adapters`` is 0 if the engine takes none.
    """

    def __init__(self, max_adapters: int, modules: Mapping[str, LoraModule]) -> None:
        self._max_adapters = max_adapters
        self._last = 0
        self._known: dict[int, RegisteredAdapter] = {}
        for name, module in modules.items():
            adapter = self.create(name, Path(module.path))
            adapter.required, adapter.parent = True, module.base_model_name
            self.add(adapter)

    def create(self, name: str, path: Path) -> RegisteredAdapter:
        """Return a new adapter, not registered yet. Raises :class:`AdapterRefused`."""
        if self.find(name) is not None:
            raise AdapterRefused(
                f"the adapter {name!r} is loaded already: unload it first", "lora_name"
            )
        if len(self._known) >= self._max_adapters:
            raise AdapterRefused(
                f"{len(self._known)} adapters are loaded or still used by requests, as many as"
                f" --max-loras {self._max_adapters} allows: unload one first",
                "lora_name",
            )
        self._last += 1
        return RegisteredAdapter(name, path, self._last)

    def add(self, adapter: RegisteredAdapter) -> None:
        """Register an adapter that the worker has loaded."""
        self._known[adapter.number] = adapter

    def find(self, name: str) -> RegisteredAdapter | None:
        """Return the adapter that new requests get by ``name``; None if there is none."""
        return next((adapter for adapter in self.listed() if adapter.name == name), None)

    def listed(self) -> list[RegisteredAdapter]:
        """Return the adapters that new requests can name, oldest first."""
        return [adapter for adapter in self._known.values() if adapter.listed]

    def list_for_worker(self) -> list[RegisteredAdapter]:
        """Return the adapters that a new worker must load, oldest first."""
        return list(self._known.values())

    def use(self, adapter: RegisteredAdapter | None) -> None:
        """Count an admitted request that uses ``adapter``."""
        if adapter is not None:
            adapter.users += 1

    def release(self, adapter: RegisteredAdapter | None) -> worker_ipc.UnloadAdapter | None:
        """Count off a released request.

        Return the message to unload the adapter, if that is due.
        """
        if adapter is None:
            return None
        adapter.users -= 1
        return self._forget(adapter)

    def unlist(self, adapter: RegisteredAdapter) -> worker_ipc.UnloadAdapter | None:
        """Hide ``adapter`` from new requests. Return the message to unload it, if that is due."""
        adapter.listed = False
        return self._forget(adapter)

    def _forget(self, adapter: RegisteredAdapter) -> worker_ipc.UnloadAdapter | None:
        if adapter.listed or adapter.users or self._known.pop(adapter.number, None) is None:
            return None
        return worker_ipc.UnloadAdapter(adapter.number)

    def loaded(self, answer: worker_ipc.AdapterLoaded) -> RegisteredAdapter | None:
        """Record a worker's answer about a registered adapter.

        Return the adapter if it could not be loaded. It is unregistered then, and the worker fails
        the requests that use it.
        """
        adapter = self._known.get(answer.number)
        if adapter is None:
            return None
        if answer.error is None:
            adapter.required = False
            return None
        del self._known[adapter.number]
        adapter.listed = False
        return adapter

    def problems(self, used: Iterable[RegisteredAdapter]) -> list[str]:
        """Return the adapters whose user count is wrong, or that nothing uses any more.

        ``used`` has the adapter of each running request.
        """
        counted: dict[RegisteredAdapter, int] = {}
        for adapter in used:
            counted[adapter] = counted.get(adapter, 0) + 1
        return [
            f"adapter {a.name} counts {a.users} requests, {counted.get(a, 0)} use it"
            for a in self._known.values()
            if a.users != counted.get(a, 0) or not (a.listed or a.users)
        ]
