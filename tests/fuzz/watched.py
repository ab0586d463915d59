"""One input to one parser, under the bounds that every parser keeps.

A parser may refuse its input with the errors that it declares. It fails where it raises anything
else, takes more than :data:`Bounds.cpu_s` of CPU each time or lets the process grow by more than
:data:`Bounds.growth_bytes`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Bounds:
    """Of one input of at most 1 MB. CPU seconds are of all threads."""

    cpu_s: float = 1.0
    growth_bytes: int = 256 << 20


class TooSlow(AssertionError):
    """The input took more CPU than its parser may take."""


class TooLargeError(AssertionError):
    """The input made the process grow by more than its parser may."""


@dataclass(frozen=True)
class Target:
    """A parser as the fuzzer sees it.

    ``run`` takes the input and returns where it was taken or properly refused. ``words`` (Latin-1)
    help the fuzzer to write the language. ``large`` makes inputs of up to 1 MB, which are not kept.
    """

    run: Callable[[bytes], None]
    words: tuple[str, ...] = ()
    large: Callable[[], Iterable[bytes]] = tuple
    bounds: Bounds = Bounds()


TRIES = 3
"""A slow parser is slow each time. One run of a fast one may share its core with another virtual
machine, or its process with the threads of other tests."""


def watch(target: Target, data: bytes) -> None:
    """Run ``target`` on ``data``. Raises what the parser must not do."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here: proc(5)
    before = _kib("VmRSS")
    for _ in range(TRIES):
        begin = time.process_time()
        target.run(data)
        took_s = time.process_time() - begin
        if took_s <= target.bounds.cpu_s:
            break
    else:
        raise TooSlow(f"{len(data)} bytes took {took_s:.2f} s of CPU, not {target.bounds.cpu_s:g}")
    grown = _kib("VmHWM") - before
    if grown << 10 > target.bounds.growth_bytes:
        raise TooLargeError(f"{len(data)} bytes took {grown >> 10} MiB of memory")


def _kib(field: str) -> int:
    """A line of ``/proc/self/status``."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split(maxsplit=1)[0])
