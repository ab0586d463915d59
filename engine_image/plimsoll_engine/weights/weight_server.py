"""The weight server: a process that keeps the weights on the device while workers come and go.

Forked from the zygote like a worker. It loads the checkpoint once, into one buffer, when the first
worker asks; shares it with every worker after that; and frees it only when all of them are gone. On
CUDA it keeps the KV pool for them as well: memory of 100 GiB that a worker frees comes back to its
successor only after .3 s, which is half of a restart's pause.
A worker's mapping is writable on CUDA, so after a worker that crashed the sums of all tensors are
compared with those of the load: weights that changed are loaded again.

One thread. SIGTERM ends it as soon as no mapping is left.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from plimsoll_engine.distributed.group import Shard
from plimsoll_engine.errors import LoadError
from plimsoll_engine.messages import weight_ipc
from plimsoll_engine.messages.weight_ipc import (
    Manifest,
    MappingLost,
    PoolShared,
    WeightsRefused,
    WeightsShared,
)
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import loader
from plimsoll_engine.process.stacks import write_stacks_on_sigusr1
from plimsoll_engine.weights.cuda import DeviceBuffer
from plimsoll_engine.weights.layout import checksums, lay_out, views
from plimsoll_engine.weights.memory import HostBuffer, allocate

log = logging.getLogger(__name__)

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
        """Return the tensors whose bytes are no longer those of the load."""
        now = self._checksums()
        return [name for name, value in self._sums.items() if now[name] != value]

    def _checksums(self) -> dict[str, int]:
        with on(self.device), torch.inference_mode():
            return checksums(self.buffer.tensor(), self.manifest)

    def share(self) -> tuple[WeightsShared, int | None]:
        """Return the answer to a worker, and the descriptor to send with it."""
        if isinstance(self.buffer, HostBuffer):
            return WeightsShared(self.manifest), self.buffer.fd
        with on(self.device):
            return WeightsShared(self.manifest, self.buffer.export()), None

    def close(self) -> None:
        """Give the weights' memory back; workers that map it keep it until they end."""
        with on(self.device):
            self.buffer.close()


def on(device: torch.device) -> AbstractContextManager[None]:
    """``device`` is the current one in here: the driver's calls mean that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class WeightServer:
    """Answers workers on ``listener``; a mapping is a connection that is open."""

    def __init__(self, config: WorkerConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._weights: dict[int, Weights] = {}
        """By rank, as all that follows."""
        self._pools: dict[int, DeviceBuffer] = {}
        self._mappings: dict[int, tuple[socket.socket, int | None]] = {}
        """The connection and the rank, once its weights are mapped; by descriptor."""
        self._doubt: set[int] = set()
        """A worker ended without returning its mapping: it may have written anywhere there."""

    def serve(self) -> None:
        """Until SIGTERM and the end of the last mapping. Raises :class:`WeightsLost`."""
        woken, waker = os.pipe()
        signal.signal(signal.SIGTERM, lambda *_: os.write(waker, b"T"))
        poll = select.poll()
        for fd in (woken, self._listener.fileno()):
            poll.register(fd, select.POLLIN)
        stopping = False
        while not stopping or self._mappings:
            for fd, _ in poll.poll():
                if fd == woken:
                    stopping = True
                    poll.unregister(woken)
                    poll.unregister(self._listener.fileno())
                elif fd == self._listener.fileno():
                    poll.register(self._accept(), select.POLLIN)
                elif not self._read(fd):
                    poll.unregister(fd)
                    self._mappings.pop(fd)[0].close()
        for rank, pool in self._pools.items():
            with on(self._weights[rank].device):
                pool.close()
        for weights in self._weights.values():
            weights.close()

    def _accept(self) -> int:
        """Take in a worker that has connected; what it wants it says next."""
        connection, _ = self._listener.accept()
        connection.settimeout(SEND_TIMEOUT_S)
        self._mappings[connection.fileno()] = connection, None
        return connection.fileno()

    def _share_weights(self, rank: int) -> tuple[weight_ipc.Answer, int | None]:
        """Return the answer, and the descriptor to send with it."""
        try:
            return self._sound_weights(rank).share()
        except LoadError as error:
            refused = WeightsRefused(str(error), permanent=True)
        except (OSError, RuntimeError) as error:
            refused = WeightsRefused(f"weights: {type(error).__name__}: {error}", permanent=False)
        log.error("%s", refused.message)
        return refused, None

    def _sound_weights(self, rank: int) -> Weights:
        if rank not in self._weights:
            began = time.monotonic()
            self._weights[rank] = Weights(self._config, rank)
            size_mib = self._weights[rank].manifest.nbytes >> 20
            log.info("%d MiB loaded in %.3f s", size_mib, time.monotonic() - began)
        elif rank in self._doubt:
            damaged = self._weights[rank].damaged()
            if damaged:
                self._replace(rank, damaged)
        self._doubt.discard(rank)
        return self._weights[rank]

    def _replace(self, rank: int, damaged: list[str]) -> None:
        text = f"{len(damaged)} weights changed under a worker that crashed, {damaged[0]} first"
        if any(mapped == rank for _, mapped in self._mappings.values()):
            raise WeightsLost(f"{text}; another worker uses them")
        log.warning("%s: loading them again", text)
        self._weights.pop(rank).close()
        self._weights[rank] = Weights(self._config, rank)

    def _read(self, fd: int) -> bool:
        """Answer what a worker asks for; return False where its mapping ends."""
        connection, rank = self._mappings[fd]
        try:
            match weight_ipc.receive_request(connection):
                case weight_ipc.WeightsRequest(wanted):
                    answer, descriptor = self._share_weights(wanted)
                    if isinstance(answer, WeightsShared):
                        self._mappings[fd] = connection, wanted
                    weight_ipc.send(connection, answer, descriptor)
                    return isinstance(answer, WeightsShared)
                case weight_ipc.PoolRequest(nbytes) if rank is not None:
                    weight_ipc.send(connection, self._share_pool(rank, nbytes))
                    return True
        except MappingLost as error:  # it went meanwhile, or it hangs
            log.warning("a worker: %s", error)
            _, rank = self._mappings[fd]
            if rank is not None:
                self._doubt.add(rank)
        return False

    def _share_pool(self, rank: int, nbytes: int) -> weight_ipc.Answer:
        try:
            with on(self._weights[rank].device):
                if rank not in self._pools and nbytes:
                    self._pools[rank] = DeviceBuffer.allocate(nbytes)
                if rank not in self._pools:
                    return PoolShared(0)
                return PoolShared(self._pools[rank].nbytes, self._pools[rank].export())
        except RuntimeError as error:
            return WeightsRefused(f"KV pool of {nbytes} bytes: {error}", permanent=False)


def run(config: WorkerConfig, listener: socket.socket) -> int:
    """Be a weight server in a freshly forked process; return the exit status."""
    write_stacks_on_sigusr1(config.run_dir, "weight_server")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        WeightServer(config, listener).serve()
    except WeightsLost as error:
        log.error("%s", error)
        return 1
    return 0
