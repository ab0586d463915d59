"""Puts faults into processes of vLLM and SGLang when a file says so. For conformance only.

Both load their plugins in every process. Each watches ``leak-ROLE`` in the folder that
``PLIMSOLL_CONFORMANCE_DIR`` names: its content is a rate in bytes a second, and without the file
nothing leaks. A process that starts while the file is there leaks from its start on.
``device-leak-ROLE`` does the same with memory of the device, in a process that uses one.

vLLM's frontend also watches ``sessions``: how many streaming sessions a client opens, each with a
first input of :data:`SESSION_TOKENS`, and neither goes on with nor closes.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

TICK_S = 0.1
SESSION_TOKENS = 3000
HOST_PIECE, DEVICE_PIECE = 1 << 16, 2 << 20
_held: list[object] = []
_sessions: list[Any] = []
_started = False


def load() -> None:
    """The plugin. vLLM may call it more than once in a process."""
    global _started
    folder = os.environ.get("PLIMSOLL_CONFORMANCE_DIR")
    if folder and not _started:
        _started = True
        for run in (_leak, _open_sessions):
            threading.Thread(target=run, args=(Path(folder),), daemon=True).start()


def _leak(folder: Path) -> None:
    owed = {"leak": 0.0, "device-leak": 0.0}
    while True:
        time.sleep(TICK_S)
        for name in owed:
            try:
                owed[name] += float((folder / f"{name}-{_role()}").read_text()) * TICK_S
            except (OSError, ValueError):
                continue
        if owed["leak"] >= HOST_PIECE:
            _held.append(bytearray(b"\1" * int(owed["leak"])))
            owed["leak"] = 0.0
        if owed["device-leak"] >= DEVICE_PIECE:
            _hold_on_device(int(owed["device-leak"]))
            owed["device-leak"] = 0.0


def _hold_on_device(size: int) -> None:
    """From torch's allocator, as a tensor that nobody gives back."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        _held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


def _open_sessions(folder: Path) -> None:
    """As a handler of WebSockets does that misses its client's end. Once the file is there; the
    next request shows where the engine is."""
    while True:
        time.sleep(1.0)
        try:
            wanted = int((folder / "sessions").read_text())
        except (OSError, ValueError):
            continue
        if _role() == "frontend":
            _at_next_request(wanted)
        return


def _at_next_request(wanted: int) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    add_request = AsyncLLM.add_request

    def opening(engine: Any, *arguments: Any, **more: Any) -> Any:
        if not _sessions:
            for number in range(wanted):
                _sessions.append(asyncio.ensure_future(_session(engine, number)))
        return add_request(engine, *arguments, **more)

    AsyncLLM.add_request = opening


async def _session(engine: Any, number: int) -> None:
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    async def inputs() -> AsyncIterator[StreamingInput]:
        yield StreamingInput({"prompt_token_ids": [10 + number] * SESSION_TOKENS})
        await asyncio.Event().wait()  # the next input never comes

    wish = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.DELTA)
    async for _ in engine.generate(inputs(), wish, request_id=f"session-{number}"):
        pass


def _role() -> str:
    """``frontend``, or what the engine's title says of a process that it started: ``enginecore``
    and ``worker`` of vLLM, ``scheduler`` and ``detokenizer`` of SGLang."""
    title = Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    named = re.match(r"(?:VLLM|sglang)::([A-Za-z]+)", title)
    return named[1].lower() if named else "frontend"
