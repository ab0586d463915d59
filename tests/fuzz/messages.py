"""What the engine's processes say to each other over their sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_engine.messages import worker_ipc, zygote_ipc
from plimsoll_engine.messages.framing import FrameReader
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.settings import Settings
from tests.fuzz.targets import make_models
from tests.fuzz.watched import Target

LARGE = 1 << 20
REFUSED = (ValueError, msgspec.MsgspecError, RecursionError)
"""What every reader of these sockets takes for the end of the connection."""
LARGE_BODIES = (
    b"\x91" * LARGE,
    b"\x81\xa1a" * (LARGE // 3),
    b"\xdd\x00\x0f\xff\xff" + b"\x90" * LARGE,
)


def make(name: str, folder: Path) -> Target:
    match name:
        case "to-worker":
            return _target(worker_ipc.to_worker_decoder.decode, worker_ipc.ToWorker)
        case "from-worker":
            return _target(_frontend(folder), worker_ipc.FromWorker)
        case "zygote":
            return _target(_both(zygote_ipc.to_zygote_decoder, zygote_ipc.from_zygote_decoder),
                           zygote_ipc.ToZygote | zygote_ipc.FromZygote)  # fmt: skip
    from plimsoll_engine.messages import rank_ipc  # torch comes along

    return _target(
        _both(rank_ipc.to_rank_decoder, rank_ipc.from_rank_decoder),
        rank_ipc.Command | rank_ipc.Reply,
    )


def _target(take: Callable[[bytes], Any], kinds: Any) -> Target:
    """The input is a body, and also a stream of frames in pieces of seven bytes."""

    def run(data: bytes) -> None:
        with contextlib.suppress(*REFUSED):
            take(data)
        reader = FrameReader()
        try:
            for start in range(0, min(len(data), 4096), 7):
                for body in reader.feed(data[start : start + 7]):
                    take(body)
        except REFUSED:
            pass

    tags = [kind.__struct_config__.tag for kind in getattr(kinds, "__args__", (kinds,))]
    fields = {f for kind in getattr(kinds, "__args__", (kinds,)) for f in kind.__struct_fields__}
    words = ("type", *tags, *sorted(fields))
    # A short msgpack string begins with 0xa0 and its length.
    return Target(
        run, tuple(chr(0xA0 + len(w)) + w for w in words if len(w) < 32), lambda: LARGE_BODIES
    )


def _both(one: Any, other: Any) -> Callable[[bytes], None]:
    def take(data: bytes) -> None:
        with contextlib.suppress(*REFUSED):
            one.decode(data)
        other.decode(data)

    return take


def _frontend(folder: Path) -> Callable[[bytes], None]:
    """What a worker says is decoded, and believed by a real frontend that has no worker."""
    make_models(folder)

    async def make_engine() -> AsyncEngine:
        (folder / "run").mkdir(exist_ok=True)
        worker = WorkerConfig(
            str(folder / "tiny"), str(folder / "run"), str(folder / "run" / "w.sock"),
            device="cpu", max_model_len=512,
        )  # fmt: skip
        settings = Settings(worker=worker, served_model_name="m")
        return AsyncEngine(settings, Tokenizer(settings.model))

    loop = asyncio.new_event_loop()
    engine = loop.run_until_complete(make_engine())

    def take(data: bytes) -> None:
        engine._handle_message(worker_ipc.from_worker_decoder.decode(data))
        engine.metrics.render()
        engine.compute_load()
        engine.list_ledger_entries()

    return take
