"""The kernels run on the GPU where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

HAS_GPU = Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists()

if not HAS_GPU:
    # Read when a kernel is defined, so before the first import of one.
    os.environ["TRITON_INTERPRET"] = "1"
