"""A block of the event loop is seen, also by its share of CPU time.

Tests ``frontend/observability/loop_blocks.py``.
"""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry

from plimsoll_engine.frontend.observability.loop_blocks import TIMER_INTERVAL_S, LoopBlocks


def test_sleeping_and_computing_blocks_are_distinguished() -> None:
    async def scenario() -> tuple[float, float, float]:
        registry = CollectorRegistry()
        blocks = LoopBlocks("tiny", registry)
        blocks.start()
        await asyncio.sleep(3 * TIMER_INTERVAL_S)
        time.sleep(0.3)  # noqa: ASYNC251 - the block that is to be seen
        await asyncio.sleep(3 * TIMER_INTERVAL_S)
        wall, cpu = blocks.get_longest_block_s()
        assert wall >= 0.3 - TIMER_INTERVAL_S - 0.002
        assert cpu < 0.2
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass
        await asyncio.sleep(3 * TIMER_INTERVAL_S)
        blocks.stop()
        counted = registry.get_sample_value(
            "plimsoll_engine_event_loop_block_seconds_count", {"model_name": "tiny"}
        )
        told = registry.get_sample_value(
            "plimsoll_engine_event_loop_block_max_seconds", {"model_name": "tiny", "clock": "cpu"}
        )
        assert told is not None
        return blocks.get_longest_block_s()[1], told, counted or 0

    cpu, told, counted = asyncio.run(scenario())
    assert cpu == told >= 0.3 - TIMER_INTERVAL_S - 0.02
    assert counted >= 4
