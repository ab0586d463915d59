"""A rank that is not rank 0: it does what rank 0 tells it, in that order, and schedules nothing."""

from __future__ import annotations

import torch

from plimsoll_api.admin import Role
from plimsoll_engine.core.forward import Forward
from plimsoll_engine.host_memory import PythonObjects, process_memory
from plimsoll_engine.memory.device import device_memory
from plimsoll_engine.memory.lifecycle import Lifecycle
from plimsoll_engine.memory.trim import trim_process
from plimsoll_engine.ranks import messages
from plimsoll_engine.ranks.link import Link


class FollowError(RuntimeError):
    """A command failed. ``answered``: rank 0 waits for the answer and hears of it there; otherwise
    it waits in a collective, and only this process's end wakes it."""

    def __init__(self, message: str, answered: bool) -> None:
        super().__init__(message)
        self.answered = answered


class Follower:
    """``lifecycle`` has the model ready; the KV pool is made and dropped here by command."""

    def __init__(self, lifecycle: Lifecycle, link: Link) -> None:
        self._lifecycle = lifecycle
        self._link = link
        self._forward: Forward | None = None
        self._python = PythonObjects()

    def serve(self) -> None:
        """Until End. Raises :class:`plimsoll_engine.ranks.link.LeaderGone` and FollowError."""
        while not isinstance(command := self._link.receive(), messages.End):
            try:
                answer = self._do(command)
            except Exception as error:
                silent = isinstance(command, messages.Step | messages.Graphs | messages.Capture)
                raise FollowError(f"{type(error).__name__}: {error}", not silent) from error
            if answer is not None:
                self._link.send(answer)
        self._drop()
        self._lifecycle.shutdown()
        allocated, baseline = self._lifecycle.device_allocated(), self._lifecycle.device_baseline
        self._link.send(messages.Ended(allocated, baseline))

    def _do(self, command: messages.Command) -> messages.Reply | None:
        match command:
            case messages.Step(inputs):
                self._pool.follow(inputs)
            case messages.Capture():
                self._pool.capture_more()
            case messages.Graphs(max_num_seqs, max_blocks, later):
                self._pool.capture_graphs(max_num_seqs, max_blocks, later)
            case messages.Pool(num_blocks, block_size, lent):
                self._drop()
                model = self._lifecycle.model
                nbytes = num_blocks * block_size * model.kv.bytes_per_token(model.dtype)
                memory = self._lifecycle.borrow_pool(nbytes) if lent else None
                self._forward = Forward(model, num_blocks, block_size, memory)
                return messages.Done()
            case messages.Drop():
                self._drop()
                return messages.Done()
            case messages.Measure():
                return messages.Free(self._lifecycle.device_free())
            case messages.Freeze():
                self._lifecycle.freeze()
            case messages.Account():
                return self._account()
            case messages.Trim():
                return messages.Trimmed(trim_process(self._device, self._python))
        return None

    @property
    def _pool(self) -> Forward:
        if self._forward is None:
            raise RuntimeError("a step without a KV pool")
        return self._forward

    @property
    def _device(self) -> torch.device:
        return self._lifecycle.model.device

    def _account(self) -> messages.RankReport:
        memory = process_memory(
            Role.WORKER,
            self._python,
            self._lifecycle.collections,
            self._lifecycle.borrowed_host_bytes,
        )
        graphs = 0 if self._forward is None else self._forward.graph_bytes
        return messages.RankReport(memory, device_memory(self._device), graphs)

    def _drop(self) -> None:
        if self._forward is not None:
            self._forward.close()
            self._forward = None
