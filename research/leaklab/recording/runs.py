"""The recordings that the rig can make: engine, load, and what is injected.

``name`` is the recording's and says nothing about it. ``mechanism`` is how memory is held, or what
the load of a healthy run does; ``split.py`` divides the runs by it.
"""

from __future__ import annotations

from leaklab.recording import (
    plimsoll_runs,
    sglang_runs,
    vllm_drawn_runs,
    vllm_lot_runs,
    vllm_runs,
)

RUNS = (
    *vllm_runs.RUNS,
    *vllm_lot_runs.RUNS,
    *vllm_drawn_runs.RUNS,
    *sglang_runs.RUNS,
    *plimsoll_runs.RUNS,
)
