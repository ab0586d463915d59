"""Full collections are counted, and allocations are compared with the last question.

Tests ``process/allocations.py`` and ``process/collector.py``.
"""

from __future__ import annotations

import gc
import re
import tracemalloc

from plimsoll_engine.process.allocations import TRACING_OFF_MESSAGE, AllocationReporter
from plimsoll_engine.process.collector import FullCollectionCounter


class Node:
    def __init__(self) -> None:
        self.me = self


def test_a_cycle_is_found_and_counted_and_the_callback_goes() -> None:
    gc.collect()
    callbacks = len(gc.callbacks)
    counts = FullCollectionCounter()
    counts.start()
    counts.start()
    gc.collect()
    assert (counts.runs, counts.collected) == (1, 0)
    Node()
    gc.collect(0)
    Node()
    gc.collect()
    assert counts.runs == 2, "a young collection is no full one"
    assert counts.collected >= 1
    counts.stop()
    counts.stop()
    gc.collect()
    assert counts.runs == 2
    assert len(gc.callbacks) == callbacks


def test_growth_since_the_last_question_is_named() -> None:
    allocations = AllocationReporter()
    assert allocations.report() == TRACING_OFF_MESSAGE
    tracemalloc.start()
    try:
        assert "request another one" in allocations.report()
        kept = [bytearray(1000) for _ in range(500)]
        text = allocations.report()
        grown = text.partition("-- growth since the previous request")[2]
        assert "test_collections.py" in grown
        assert re.search(r"test_collections.py:\d+: size=\d+ KiB \(\+[45]\d\d KiB\)", grown), grown
        del kept
    finally:
        tracemalloc.stop()
