"""Devices that are assigned to an engine, before and beside what the engine says of them.

Tests ``signals/sampler.py``.
"""

from __future__ import annotations

from plimsoll_api.admin import DeviceMemory
from plimsoll_sidecar.signals.device_memory import DeviceBytes
from plimsoll_sidecar.signals.sampler import Sampler
from tests.unit.signals.test_sampler_parts import Engine, status

A, B = (f"GPU-{digit * 8}-0000-0000-0000-000000000000" for digit in "ab")


class Driver:
    """Knows the memory of two devices by UUID."""

    error = None

    def read_memory(self, uuid: str) -> DeviceBytes | None:
        return {A: DeviceBytes(10, 100), B: DeviceBytes(20, 100)}.get(uuid)


def used(sampler: Sampler) -> list[int | None]:
    return [device.used for device in sampler.sample().device]


def test_a_claimed_device_is_read_by_its_uuid_although_the_engine_names_none() -> None:
    sampler = Sampler(Engine(status(), status()), nvml=Driver(), list_claimed_devices=lambda: (B,))
    assert used(sampler) == [20]
    assert sampler.device_source == "nvml"
    assert used(sampler) == [20]


def test_what_the_engine_names_replaces_the_claimed_devices() -> None:
    """It has opened one of the two, and numbers it differently."""
    named = status(devices=[DeviceMemory(0, B)])
    sampler = Sampler(
        Engine(status(), named, named), nvml=Driver(), list_claimed_devices=lambda: (A, B)
    )
    assert [used(sampler) for _ in range(3)] == [[10, 20], [20], [20]]


def test_a_text_that_is_no_uuid_is_no_device() -> None:
    sampler = Sampler(
        Engine(status()), nvml=Driver(), list_claimed_devices=lambda: ("0", f"{A}\n", "gpu-0")
    )
    assert used(sampler) == []
