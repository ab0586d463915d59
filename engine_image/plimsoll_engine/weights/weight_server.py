"""Weight server: a process that keeps weights and KV pools across worker restarts.

On CUDA, workers can write to the weights, so it verifies their checksums after a worker has
crashed. After SIGTERM, it exits as soon as no worker has a mapping.
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
    MappingLostError,
    MappingRefusal,
    SharedPool,
    SharedWeights,
)
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import draft as draft_models
from plimsoll_engine.models import loader
from plimsoll_engine.process.stacks import write_stacks_on_sigusr1
from plimsoll_engine.weights.layout import compute_checksums, create_manifest, make_views
from plimsoll_engine.weights.memory import HostBuffer, allocate_buffer

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 10.0
IDENTITY_BYTES = 16


class WeightsLostError(Exception):
    """Weights are damaged while a worker uses them, so all workers and this process must exit."""


class Weights:
    """Weights of one rank on the rank's device, with checksums taken after loading."""

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
        model = loader.build_model(self._folder, self._config, self._dtype, self._shard)
        if model is None:
            raise LoadError(
                f"the weight server cannot load {self._folder}, because only transformers "
                "implements the model"
            )
        draft = None
        if self._draft_folder is not None:
            draft = draft_models.build_draft_model(self._draft_folder, self._dtype)
        manifest = create_manifest(draft_models.merge_tensors(model.get_parameters(), draft))
        buffer = allocate_buffer(self.device, manifest.nbytes, "plimsoll-weights")
        try:
            weights, drafts = draft_models.split_tensors(make_views(buffer.as_tensor(), manifest))
            loader.bind_tensors(model, weights)
            loader.load_tensors(model, self._folder)
            if draft is not None and self._draft_folder is not None:
                loader.bind_tensors(draft, drafts)
                loader.load_tensors(draft, self._draft_folder)
        except BaseException:
            buffer.close()
            raise
        return manifest, buffer

    def find_damaged_tensors(self) -> list[str]:
        """Return the names of the tensors whose checksums have changed since loading."""
        current = self._compute_checksums()
        return [name for name, value in self._sums.items() if current[name] != value]

    def _compute_checksums(self) -> dict[str, int]:
        with use_device(self.device), torch.inference_mode():
            return compute_checksums(self.buffer.as_tensor(), self.manifest)

    def create_reply(self) -> tuple[SharedWeights, int | None]:
        """Return the reply that shares the weights, and the file descriptor to send with it.

        On CUDA, the file descriptor is None.
        """
        if isinstance(self.buffer, HostBuffer):
            return SharedWeights(self.manifest, identity=self.identity), self.buffer.fd
        with use_device(self.device):
            return SharedWeights(self.manifest, self.buffer.export_handle(), self.identity), None

    def close(self) -> None:
        """Release the weights in this process. Workers keep their mappings until they exit."""
        with use_device(self.device):
            self.buffer.close()


def _hash_identity(manifest: Manifest, checksums: dict[str, int]) -> bytes:
    content = msgspec.msgpack.encode((manifest, checksums))
    return blake2b(content, digest_size=IDENTITY_BYTES).digest()


class KVPool:
    """Memory of one rank's KV pool."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.identity = os.urandom(IDENTITY_BYTES)
        with use_device(device):
            self.buffer = allocate_buffer(device, nbytes, "plimsoll-kv-pool")

    def create_reply(self) -> tuple[SharedPool, int | None]:
        """Return the reply that shares the pool, and the file descriptor to send with it.

        On CUDA, the file descriptor is None.
        """
        nbytes = self.buffer.nbytes
        if isinstance(self.buffer, HostBuffer):
            return SharedPool(nbytes, identity=self.identity), self.buffer.fd
        with use_device(self.device):
            return SharedPool(nbytes, self.buffer.export_handle(), self.identity), None

    def close(self) -> None:
        """Release the pool's memory."""
        with use_device(self.device):
            self.buffer.close()


def use_device(device: torch.device) -> AbstractContextManager[None]:
    """Return a context manager that makes ``device`` the current CUDA device; no-op for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class WeightServer:
    """Server that shares weights and KV pools with workers.

    A worker's connection stays open as long as the worker has a mapping.
    """

    def __init__(self, config: WorkerConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._weights: dict[int, Weights] = {}
        self._pools: dict[int, KVPool] = {}
        # File descriptors of the workers' connections that may write to the pool, by rank.
        self._writers: dict[int, set[int]] = {}
        # Connection and rank by file descriptor. The rank is None until the weights are shared.
        self._mappings: dict[int, tuple[socket.socket, int | None]] = {}
        # Ranks whose weights a crashed worker may have damaged.
        self._suspect_ranks: set[int] = set()
        self._poll = select.poll()

    def serve(self) -> None:
        """Serve until SIGTERM has arrived and no worker has a mapping. Raises WeightsLostError."""
        woken, waker = os.pipe()
        signal.signal(signal.SIGTERM, lambda *_: os.write(waker, b"T"))
        listener = self._listener.fileno()
        for fd in (woken, listener):
            self._poll.register(fd, select.POLLIN)
        stopping = False
        while not stopping or self._mappings:
            # Handle the listener last, because accept may reuse the descriptor of a mapping that
            # was closed in this iteration.
            for fd, _ in sorted(self._poll.poll(), key=lambda ready: ready[0] == listener):
                if fd == woken:
                    stopping = True
                    self._poll.unregister(woken)
                    self._poll.unregister(listener)
                elif fd == listener:
                    if not stopping:
                        self._poll.register(self._accept(), select.POLLIN)
                elif fd in self._mappings and not self._handle_request(fd):
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
            return self._get_intact_weights(rank).create_reply()
        except LoadError as error:
            refusal = MappingRefusal(str(error), permanent=True)
        except (OSError, RuntimeError) as error:
            refusal = MappingRefusal(
                f"cannot load the weights: {type(error).__name__}: {error}", permanent=False
            )
        log.error("%s", refusal.message)
        return refusal, None

    def _get_intact_weights(self, rank: int) -> Weights:
        if rank not in self._weights:
            start = time.monotonic()
            self._weights[rank] = Weights(self._config, rank)
            size_mib = self._weights[rank].manifest.nbytes >> 20
            log.info("loaded %d MiB of weights in %.3f s", size_mib, time.monotonic() - start)
        elif rank in self._suspect_ranks:
            damaged = self._weights[rank].find_damaged_tensors()
            if damaged:
                self._replace_weights(rank, damaged)
        self._suspect_ranks.discard(rank)
        return self._weights[rank]

    def _replace_weights(self, rank: int, damaged_tensors: list[str]) -> None:
        text = _format_damage(damaged_tensors)
        if any(mapped == rank for _, mapped in self._mappings.values()):
            raise WeightsLostError(
                f"{text}; another worker still uses them, so all workers must restart"
            )
        log.warning("reloading the weights, because %s", text)
        self._weights.pop(rank).close()
        self._weights[rank] = Weights(self._config, rank)

    def _handle_request(self, fd: int) -> bool:
        # Returns False if the mapping has ended.
        connection, rank = self._mappings[fd]
        try:
            match weight_ipc.receive_request(connection):
                case weight_ipc.WeightsRequest(requested):
                    reply, descriptor = self._share_weights(requested)
                    if isinstance(reply, SharedWeights):
                        self._mappings[fd] = connection, requested
                    weight_ipc.send_message(connection, reply, descriptor)
                    return isinstance(reply, SharedWeights)
                case weight_ipc.PoolRequest(nbytes) if rank is not None:
                    weight_ipc.send_message(connection, *self._share_pool(rank, nbytes))
                    return True
                case weight_ipc.PoolClaim() if rank is not None:
                    reply = self._claim_pool(fd, rank)
                    weight_ipc.send_message(connection, reply)
                    return isinstance(reply, weight_ipc.PoolClaimReply)
        except MappingLostError as error:  # the worker has exited or hangs
            log.warning("lost the connection to a worker: %s", error)
            _, rank = self._mappings[fd]
            if rank is not None:
                self._suspect_ranks.add(rank)
        return False

    def _share_pool(self, rank: int, nbytes: int) -> tuple[weight_ipc.Reply, int | None]:
        try:
            if rank not in self._pools and nbytes:
                self._pools[rank] = KVPool(self._weights[rank].device, nbytes)
            if rank not in self._pools:
                return SharedPool(0), None
            return self._pools[rank].create_reply()
        except (OSError, RuntimeError) as error:
            return MappingRefusal(
                f"cannot allocate the KV pool of {nbytes} bytes: {error}", permanent=False
            ), None

    def _claim_pool(self, fd: int, rank: int) -> weight_ipc.Reply:
        # The claim is refused if another worker has crashed and damaged the weights that this
        # worker has mapped. The next worker then gets reloaded weights.
        writers = self._writers.setdefault(rank, set())
        # A predecessor releases its mapping before this worker may claim the pool, so its message
        # or disconnection is ready to be read.
        for writer in select.select(writers - {fd}, [], [], 0)[0]:
            if not self._handle_request(writer):
                self._close_mapping(writer)
        if rank in self._suspect_ranks:
            if damaged := self._weights[rank].find_damaged_tensors():
                return MappingRefusal(_format_damage(damaged), permanent=False)
            self._suspect_ranks.discard(rank)
        alone = not writers - {fd}
        writers.add(fd)
        return weight_ipc.PoolClaimReply(alone)


def _format_damage(damaged_tensors: list[str]) -> str:
    return (
        f"a crashed worker has changed {len(damaged_tensors)} weight tensors, for example"
        f" {damaged_tensors[0]}"
    )


def run_weight_server(config: WorkerConfig, listener: socket.socket) -> int:
    """Run a weight server in a newly forked process, and return its exit status."""
    write_stacks_on_sigusr1(config.run_dir, "weight_server")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        WeightServer(config, listener).serve()
    except WeightsLostError as error:
        log.error("%s", error)
        return 1
    return 0
