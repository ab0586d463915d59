"""The kernels run on the GPU where there is one, else in Triton's interpreter on the CPU.

Triton reads TRITON_INTERPRET when it is imported, and engines that other tests start would inherit
it. So each of these files is one test for the run, which has a process of its own do it. To run one
of its tests, set TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll_engine.frontend.workers.zygote_client import SINGLE_THREAD_ENVIRONMENT
from tests.triton_language import make_interpreter_cheap

HAS_GPU = Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists()

INTERPRETED_ELSEWHERE = not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1"
COMPILED = "test_matrix_instructions.py"
"""Needs Triton's compiler, not its interpreter."""
PASSED, NOTHING_SELECTED = 0, 5


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    """Do not import here what the interpreter runs elsewhere."""
    if not INTERPRETED_ELSEWHERE or module_path.name == COMPILED:
        return None
    return Interpreted.from_parent(parent, path=module_path)


class Interpreted(pytest.File):
    """A file of tests for Triton's interpreter."""

    def collect(self) -> Iterator[pytest.Item]:
        yield Interpreter.from_parent(self, name="interpreted")


class Interpreter(pytest.Item):
    """All tests of the file, in a process whose Triton interprets."""

    def runtest(self) -> None:
        selected = [f"-m={self.config.option.markexpr}"] if self.config.option.markexpr else []
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selected, self.path],
            cwd=self.config.rootpath,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
            | {"TRITON_INTERPRET": "1"}
            | SINGLE_THREAD_ENVIRONMENT,
            capture_output=True,
            text=True,
        )
        if done.returncode not in (PASSED, NOTHING_SELECTED):
            raise AssertionError(done.stdout[-8000:] + done.stderr[-2000:])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


if os.environ.get("TRITON_INTERPRET") == "1":
    make_interpreter_cheap()


@pytest.fixture
def rounds_as_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter (3.6) loses the carry of a mantissa that is rounded up to the next power
    of two: 7.8 becomes 4. torch's conversion takes its place, for e4m3 alone."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converts(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if target.name != "fp8e4nv" or source.name != "fp32":
            return convert(data, source, target, mode)
        narrow = torch.from_numpy(data.copy()).to(torch.float8_e4m3fn)
        return narrow.view(torch.uint8).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", converts)
