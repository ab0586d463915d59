"""The messages between the frontend and the zygote, and what a zygote is started with.

The zygote is started as ``python -m plimsoll_engine.worker.zygote --control-fd FD --weights-fd FD
--config JSON``. The first FD is its end of a Unix stream socketpair that it inherits, the second
the socket at ``weights``, bound and listening; JSON is a :class:`WorkerConfig`. Each message is
framed as in :mod:`plimsoll_engine.messages.framing`: a 4-byte big-endian length and a msgpack body.

End of file on the socket means that the frontend is gone: the zygote kills its workers, then the
weight server, and exits. Where the zygote itself is killed they live on as the frontend's children,
and the frontend starts another zygote.

Nothing here knows torch: the frontend imports it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from plimsoll_api.admin import Role
from plimsoll_engine.messages.framing import framed
from plimsoll_engine.messages.speculative import Speculative

MEDIA_CACHE_BYTES = 256 << 20
"""Of the receiver cache and of the frontend's cache before it: some 200 images of 336 x 336 each.
"""


class WorkerConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """All that a worker of any epoch is told when its zygote starts.

    ``dtype`` is ``auto``, ``float32`` or ``bfloat16``; ``device`` is ``auto``, ``cpu`` or ``cuda``.
    A worker is one process for each of ``tensor_parallel_size`` ranks.
    Null leaves a size to the worker. ``socket`` is the path of the frontend's Unix server socket;
    ``inject`` is the text of ``PLIMSOLL_INJECT``, empty without faults. ``weights`` is the path of
    the socket at which the weight server shares them; empty, each worker loads its own.
    ``max_loras`` 0: no adapters; ``speculative`` null: no drafts. ``kv_cache_dtype`` is ``auto``,
    the model's, or ``fp8``.
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
    media_cache_bytes: int = MEDIA_CACHE_BYTES
    tensor_parallel_size: int = 1
    max_loras: int = 0
    max_lora_rank: int = 0
    kv_cache_dtype: str = "auto"
    speculative: Speculative | None = None

    @property
    def draft_model(self) -> str | None:
        """The folder of the draft model, where one guesses tokens."""
        return None if self.speculative is None else self.speculative.model


def meeting_place(run_dir: str | Path, epoch: int) -> tuple[Path, Path]:
    """Return where the ranks of an epoch meet: rank 0's socket, and the group's store.

    Short names, because a socket's path holds 107 bytes (unix(7)).
    """
    return Path(run_dir) / f"r{epoch}.sock", Path(run_dir) / f"r{epoch}.store"


def listen(path: str) -> socket.socket:
    """Return the weight server's socket; a file that a killed predecessor left is taken over."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    Path(path).unlink(missing_ok=True)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen()
    return listener


# ---- frontend to zygote


class Fork(msgspec.Struct, tag="fork"):
    """Fork rank ``rank`` of the worker of epoch ``number``, or the ``number``-th weight server.

    Rank 0 of a worker connects to the socket and says Hello with that number.
    """

    number: int
    role: Role = Role.WORKER
    rank: int = 0


ToZygote = Fork


# ---- zygote to frontend


class ZygoteReady(msgspec.Struct, tag="ready"):
    """Everything is imported; forks are taken from now on. ``import_s`` is how long that took."""

    pid: int
    import_s: float


class Forked(msgspec.Struct, tag="forked"):
    """A process was forked for the start ``number``; ``pid`` is as the frontend sees it."""

    number: int
    pid: int
    role: Role = Role.WORKER
    rank: int = 0


class ForkFailed(msgspec.Struct, tag="fork_failed"):
    """Nothing was forked: a second thread in the zygote, or no memory. ``message`` says which."""

    number: int
    message: str
    role: Role = Role.WORKER


class Exited(msgspec.Struct, tag="exited"):
    """A child is gone and reaped. ``status`` is its exit code, or minus the signal's number."""

    number: int
    pid: int
    status: int
    role: Role = Role.WORKER
    rank: int = 0


FromZygote = ZygoteReady | Forked | ForkFailed | Exited

_encoder = msgspec.msgpack.Encoder()
to_zygote = msgspec.msgpack.Decoder(ToZygote)
from_zygote = msgspec.msgpack.Decoder(FromZygote)


def frame(message: ToZygote | FromZygote) -> bytes:
    """Return the bytes that carry ``message``, length first."""
    return framed(_encoder.encode(message))
