"""PLIMSOLL_INJECT: what is understood, and what is refused with a list of what there is.

Tests ``plimsoll_faults/inject.py``.
"""

from __future__ import annotations

import pytest

from plimsoll_faults import inject
from plimsoll_faults.inject import InjectError
from plimsoll_faults.kinds import (
    AppendList,
    EvictionLoop,
    Fault,
    MmapGrowth,
    RequestCycle,
    SharedOrphan,
)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", []),
        (" ; ", []),
        ("request_cycle", [RequestCycle()]),
        (
            "request_cycle:payload_bytes=8Mi,freeze_every=0,epochs=all",
            [RequestCycle(payload_bytes=8 << 20, freeze_every=0, epochs="all")],
        ),
        (
            "append_list:bytes_per_request=1000; eviction_loop:after_requests=3",
            [AppendList(bytes_per_request=1000), EvictionLoop(after_requests=3)],
        ),
        ("mmap_growth:bytes_per_s=1Mi", [MmapGrowth(bytes_per_s=1 << 20)]),
        ("shared_orphan:family=sysv,epochs=all", [SharedOrphan(family="sysv", epochs="all")]),
    ],
)
def test_understood(text: str, faults: list[Fault]) -> None:
    assert inject.parse_faults(text) == faults


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "leak",
            "unknown fault 'leak': use one of request_cycle, stored_exception, abort_choices",
        ),
        (
            "append_list:size=3",
            "append_list in PLIMSOLL_INJECT has no key 'size': use one of bytes_per_request, "
            "epochs",
        ),
        ("append_list:bytes_per_request", "'bytes_per_request' of .* must have the form key=value"),
        (
            "append_list:bytes_per_request=lots",
            "must be a whole number or a size such as 4Mi, got lots",
        ),
        ("append_list:bytes_per_request=0", "must be at least 1"),
        ("eviction_loop:after_requests=1.5", "must be a whole number, got 1.5$"),
        ("shared_orphan:family=mmap", "must be posix or sysv, got mmap"),
        ("request_cycle:epochs=second", "must be first or all, got second"),
        ("request_cycle:freeze_every=1,freeze_every=2", "sets freeze_every twice"),
        ("append_list;append_list", "sets the fault append_list twice"),
        ("mmap_growth", "needs bytes_per_request or bytes_per_s"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(InjectError, match=message):
        inject.parse_faults(text)


def test_the_first_epoch_alone_unless_all() -> None:
    first, every = RequestCycle(), RequestCycle(epochs="all")
    assert [first.is_active_in(n) for n in (1, 2, 3)] == [True, False, False]
    assert [every.is_active_in(n) for n in (1, 2, 3)] == [True, True, True]
