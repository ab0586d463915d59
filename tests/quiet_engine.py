"""The part of an engine's adapter that says nothing: no process, nothing served, nothing ended."""

from __future__ import annotations

from plimsoll_api.admin import ProcessMemory


class QuietEngine:
    """What the sampler asks an engine beside its status."""

    has_status_port = False

    def is_serving(self) -> bool:
        return False

    def list_processes(self) -> list[ProcessMemory]:
        return []

    def has_ended(self) -> bool:
        return False
