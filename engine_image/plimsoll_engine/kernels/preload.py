"""What Triton and torch work out once a process and need no device for, done before the fork.

A worker inherits it. On an H200 it is .3 s of a restart for Triton's hash over its own files, which
is part of every kernel's cache key, and .1 s for modules that torch imports with the CUDA context.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from subprocess import SubprocessError

DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""The device files of NVIDIA's driver on Linux and on WSL. Asked for instead of CUDA, which a
process that forks must not initialise."""
MODULES = ("plimsoll_engine.kernels.fused", "triton.experimental.gluon")

CACHE_MANAGER = "plimsoll_engine.kernels.disk_cache:DiskCache"
"""For TRITON_CACHE_MANAGER: Triton's cache, on a volume that may be full."""


def wanted(device: str) -> bool:
    """Whether workers with ``--device device`` may run the kernels here."""
    return device != "cpu" and any(Path(path).exists() for path in DRIVERS)


def preload() -> None:
    """Import and hash. What a version of Triton does otherwise is left to the worker."""
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()
    # Each asks another program: 20 ms of a restart.
    with contextlib.suppress(ImportError, AssertionError, OSError, SubprocessError):
        from triton.backends.nvidia.driver import library_dirs
        from triton.runtime.build import platform_key

        platform_key()
        library_dirs()
    with contextlib.suppress(ImportError):
        from triton.runtime.jit import JITFunction

        for module in [
            m for n, m in sys.modules.items() if n.startswith("plimsoll_engine.kernels")
        ]:
            for item in vars(module).values():
                if isinstance(item, JITFunction):
                    item.cache_key  # noqa: B018 - computed on first use and kept
