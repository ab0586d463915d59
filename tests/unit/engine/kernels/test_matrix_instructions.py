"""Matrix instructions of the compiled kernels run one behind the other, none waits for the last.

NVIDIA's assembler serializes all of a kernel where it finds a path on which something else sets
their sums, and says so in a note. Compiled without a device, for Hopper.

Tests ``kernels/prefill_attention.py``, ``kernels/experts.py`` and ``kernels/gated_product.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_no_matrix_instruction_waits_for_the_one_before() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ptxas_notes"],
        env=env, capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert len(found) == 6
    assert {name: notes for name, notes in found.items() if notes} == {}
