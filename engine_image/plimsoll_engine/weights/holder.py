"""The weight holder: a process that keeps the weights on the device while workers come and go.

Forked from the zygote like a worker. It loads the checkpoint once, into one buffer, when the first
worker asks; lends it to every worker after that; and frees it only when all of them are gone.
A worker's mapping is writable on CUDA, so after a worker that crashed the sums of all tensors are
compared with those of the load: weights that changed are loaded again.

One thread. SIGTERM ends it as soon as no lease is left.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from plimsoll_engine.models import loader
from plimsoll_engine.models.loader import LoadError
from plimsoll_engine.ranks.group import Shard
from plimsoll_engine.weights import lending
from plimsoll_engine.weights.cuda import DeviceBuffer
from plimsoll_engine.weights.layout import Manifest, checksums, lay_out, views
from plimsoll_engine.weights.lending import Lent, Refused
from plimsoll_engine.weights.memory import HostBuffer, allocate
from plimsoll_engine.worker.process import write_stacks_on_sigusr1
from plimsoll_engine.zygote_ipc import WorkerConfig

SEND_TIMEOUT_S = 10.0


class WeightsLost(Exception):
    """Weights that a worker uses are damaged: all workers must go, and so must this process."""


class Weights:
    """The loaded buffer of one rank, on its device, and how it looked when it was loaded."""

    def __init__(self, config: WorkerConfig, rank: int) -> None:
        self._folder = Path(config.model)
        self._shard = Shard(rank, config.tensor_parallel_size)
        self.device = loader.choose_device(config.device, self._shard)
        self._config = loader.load_config(self._folder)
        self._dtype = loader.choose_dtype(config.dtype, self._config, self.device)
        with on(self.device):
            self.manifest, self.buffer = self._load()
        self._sums = self._checksums()

    def _load(self) -> tuple[Manifest, HostBuffer | DeviceBuffer]:
        model = loader.build(self._folder, self._config, self._dtype, self._shard)
        if model is None:
            raise LoadError(f"{self._folder}: only transformers has this model; a worker loads it")
        manifest = lay_out(model.parameters_by_name())
        buffer = allocate(self.device, manifest.nbytes)
        try:
            loader.bind(model, views(buffer.tensor(), manifest))
            loader.fill(model, self._folder)
        except BaseException:
            buffer.close()
            raise
        return manifest, buffer

    def damaged(self) -> list[str]:
        """The tensors whose bytes are no longer those of the load."""
        now = self._checksums()
        return [name for name, value in self._sums.items() if now[name] != value]

    def _checksums(self) -> dict[str, int]:
        with on(self.device), torch.inference_mode():
            return checksums(self.buffer.tensor(), self.manifest)

    def lend(self) -> tuple[Lent, int | None]:
        """The answer to a worker, and the descriptor to send with it."""
        if isinstance(self.buffer, HostBuffer):
            return Lent(self.manifest), self.buffer.fd
        with on(self.device):
            return Lent(self.manifest, self.buffer.export()), None

    def close(self) -> None:
        with on(self.device):
            self.buffer.close()


def on(device: torch.device) -> AbstractContextManager[None]:
    """``device`` is the current one in here: the driver's calls mean that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Holder:
    """Answers workers on ``listener``; a lease is a connection that is open."""

    def __init__(self, config: WorkerConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._weights: dict[int, Weights] = {}
        """By rank."""
        self._leases: dict[int, tuple[socket.socket, int]] = {}
        """The connection and the rank."""
        self._doubt: set[int] = set()
        """Ranks of which a worker ended without returning its lease: it may have written anywhere.
        """

    def serve(self) -> None:
        """Until SIGTERM and the end of the last lease. Raises :class:`WeightsLost`."""
        woken, waker = os.pipe()
        signal.signal(signal.SIGTERM, lambda *_: os.write(waker, b"T"))
        poll = select.poll()
        for fd in (woken, self._listener.fileno()):
            poll.register(fd, select.POLLIN)
        stopping = False
        while not stopping or self._leases:
            for fd, _ in poll.poll():
                if fd == woken:
                    stopping = True
                    poll.unregister(woken)
                    poll.unregister(self._listener.fileno())
                elif fd == self._listener.fileno():
                    lease = self._answer()
                    if lease is not None:
                        poll.register(lease, select.POLLIN)
                else:
                    poll.unregister(fd)
                    self._end(fd)
        for weights in self._weights.values():
            weights.close()

    def _answer(self) -> socket.socket | None:
        """Lend the weights to the worker that has connected; None where nothing was lent."""
        connection, _ = self._listener.accept()
        connection.settimeout(SEND_TIMEOUT_S)
        fd = None
        answer: lending.Answer
        rank = 0
        try:
            rank = lending.receive_request(connection).rank
            answer, fd = self._sound_weights(rank).lend()
        except LoadError as error:
            answer = Refused(str(error), permanent=True)
        except (OSError, RuntimeError) as error:
            answer = Refused(f"weights: {type(error).__name__}: {error}", permanent=False)
        try:
            lending.send(connection, answer, fd)
        except OSError as error:  # it went meanwhile, or it hangs
            print(f"holder: worker: {error}", file=sys.stderr)
            connection.close()
            return None
        if isinstance(answer, Refused):
            print(f"holder: {answer.message}", file=sys.stderr)
            connection.close()
            return None
        self._leases[connection.fileno()] = connection, rank
        return connection

    def _sound_weights(self, rank: int) -> Weights:
        if rank not in self._weights:
            began = time.monotonic()
            self._weights[rank] = Weights(self._config, rank)
            size_mib = self._weights[rank].manifest.nbytes >> 20
            print(f"holder: {size_mib} MiB loaded in {time.monotonic() - began:.3f} s")
            sys.stdout.flush()
        elif rank in self._doubt:
            damaged = self._weights[rank].damaged()
            if damaged:
                self._replace(rank, damaged)
        self._doubt.discard(rank)
        return self._weights[rank]

    def _replace(self, rank: int, damaged: list[str]) -> None:
        text = f"{len(damaged)} weights changed under a worker that crashed, {damaged[0]} first"
        if any(lent == rank for _, lent in self._leases.values()):
            raise WeightsLost(f"{text}; another worker uses them")
        print(f"holder: {text}: loading them again", file=sys.stderr)
        self._weights.pop(rank).close()
        self._weights[rank] = Weights(self._config, rank)

    def _end(self, fd: int) -> None:
        lease, rank = self._leases.pop(fd)
        try:
            returned = lease.recv(64) == lending.RETURNED
        except OSError:
            returned = False
        if not returned:
            self._doubt.add(rank)
        lease.close()


def run(config: WorkerConfig, listener: socket.socket) -> int:
    """The whole life of a holder in a freshly forked process; the exit status."""
    write_stacks_on_sigusr1(config.run_dir, "holder")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        Holder(config, listener).serve()
    except WeightsLost as error:
        print(f"holder: {error}", file=sys.stderr)
        return 1
    return 0
