"""The LoRA adapters that requests can name, as every worker is to have them. Pure.

An adapter that is unloaded leaves the list at once; it is known until the last request that uses it
was released, so that such a request can be carried over to another worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.lora_modules import LoraModule


class AdapterRefused(Exception):
    """An adapter that cannot be loaded; ``param`` names the field that is wrong."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(slots=True, eq=False)
class RegisteredAdapter:
    """``number`` is that of its loading.

    ``users`` are the requests admitted and not released. ``required``: the engine was started with
    it and has not had it yet.
    """

    name: str
    path: Path
    number: int
    listed: bool = True
    users: int = 0
    required: bool = False
    parent: str | None = None
    """The name of the model that it changes, where it is not the served one."""

    def loading(self) -> worker_ipc.LoadAdapter:
        """Return what has a worker load it."""
        return worker_ipc.LoadAdapter(
            f"adapter-{self.number}", self.name, self.number, str(self.path)
        )


class AdapterRegistry:
    """At most ``most`` of them, 0 where the engine takes none; ``modules`` are of the start."""

    def __init__(self, most: int, modules: Mapping[str, LoraModule]) -> None:
        self._most = most
        self._last = 0
        self._known: dict[int, RegisteredAdapter] = {}
        for name, module in modules.items():
            adapter = self.new(name, Path(module.path))
            adapter.required, adapter.parent = True, module.base_model_name
            self.add(adapter)

    def new(self, name: str, path: Path) -> RegisteredAdapter:
        """Return an adapter that is not known yet. Raises :class:`AdapterRefused`."""
        if self.find(name) is not None:
            raise AdapterRefused(
                f"the adapter {name!r} is loaded already: unload it first", "lora_name"
            )
        if len(self._known) >= self._most:
            raise AdapterRefused(
                f"{len(self._known)} adapters are loaded or still used by requests, as many as"
                f" --max-loras {self._most} allows: unload one first",
                "lora_name",
            )
        self._last += 1
        return RegisteredAdapter(name, path, self._last)

    def add(self, adapter: RegisteredAdapter) -> None:
        """Offer an adapter that the worker has loaded."""
        self._known[adapter.number] = adapter

    def find(self, name: str) -> RegisteredAdapter | None:
        """Return the adapter that requests mean by ``name``; None where there is none."""
        return next((adapter for adapter in self.listed() if adapter.name == name), None)

    def listed(self) -> list[RegisteredAdapter]:
        """Those that a new request can name, oldest first."""
        return [adapter for adapter in self._known.values() if adapter.listed]

    def known(self) -> list[RegisteredAdapter]:
        """Those that a new worker must have, oldest first."""
        return list(self._known.values())

    def use(self, adapter: RegisteredAdapter | None) -> None:
        """Count a request with it that was admitted."""
        if adapter is not None:
            adapter.users += 1

    def release(self, adapter: RegisteredAdapter | None) -> worker_ipc.UnloadAdapter | None:
        """Such a request was released; what the worker is to be told then."""
        if adapter is None:
            return None
        adapter.users -= 1
        return self._forget(adapter)

    def unlist(self, adapter: RegisteredAdapter) -> worker_ipc.UnloadAdapter | None:
        """No new request may name it; what the worker is to be told now."""
        adapter.listed = False
        return self._forget(adapter)

    def _forget(self, adapter: RegisteredAdapter) -> worker_ipc.UnloadAdapter | None:
        if adapter.listed or adapter.users or self._known.pop(adapter.number, None) is None:
            return None
        return worker_ipc.UnloadAdapter(adapter.number)

    def loaded(self, answer: worker_ipc.AdapterLoaded) -> RegisteredAdapter | None:
        """Take in what a worker said of a known one.

        The adapter where it could not be loaded: it is known no more, and requests that use it get
        an error of the worker.
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
        """Adapters whose users are not the requests that use them, or that are known for nobody."""
        counted: dict[RegisteredAdapter, int] = {}
        for adapter in used:
            counted[adapter] = counted.get(adapter, 0) + 1
        return [
            f"adapter {a.name} counts {a.users} requests, {counted.get(a, 0)} use it"
            for a in self._known.values()
            if a.users != counted.get(a, 0) or not (a.listed or a.users)
        ]
