"""Parse ``PLIMSOLL_INJECT``, which enables faults for a test or a demonstration.

    name:key=value,key=value;name2

:mod:`plimsoll_faults.kinds` lists the faults and their keys. Sizes are Kubernetes quantities
(``4Mi``). By default (``epochs=first``), only an engine's first worker has a fault, so a restart
cures it. With ``epochs=all``, every worker has the fault. A fault of the frontend lasts until its
process ends.

This module does not import torch, because the frontend also parses the variable.
"""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

from plimsoll_api.units import parse_bytes
from plimsoll_engine.errors import SettingsError
from plimsoll_faults.kinds import KINDS, Fault, MmapGrowth


class InjectError(SettingsError):
    """The value of ``PLIMSOLL_INJECT`` is invalid. The message lists the valid values."""


FAULT_BY_NAME: dict[str, type[Fault]] = {str(kind.__struct_config__.tag): kind for kind in KINDS}


def parse_faults(text: str) -> list[Fault]:
    """Return the faults in ``text``, which may be empty. Raises :class:`InjectError`."""
    faults = [_parse_fault(part.strip()) for part in text.split(";") if part.strip()]
    names = [get_fault_name(fault) for fault in faults]
    for name in names:
        if names.count(name) > 1:
            raise InjectError(f"PLIMSOLL_INJECT sets the fault {name} twice: remove one of them")
    return faults


def check(text: str) -> None:
    """Raise :class:`InjectError` if ``text`` is not a valid list of faults."""
    parse_faults(text)


def get_fault_name(fault: Fault) -> str:
    """Return the name of ``fault`` in ``PLIMSOLL_INJECT``."""
    return str(fault.__struct_config__.tag)


def _parse_fault(text: str) -> Fault:
    name, _, rest = text.partition(":")
    name = name.strip()
    if name not in FAULT_BY_NAME:
        raise InjectError(
            f"PLIMSOLL_INJECT has the unknown fault {name!r}: use one of {', '.join(FAULT_BY_NAME)}"
        )
    kind = FAULT_BY_NAME[name]
    values: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if key not in kind.__struct_fields__:
            keys = ", ".join(kind.__struct_fields__)
            raise InjectError(
                f"the fault {name} in PLIMSOLL_INJECT has no key {key!r}: use one of {keys}"
            )
        if not equals or not value:
            raise InjectError(
                f"{pair!r} of the fault {name} in PLIMSOLL_INJECT must have the form key=value"
            )
        if key in values:
            raise InjectError(
                f"the fault {name} in PLIMSOLL_INJECT sets {key} twice: remove one of them"
            )
        values[key] = _parse_value(name, kind, key, value)
    fault = kind(**values)
    if isinstance(fault, MmapGrowth) and not (fault.bytes_per_request or fault.bytes_per_s):
        raise InjectError(
            f"the fault {name} in PLIMSOLL_INJECT needs bytes_per_request or bytes_per_s"
        )
    return fault


def _parse_value(fault_name: str, fault_type: type[Fault], key: str, text: str) -> int | str:
    if choices := get_args(get_type_hints(fault_type)[key]):
        if text not in choices:
            expected = " or ".join(choices)
            raise InjectError(
                f"{key} of the fault {fault_name} in PLIMSOLL_INJECT must be {expected}, got {text}"
            )
        return text
    try:
        number = parse_bytes(text) if "bytes" in key else int(text)
    except ValueError:
        raise InjectError(
            f"{key} of the fault {fault_name} in PLIMSOLL_INJECT must be a whole "
            f"number{' or a size such as 4Mi' if 'bytes' in key else ''}, got {text}"
        ) from None
    minimum = 0 if key == "freeze_every" or fault_type is MmapGrowth else 1
    if number < minimum:
        raise InjectError(
            f"{key} of the fault {fault_name} in PLIMSOLL_INJECT must be at least {minimum}, "
            f"got {text}"
        )
    return number
