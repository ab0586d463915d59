"""The page of faults that can be injected, from their classes."""

from __future__ import annotations

import inspect

from plimsoll_faults.kinds import KINDS, Fault

HEAD = """# Faults that can be injected

Written by `python -m docs.generate`; do not edit.

Name faults in `PLIMSOLL_INJECT`, as `name:key=value,key=value;name2`. The engine injects them only
if you start it with `--allow-inject` and the package `plimsoll-faults` is installed: product images
do not have it, images built from the target `engine-faults` do. Each fault is a defect that a
serving engine really had, except two that are healthy: `cache_fills` shows that a supervisor
leaves it alone, `slow_steps` takes time and no memory. The metric
`plimsoll_engine_injections` and the admin status name the active faults. A worker's fault affects
the first worker of an engine (`epochs=first`) or every worker (`epochs=all`). An engine that cannot
have a fault (no GPU, no swap, no adapters) exits at its start and says why.

This engine has neither remote prefill nor sessions. `tests/conformance/test_held_blocks.py` tests
the blocks that they can leak, with real vLLM.

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
