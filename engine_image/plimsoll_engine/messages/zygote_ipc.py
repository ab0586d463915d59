"""Messages between the frontend and the zygote, and the zygote's configuration.

When the frontend exits, the zygote kills its workers and the weight server. If the zygote is
killed, they survive as children of the frontend. This module must not import torch, because the
frontend imports it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from plimsoll_api.admin import Role
from plimsoll_engine.messages.framing import add_length_prefix
from plimsoll_engine.messages.speculative import Speculative

# Holds about 200 images of 336 x 336 pixels.
DEFAULT_MEDIA_CACHE_BYTES = 256 << 20


class WorkerConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Configuration of all workers that a zygote forks. The worker chooses sizes that are None.

    Attributes:
        socket: Path of the frontend's Unix socket.
        dtype: ``auto``, ``float32`` or ``bfloat16``.
        device: ``auto``, ``cpu`` or ``cuda``.
        inject: Value of ``PLIMSOLL_INJECT``.
        weights: Path of the weight server's socket; if empty, each worker loads its own weights.
        tensor_parallel_size: Number of ranks. Each rank is a process.
        max_loras: Maximum number of adapters; 0 disables them.
        kv_cache_dtype: ``auto`` (the model's dtype) or ``fp8``.
        speculative: Settings of speculative decoding; None disables it.

    """

    model: str
    run_dir: str
    socket: str
    dtype: str = "auto"
    device: str = "auto"
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    kv_offload_bytes: int = 0
    inject: str = ""
    weights: str = ""
    encoder_cache_tokens: int | None = None
    media_cache_bytes: int = DEFAULT_MEDIA_CACHE_BYTES
    tensor_parallel_size: int = 1
    max_loras: int = 0
    max_lora_rank: int = 0
    kv_cache_dtype: str = "auto"
    speculative: Speculative | None = None

    @property
    def draft_model(self) -> str | None:
        """Folder of the draft model; None without a draft model."""
        return None if self.speculative is None else self.speculative.model


def make_rendezvous_paths(run_dir: str | Path, epoch: int) -> tuple[Path, Path]:
    """Return the paths of rank 0's socket and of the process group's store."""
    # Short names, because the path of a socket has at most 107 bytes (unix(7)).
    return Path(run_dir) / f"r{epoch}.sock", Path(run_dir) / f"r{epoch}.store"


def listen(path: str) -> socket.socket:
    """Return a Unix socket that listens at ``path``. An existing socket file is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    Path(path).unlink(missing_ok=True)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen()
    return listener


# ---- from the frontend to the zygote


class Fork(msgspec.Struct, tag="fork"):
    """Command: fork a rank of a worker, or a weight server.

    ``number`` is the worker's epoch or the weight server's number.
    """

    number: int
    role: Role = Role.WORKER
    rank: int = 0


ToZygote = Fork


# ---- from the zygote to the frontend


class ZygoteReady(msgspec.Struct, tag="ready"):
    """Message: the zygote accepts fork commands. Its imports took ``import_s`` seconds."""

    pid: int
    import_s: float


class Forked(msgspec.Struct, tag="forked"):
    """Reply: the process was forked. ``pid`` is in the frontend's PID namespace."""

    number: int
    pid: int
    role: Role = Role.WORKER
    rank: int = 0


class ForkFailed(msgspec.Struct, tag="fork_failed"):
    """Reply: the fork failed."""

    number: int
    message: str
    role: Role = Role.WORKER


class Exited(msgspec.Struct, tag="exited"):
    """Message: a child exited and was reaped.

    ``status`` is its exit code, or the negative number of the signal that killed it.
    """

    number: int
    pid: int
    status: int
    role: Role = Role.WORKER
    rank: int = 0


FromZygote = ZygoteReady | Forked | ForkFailed | Exited

_encoder = msgspec.msgpack.Encoder()
to_zygote_decoder = msgspec.msgpack.Decoder(ToZygote)
from_zygote_decoder = msgspec.msgpack.Decoder(FromZygote)


def encode_frame(message: ToZygote | FromZygote) -> bytes:
    """Return ``message`` as an encoded frame."""
    return add_length_prefix(_encoder.encode(message))
