"""Weight server: a process that keeps the weights on the device while workers come and go.

It is forked from the zygote like a worker. It loads the checkpoint into one buffer when the first
worker asks, shares it with every later worker, and frees it once all of them are gone. It also owns
the KV pool, so that keys and values outlive a worker. If each worker had its own pool, its
successor would have to wait: CUDA takes 0.3 s to free 100 GiB.

On CUDA a worker's mapping is writable. After a worker has crashed, the server therefore compares
the checksums of all tensors with those after loading, and loads damaged weights again.

It has one thread. SIGTERM ends it once no mapping is left.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch

from plimsoll_engine.device.buffer import DeviceBuffer
from plimsoll_engine.distributed.group import Shard
from plimsoll_engine.errors import LoadError
from plimsoll_engine.messages import weight_ipc
from plimsoll_engine.messages.weight_ipc import (
    Manifest,
    MappingLost,
    MappingRefusal,
    SharedPool,
    SharedWeights,
)
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import draft as draft_models
from plimsoll_engine.models import loader
from plimsoll_engine.process.stacks import write_stacks_on_sigusr1
from plimsoll_engine.weights.layout import checksums, lay_out, views
from plimsoll_engine.weights.memory import HostBuffer, allocate

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 10.0
IDENTITY_BYTES = 16


class WeightsLost(Exception):
    """Weights that a worker uses are damaged, so all workers and this process must exit."""


class Weights:
    """Loaded weights of one rank on its device, with their checksums."""

    def __init__(self, config: WorkerConfig, rank: int) -> None:
        self._folder = Path(config.model)
        self._draft_folder = None if config.draft_model is None else Path(config.draft_model)
        self._shard = Shard(rank, config.tensor_parallel_size)
        self.device = loader.choose_device(config.device, self._shard)
        self._config = loader.load_config(self._folder)
        self._dtype = loader.choose_dtype(config.dtype, self._config, self.device)
        with current_device(self.device):
            self.manifest, self.buffer = self._load()
        self._sums = self._checksums()
        self.identity = _identity(self.manifest, self._sums)

    def _load(self) -> tuple[Manifest, HostBuffer | DeviceBuffer]:
        model = loader.build(self._folder, self._config, self._dtype, self._shard)
        if model is None:
            raise LoadError(f"{self._folder}: only transformers has this model; a worker loads it")
        draft = None
        if self._draft_folder is not None:
            draft = draft_models.build(self._draft_folder, self._dtype)
        manifest = lay_out(draft_models.merge_tensors(model.parameters_by_name(), draft))
        buffer = allocate(self.device, manifest.nbytes, "plimsoll-weights")
        try:
            own, drafts = draft_models.split_tensors(views(buffer.tensor(), manifest))
            loader.bind(model, own)
            loader.fill(model, self._folder)
            if draft is not None and self._draft_folder is not None:
                loader.bind(draft, drafts)
                loader.fill(draft, self._draft_folder)
        except BaseException:
            buffer.close()
            raise
        return manifest, buffer

    def damaged_tensors(self) -> list[str]:
        """Return the names of the tensors whose bytes have changed since loading."""
        now = self._checksums()
        return [name for name, value in self._sums.items() if now[name] != value]

    def _checksums(self) -> dict[str, int]:
        with current_device(self.device), torch.inference_mode():
            return checksums(self.buffer.tensor(), self.manifest)

    def share(self) -> tuple[SharedWeights, int | None]:
        """Return the reply to a worker, and the file descriptor to send with it or None."""
        if isinstance(self.buffer, HostBuffer):
            return SharedWeights(self.manifest, identity=self.identity), self.buffer.fd
        with current_device(self.device):
            return SharedWeights(self.manifest, self.buffer.export(), self.identity), None

    def close(self) -> None:
        """Release the weights. Workers keep their mappings until they exit."""
        with current_device(self.device):
            self.buffer.close()


def _identity(manifest: Manifest, sums: dict[str, int]) -> bytes:
    """Return a hash that identifies these weights in this layout."""
    content = msgspec.msgpack.encode((manifest, sums))
    return blake2b(content, digest_size=IDENTITY_BYTES).digest()


class Pool:
    """Memory of one rank's KV pool, with a unique identity."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.identity = os.urandom(IDENTITY_BYTES)
        with current_device(device):
            self.buffer = allocate(device, nbytes, "plimsoll-kv-pool")

    def share(self) -> tuple[SharedPool, int | None]:
        """Return the reply to a worker, and the file descriptor to send with it or None."""
        nbytes = self.buffer.nbytes
        if isinstance(self.buffer, HostBuffer):
            return SharedPool(nbytes, identity=self.identity), self.buffer.fd
        with current_device(self.device):
            return SharedPool(nbytes, self.buffer.export(), self.identity), None

    def close(self) -> None:
        """Release the pool's memory."""
        with current_device(self.device):
            self.buffer.close()


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Make ``device`` the current CUDA device inside the context; no effect on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class WeightServer:
    """Server of weights and KV pools on ``listener``. An open connection is a mapping."""

    def __init__(self, config: WorkerConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._weights: dict[int, Weights] = {}
        """Weights by rank, as in the other dictionaries by rank below."""
        self._pools: dict[int, Pool] = {}
        self._writers: dict[int, set[int]] = {}
        """Descriptors of the connections that may write to the pool."""
        self._mappings: dict[int, tuple[socket.socket, int | None]] = {}
        """Connection, and rank once its weights are mapped, by descriptor."""
        self._suspect_ranks: set[int] = set()
        """Ranks whose weights a crashed worker may have damaged."""
        self._poll = select.poll()

    def serve(self) -> None:
        """Serve until SIGTERM and the end of the last mapping. Raises :class:`WeightsLost`."""
        woken, waker = os.pipe()
        signal.signal(signal.SIGTERM, lambda *_: os.write(waker, b"T"))
        listener = self._listener.fileno()
        for fd in (woken, listener):
            self._poll.register(fd, select.POLLIN)
        stopping = False
        while not stopping or self._mappings:
            # Handle the listener last: accept may reuse the descriptor of a closed mapping.
            for fd, _ in sorted(self._poll.poll(), key=lambda ready: ready[0] == listener):
                if fd == woken:
                    stopping = True
                    self._poll.unregister(woken)
                    self._poll.unregister(listener)
                elif fd == listener:
                    if not stopping:
                        self._poll.register(self._accept(), select.POLLIN)
                elif fd in self._mappings and not self._read(fd):
                    self._close_mapping(fd)
        for pool in self._pools.values():
            pool.close()
        for weights in self._weights.values():
            weights.close()

    def _accept(self) -> int:
        """Accept a connection and return its descriptor."""
        connection, _ = self._listener.accept()
        connection.settimeout(SEND_TIMEOUT_S)
        self._mappings[connection.fileno()] = connection, None
        return connection.fileno()

    def _close_mapping(self, fd: int) -> None:
        """Close the mapping with descriptor ``fd``."""
        self._poll.unregister(fd)
        for writers in self._writers.values():
            writers.discard(fd)
        self._mappings.pop(fd)[0].close()

    def _share_weights(self, rank: int) -> tuple[weight_ipc.Reply, int | None]:
        """Return the reply, and the file descriptor to send with it or None."""
        try:
            return self._intact_weights(rank).share()
        except LoadError as error:
            refused = MappingRefusal(str(error), permanent=True)
        except (OSError, RuntimeError) as error:
            refused = MappingRefusal(f"weights: {type(error).__name__}: {error}", permanent=False)
        log.error("%s", refused.message)
        return refused, None

    def _intact_weights(self, rank: int) -> Weights:
        if rank not in self._weights:
            began = time.monotonic()
            self._weights[rank] = Weights(self._config, rank)
            size_mib = self._weights[rank].manifest.nbytes >> 20
            log.info("%d MiB loaded in %.3f s", size_mib, time.monotonic() - began)
        elif rank in self._suspect_ranks:
            damaged = self._weights[rank].damaged_tensors()
            if damaged:
                self._replace(rank, damaged)
        self._suspect_ranks.discard(rank)
        return self._weights[rank]

    def _replace(self, rank: int, damaged: list[str]) -> None:
        text = _damage_message(damaged)
        if any(mapped == rank for _, mapped in self._mappings.values()):
            raise WeightsLost(f"{text}; another worker uses them")
        log.warning("%s: reloading the weights", text)
        self._weights.pop(rank).close()
        self._weights[rank] = Weights(self._config, rank)

    def _read(self, fd: int) -> bool:
        """Answer one request of a worker. Return False if its mapping ends."""
        connection, rank = self._mappings[fd]
        try:
            match weight_ipc.receive_request(connection):
                case weight_ipc.WeightsRequest(wanted):
                    answer, descriptor = self._share_weights(wanted)
                    if isinstance(answer, SharedWeights):
                        self._mappings[fd] = connection, wanted
                    weight_ipc.send(connection, answer, descriptor)
                    return isinstance(answer, SharedWeights)
                case weight_ipc.PoolRequest(nbytes) if rank is not None:
                    weight_ipc.send(connection, *self._share_pool(rank, nbytes))
                    return True
                case weight_ipc.PoolClaim() if rank is not None:
                    answer = self._claim(fd, rank)
                    weight_ipc.send(connection, answer)
                    return isinstance(answer, weight_ipc.PoolClaimReply)
        except MappingLost as error:  # the worker is gone or hangs
            log.warning("a worker: %s", error)
            _, rank = self._mappings[fd]
            if rank is not None:
                self._suspect_ranks.add(rank)
        return False

    def _share_pool(self, rank: int, nbytes: int) -> tuple[weight_ipc.Reply, int | None]:
        """Return the reply, and the file descriptor to send with it or None."""
        try:
            if rank not in self._pools and nbytes:
                self._pools[rank] = Pool(self._weights[rank].device, nbytes)
            if rank not in self._pools:
                return SharedPool(0), None
            return self._pools[rank].share()
        except (OSError, RuntimeError) as error:
            return MappingRefusal(f"KV pool of {nbytes} bytes: {error}", permanent=False), None

    def _claim(self, fd: int, rank: int) -> weight_ipc.Reply:
        """Register the worker at ``fd`` as a writer of the pool. Reply whether it is the only one.

        It may have mapped the weights before another worker crashed. If that worker damaged them,
        the claim is refused, and they are loaded again for the next worker.
        """
        writers = self._writers.setdefault(rank, set())
        # A predecessor sent its Returned message before this worker was allowed to claim.
        for other in select.select(writers - {fd}, [], [], 0)[0]:
            if not self._read(other):
                self._close_mapping(other)
        if rank in self._suspect_ranks:
            if damaged := self._weights[rank].damaged_tensors():
                return MappingRefusal(_damage_message(damaged), permanent=False)
            self._suspect_ranks.discard(rank)
        alone = not writers - {fd}
        writers.add(fd)
        return weight_ipc.PoolClaimReply(alone)


def _damage_message(damaged: list[str]) -> str:
    return f"{len(damaged)} weights changed under a worker that crashed, {damaged[0]} first"


def run(config: WorkerConfig, listener: socket.socket) -> int:
    """Run a weight server in a freshly forked process. Return the exit status."""
    write_stacks_on_sigusr1(config.run_dir, "weight_server")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        WeightServer(config, listener).serve()
    except WeightsLost as error:
        log.error("%s", error)
        return 1
    return 0
