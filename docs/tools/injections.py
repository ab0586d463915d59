"""The page of faults that can be injected, from their classes."""

from __future__ import annotations

import inspect

from plimsoll_engine.fault_kinds import KINDS, Fault

HEAD = """# Faults that can be injected

Written by `python -m docs.generate`; do not edit.

`PLIMSOLL_INJECT` names faults as `name:key=value,key=value;name2`, and the engine obeys it only
when it was started with `--allow-inject`. Each is a defect that a serving engine really had. The
metric `plimsoll_engine_injections` and the admin status name those that are on. A worker's fault
is in the first worker of an engine (`epochs=first`) or in every one (`epochs=all`).

| Fault | Process | Holds the memory | Segment that grows | Lightest cure | Keys and defaults |
| --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    rows = [_row(kind) for kind in KINDS]
    parts = [f"- **{_name(kind)}**: {_text(kind)}" for kind in KINDS]
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(parts) + "\n"


def _row(kind: type[Fault]) -> str:
    fault = kind()
    keys = ", ".join(
        f"`{key}={getattr(fault, key)}`" for key in kind.__struct_fields__ if key != "epochs"
    )
    cells = [f"`{_name(kind)}`", kind.process, kind.owner, kind.segment, kind.cure, keys or "none"]
    return f"| {' | '.join(cells)} |"


def _name(kind: type[Fault]) -> str:
    return str(kind.__struct_config__.tag)


def _text(kind: type[Fault]) -> str:
    return " ".join((inspect.getdoc(kind) or "").replace("``", "`").split())
