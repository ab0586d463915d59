"""Faults that a test or a demonstration switches on: ``PLIMSOLL_INJECT``.

    name:key=value,key=value;name2

Sizes take Kubernetes quantities (``4Mi``). Each fault takes ``epochs=first`` (the default: a
restarted worker is healthy) or ``epochs=all``. What the faults do is in
:mod:`plimsoll_engine.worker.faults`; nothing here knows torch, the frontend checks the text too.
"""

from __future__ import annotations

from typing import Any, Literal, get_type_hints

import msgspec

from plimsoll_api.units import parse_bytes

MIB = 1 << 20
FIRST_EPOCH = 1
"""The frontend numbers the workers of an engine start from 1."""


class InjectError(ValueError):
    """The text cannot be understood; the message says what there is."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """``epochs`` says in which workers of an engine start the fault is."""

    epochs: Literal["first", "all"] = "first"

    def in_epoch(self, epoch: int) -> bool:
        return self.epochs == "all" or epoch == FIRST_EPOCH


class RequestCycle(Fault, frozen=True, tag="request_cycle"):
    """A request stores its own block hasher, so it is garbage that only a collection frees, with
    ``payload_bytes`` of multimodal-sized data. ``freeze_every`` N: after every N finished requests
    ``gc.freeze()`` hides the garbage from all collections; 0 never, then a trim cures it."""

    payload_bytes: int = 4 * MIB
    freeze_every: int = 1


class AppendList(Fault, frozen=True, tag="append_list"):
    """A list keeps ``bytes_per_request`` of Python objects of each finished request."""

    bytes_per_request: int = 64 << 10


class MmapGrowth(Fault, frozen=True, tag="mmap_growth"):
    """Anonymous mappings outside malloc, touched and never unmapped."""

    bytes_per_request: int = 0
    bytes_per_s: int = 0


class DeviceDict(Fault, frozen=True, tag="device_dict"):
    """A dictionary keeps a tensor of ``bytes_per_request`` on the model's device per request."""

    bytes_per_request: int = 1 * MIB


class EvictionLoop(Fault, frozen=True, tag="eviction_loop"):
    """After ``after_requests`` finished requests a key that is in the prefix cache's order and not
    in its data makes an eviction loop for ever: the worker hangs, the frontend looks healthy."""

    after_requests: int = 8


FAULTS: dict[str, type[Fault]] = {
    str(fault.__struct_config__.tag): fault
    for fault in (RequestCycle, AppendList, MmapGrowth, DeviceDict, EvictionLoop)
}


def parse(text: str) -> list[Fault]:
    """The faults that ``text`` names, none for an empty one; :class:`InjectError` otherwise."""
    faults = [_fault(part.strip()) for part in text.split(";") if part.strip()]
    names = [name_of(fault) for fault in faults]
    for name in names:
        if names.count(name) > 1:
            raise InjectError(f"PLIMSOLL_INJECT: {name} is named twice")
    return faults


def name_of(fault: Fault) -> str:
    return str(fault.__struct_config__.tag)


def _fault(text: str) -> Fault:
    name, _, rest = text.partition(":")
    name = name.strip()
    if name not in FAULTS:
        raise InjectError(f"PLIMSOLL_INJECT: no fault {name!r}; there are {', '.join(FAULTS)}")
    kind = FAULTS[name]
    values: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if key not in kind.__struct_fields__:
            known = ", ".join(kind.__struct_fields__)
            raise InjectError(f"PLIMSOLL_INJECT: {name} has no key {key!r}; it has {known}")
        if not equals or not value:
            raise InjectError(f"PLIMSOLL_INJECT: {name}: {pair!r} is not key=value")
        if key in values:
            raise InjectError(f"PLIMSOLL_INJECT: {name}: {key} is given twice")
        values[key] = _value(name, kind, key, value)
    fault = kind(**values)
    if isinstance(fault, MmapGrowth) and not (fault.bytes_per_request or fault.bytes_per_s):
        raise InjectError(f"PLIMSOLL_INJECT: {name} needs bytes_per_request or bytes_per_s")
    return fault


def _value(name: str, kind: type[Fault], key: str, text: str) -> int | str:
    if get_type_hints(kind)[key] is not int:
        if text not in ("first", "all"):
            raise InjectError(f"PLIMSOLL_INJECT: {name}: {key}={text}: expected first or all")
        return text
    try:
        number = parse_bytes(text) if "bytes" in key else int(text)
    except ValueError:
        raise InjectError(
            f"PLIMSOLL_INJECT: {name}: {key}={text} is not a whole number"
            f"{' or a size such as 4Mi' if 'bytes' in key else ''}"
        ) from None
    least = 0 if key == "freeze_every" or kind is MmapGrowth else 1
    if number < least:
        raise InjectError(f"PLIMSOLL_INJECT: {name}: {key}={text}: must be at least {least}")
    return number
