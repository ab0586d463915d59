"""Ranks that sum in Triton's interpreter: one process each, over buffers in one file each.

Nothing is imitated: the processes wait for one another as GPUs do.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from plimsoll_engine.kernels.collective_buffer import BufferLayout
from tests.triton_language import make_interpreter_cheap

TIMEOUT_S = 120


@dataclass
class Task:
    """What one rank does: its ``inputs`` x [rows, columns], one sum after the other."""

    rank: int
    layout: BufferLayout
    dtype: torch.dtype
    buffers: list[Path]
    inputs: list[torch.Tensor]
    residuals: list[torch.Tensor]
    weight: torch.Tensor
    eps: float
    exchanges: list[tuple[str, torch.Tensor]]
    """A collective and its tensor after each sum, and more of them after the last."""


def compute(task: Task) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """The norm and the residual after each sum, and what each collective returns.

    The residual of a shared sum is what :meth:`AllReduce.get_own_rows` says.
    """
    from plimsoll_engine.kernels.all_reduce import AllReduce
    from plimsoll_engine.kernels.collectives import Collectives

    nbytes = task.layout.nbytes
    buffers = [
        torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
        for path in task.buffers
    ]
    addresses = [buffer.data_ptr() for buffer in buffers]
    sums = AllReduce(buffers[task.rank], addresses, task.rank, task.layout, task.dtype)
    collectives = Collectives(sums)
    exchanges = iter(task.exchanges)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    exchanged: list[torch.Tensor] = []
    for x, residual in zip(task.inputs, task.residuals, strict=True):
        assert sums.supports(x)
        norm = sums.add_norm(x, residual, task.weight, task.eps)
        kept = (
            sums.get_own_rows(residual, torch.arange(len(x)))
            if sums.is_split_by_rank(x)
            else residual
        )
        found.append((norm.clone(), kept))
        exchanged += [getattr(collectives, name)(x) for name, x in islice(exchanges, 1)]
    exchanged += [getattr(collectives, name)(x) for name, x in exchanges]
    return found, exchanged


class Ranks:
    """``most`` processes that compute tasks."""

    def __init__(self, most: int) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.summing_ranks"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            )
            for _ in range(most)
        ]

    def compute(
        self, tasks: list[Task]
    ) -> list[tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]]:
        """What each rank found."""
        used = self._processes[: len(tasks)]
        for process, task in zip(used, tasks, strict=True):
            assert process.stdin is not None
            pickle.dump(task, process.stdin)
            process.stdin.flush()
        found = []
        for process in used:
            assert process.stdout is not None
            answer = pickle.load(process.stdout)
            assert not isinstance(answer, str), answer
            found.append(answer)
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate(timeout=TIMEOUT_S)


@contextmanager
def ranks(most: int) -> Iterator[Ranks]:
    made = Ranks(most)
    try:
        yield made
    finally:
        made.close()


def main() -> None:
    torch.set_num_threads(1)
    make_interpreter_cheap()
    while True:
        try:
            task: Task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Any
        try:
            answer = compute(task)
        except Exception as error:
            answer = f"rank {task.rank}: {type(error).__name__}: {error}"
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
