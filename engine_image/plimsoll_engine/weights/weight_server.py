"""Weight server: a process that keeps the weights on the device across worker restarts.

It is forked from the zygote like a worker. It loads the checkpoint into one buffer when the first
worker asks for it, shares the buffer with every worker, and frees it when the last one has
disconnected. It also owns the KV pool, so that keys and values survive a restart. A worker's own
pool would delay its successor: CUDA takes 0.3 s to free 100 GiB.

On CUDA, workers map the weights writable. After a worker has crashed, the server therefore compares
the tensors' checksums with those after loading, and reloads the weights if they differ.

It has one thread. SIGTERM ends it after the last mapping.
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
from plimsoll_engine.weights.layout import compute_checksums, lay_out, make_views
from plimsoll_engine.weights.memory import HostBuffer, allocate

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 10.0
IDENTITY_BYTES = 16


class WeightsLost(Exception):
    """Weights that a worker uses are damaged: all workers and this process must exit."""


class Weights:
    """Weights of one rank on its device, with checksums taken after loading."""

    def __init__(self, config: WorkerConfig, rank: int) -> None:
        self._folder = Path(config.model)
        self._draft_folder = None if config.draft_model is None else Path(config.draft_model)
        self._shard = Shard(rank, config.tensor_parallel_size)
        self.device = loader.choose_device(config.device, self._shard)
        self._config = loader.load_config(self._folder)
        self._dtype = loader.choose_dtype(config.dtype, self._config, self.device)
        with use_device(self.device):
            self.manifest, self.buffer = self._load()
        self._sums = self._compute_checksums()
        self.identity = _hash_identity(self.manifest, self._sums)

    def _load(self) -> tuple[Manifest, HostBuffer | DeviceBuffer]:
        model = loader.build(self._folder, self._config, self._dtype, self._shard)
        if model is None:
            raise LoadError(
                f"{self._folder}: the weight server cannot load models that only transformers "
                "implements"
            )
        draft = None
        if self._draft_folder is not None:
            draft = draft_models.build(self._draft_folder, self._dtype)
        manifest = lay_out(draft_models.merge_tensors(model.get_parameters(), draft))
        buffer = allocate(self.device, manifest.nbytes, "plimsoll-weights")
        try:
            own, drafts = draft_models.split_tensors(make_views(buffer.as_tensor(), manifest))
            loader.bind(model, own)
            loader.fill(model, self._folder)
            if draft is not None and self._draft_folder is not None:
                loader.bind(draft, drafts)
                loader.fill(draft, self._draft_folder)
        except BaseException:
            buffer.close()
            raise
        return manifest, buffer

    def find_damaged_tensors(self) -> list[str]:
        """Return the names of tensors whose checksums have changed since loading."""
        now = self._compute_checksums()
        return [name for name, value in self._sums.items() if now[name] != value]

    def _compute_checksums(self) -> dict[str, int]:
        with use_device(self.device), torch.inference_mode():
            return compute_checksums(self.buffer.as_tensor(), self.manifest)

    def share(self) -> tuple[SharedWeights, int | None]:
        """Return the reply to a worker, and the file descriptor to send with it, if any."""
        if isinstance(self.buffer, HostBuffer):
            return SharedWeights(self.manifest, identity=self.identity), self.buffer.fd
        with use_device(self.device):
            return SharedWeights(self.manifest, self.buffer.export(), self.identity), None

    def close(self) -> None:
        """Release the weights. Workers keep their mappings until they exit."""
        with use_device(self.device):
            self.buffer.close()


def _hash_identity(manifest: Manifest, sums: dict[str, int]) -> bytes:
    content = msgspec.msgpack.encode((manifest, sums))
    return blake2b(content, digest_size=IDENTITY_BYTES).digest()


class Pool:
    """Memory of one rank's KV pool, with a random identity."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.identity = os.urandom(IDENTITY_BYTES)
        with use_device(device):
            self.buffer = allocate(device, nbytes, "plimsoll-kv-pool")

    def share(self) -> tuple[SharedPool, int | None]:
        """Return the reply to a worker, and the file descriptor to send with it, if any."""
        nbytes = self.buffer.nbytes
        if isinstance(self.buffer, HostBuffer):
            return SharedPool(nbytes, identity=self.identity), self.buffer.fd
        with use_device(self.device):
            return SharedPool(nbytes, self.buffer.export(), self.identity), None

    def close(self) -> None:
        """Release the pool's memory."""
        with use_device(self.device):
            self.buffer.close()


def use_device(device: torch.device) -> AbstractContextManager[None]:
    """Make ``device`` the current CUDA device within the context; do nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class WeightServer:
    """Server that shares weights and KV pools with workers. Each connection is a mapping."""

    def __init__(self, config: WorkerConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._weights: dict[int, Weights] = {}
        """Weights by rank. The other dictionaries by rank have the same keys."""
        self._pools: dict[int, Pool] = {}
        self._writers: dict[int, set[int]] = {}
        """Descriptors of the connections whose workers may write to the pool."""
        self._mappings: dict[int, tuple[socket.socket, int | None]] = {}
        """Connection by descriptor, with its rank once the weights are mapped."""
        self._suspect_ranks: set[int] = set()
        """Ranks whose weights a crashed worker may have damaged."""
        self._poll = select.poll()

    def serve(self) -> None:
        """Serve until SIGTERM has arrived and the last mapping has ended. Raises WeightsLost."""
        woken, waker = os.pipe()
        signal.signal(signal.SIGTERM, lambda *_: os.write(waker, b"T"))
        listener = self._listener.fileno()
        for fd in (woken, listener):
            self._poll.register(fd, select.POLLIN)
        stopping = False
        while not stopping or self._mappings:
            # Handle the listener last: accept may reuse the descriptor of a mapping closed before.
            for fd, _ in sorted(self._poll.poll(), key=lambda ready: ready[0] == listener):
                if fd == woken:
                    stopping = True
                    self._poll.unregister(woken)
                    self._poll.unregister(listener)
                elif fd == listener:
                    if not stopping:
                        self._poll.register(self._accept(), select.POLLIN)
                elif fd in self._mappings and not self._answer_request(fd):
                    self._close_mapping(fd)
        for pool in self._pools.values():
            pool.close()
        for weights in self._weights.values():
            weights.close()

    def _accept(self) -> int:
        connection, _ = self._listener.accept()
        connection.settimeout(SEND_TIMEOUT_S)
        self._mappings[connection.fileno()] = connection, None
        return connection.fileno()

    def _close_mapping(self, fd: int) -> None:
        self._poll.unregister(fd)
        for writers in self._writers.values():
            writers.discard(fd)
        self._mappings.pop(fd)[0].close()

    def _share_weights(self, rank: int) -> tuple[weight_ipc.Reply, int | None]:
        try:
            return self._get_intact_weights(rank).share()
        except LoadError as error:
            refused = MappingRefusal(str(error), permanent=True)
        except (OSError, RuntimeError) as error:
            refused = MappingRefusal(f"weights: {type(error).__name__}: {error}", permanent=False)
        log.error("%s", refused.message)
        return refused, None

    def _get_intact_weights(self, rank: int) -> Weights:
        if rank not in self._weights:
            began = time.monotonic()
            self._weights[rank] = Weights(self._config, rank)
            size_mib = self._weights[rank].manifest.nbytes >> 20
            log.info("%d MiB loaded in %.3f s", size_mib, time.monotonic() - began)
        elif rank in self._suspect_ranks:
            damaged = self._weights[rank].find_damaged_tensors()
            if damaged:
                self._replace_weights(rank, damaged)
        self._suspect_ranks.discard(rank)
        return self._weights[rank]

    def _replace_weights(self, rank: int, damaged: list[str]) -> None:
        text = _format_damage(damaged)
        if any(mapped == rank for _, mapped in self._mappings.values()):
            raise WeightsLost(
                f"{text}; another worker still uses them, so all workers must restart"
            )
        log.warning("%s: reloading the weights", text)
        self._weights.pop(rank).close()
        self._weights[rank] = Weights(self._config, rank)

    def _answer_request(self, fd: int) -> bool:
        """Answer one request of a worker. Return False if its mapping has ended."""
        connection, rank = self._mappings[fd]
        try:
            match weight_ipc.receive_request(connection):
                case weight_ipc.WeightsRequest(wanted):
                    answer, descriptor = self._share_weights(wanted)
                    if isinstance(answer, SharedWeights):
                        self._mappings[fd] = connection, wanted
                    weight_ipc.send_message(connection, answer, descriptor)
                    return isinstance(answer, SharedWeights)
                case weight_ipc.PoolRequest(nbytes) if rank is not None:
                    weight_ipc.send_message(connection, *self._share_pool(rank, nbytes))
                    return True
                case weight_ipc.PoolClaim() if rank is not None:
                    answer = self._claim_pool(fd, rank)
                    weight_ipc.send_message(connection, answer)
                    return isinstance(answer, weight_ipc.PoolClaimReply)
        except MappingLost as error:  # the worker has exited or hangs
            log.warning("a worker: %s", error)
            _, rank = self._mappings[fd]
            if rank is not None:
                self._suspect_ranks.add(rank)
        return False

    def _share_pool(self, rank: int, nbytes: int) -> tuple[weight_ipc.Reply, int | None]:
        try:
            if rank not in self._pools and nbytes:
                self._pools[rank] = Pool(self._weights[rank].device, nbytes)
            if rank not in self._pools:
                return SharedPool(0), None
            return self._pools[rank].share()
        except (OSError, RuntimeError) as error:
            return MappingRefusal(
                f"cannot allocate the KV pool of {nbytes} bytes: {error}", permanent=False
            ), None

    def _claim_pool(self, fd: int, rank: int) -> weight_ipc.Reply:
        """Register the worker at ``fd`` as a writer of the pool. Reply whether it is the only one.

        The worker may have mapped the weights before another one crashed. If that one damaged them,
        the claim is refused, and the next worker gets reloaded weights.
        """
        writers = self._writers.setdefault(rank, set())
        # A predecessor returned its mapping before this worker was allowed to claim the pool.
        for other in select.select(writers - {fd}, [], [], 0)[0]:
            if not self._answer_request(other):
                self._close_mapping(other)
        if rank in self._suspect_ranks:
            if damaged := self._weights[rank].find_damaged_tensors():
                return MappingRefusal(_format_damage(damaged), permanent=False)
            self._suspect_ranks.discard(rank)
        alone = not writers - {fd}
        writers.add(fd)
        return weight_ipc.PoolClaimReply(alone)


def _format_damage(damaged: list[str]) -> str:
    return (
        f"{len(damaged)} weight tensors were changed by a worker that crashed, the first is "
        f"{damaged[0]}"
    )


def run(config: WorkerConfig, listener: socket.socket) -> int:
    """Run a weight server in a newly forked process. Return the exit status."""
    write_stacks_on_sigusr1(config.run_dir, "weight_server")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        WeightServer(config, listener).serve()
    except WeightsLost as error:
        log.error("%s", error)
        return 1
    return 0
