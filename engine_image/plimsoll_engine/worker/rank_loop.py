"""Loop of a rank above 0, which runs the commands of rank 0 in order."""

from __future__ import annotations

import torch

from plimsoll_api.admin import Role
from plimsoll_engine.core.execute.forward import Forward
from plimsoll_engine.distributed.link import LeaderConnection
from plimsoll_engine.memory.device_memory import read_device_memory
from plimsoll_engine.memory.trim import trim_process
from plimsoll_engine.messages import rank_ipc
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.process.host_memory import PythonMemoryEstimator, measure_process_memory
from plimsoll_engine.worker.lifecycle import CoreLifecycle


class CommandFailedError(RuntimeError):
    """A command of rank 0 failed.

    Rank 0 waits for a reply if ``expects_reply``. Otherwise, it waits in a collective, which only
    the exit of this process ends.
    """

    def __init__(self, message: str, expects_reply: bool) -> None:
        super().__init__(message)
        self.expects_reply = expects_reply


class Follower:
    """Rank above 0, which runs the commands of rank 0 with a prepared ``lifecycle``."""

    def __init__(self, lifecycle: CoreLifecycle, link: LeaderConnection) -> None:
        self._lifecycle = lifecycle
        self._link = link
        self._forward: Forward | None = None
        self._python = PythonMemoryEstimator()

    def serve(self) -> None:
        """Run commands until rank 0 sends Shutdown.

        Raises LeaderLostError and CommandFailedError.
        """
        while not isinstance(command := self._link.receive(), rank_ipc.Shutdown):
            try:
                answer = self._execute(command)
            except Exception as error:
                silent = isinstance(
                    command, rank_ipc.Step | rank_ipc.PrepareGraphs | rank_ipc.CaptureGraph
                )
                raise CommandFailedError(f"{type(error).__name__}: {error}", not silent) from error
            if answer is not None:
                self._link.send(answer)
        self._release_pool()
        self._lifecycle.shut_down()
        allocated, baseline = (
            self._lifecycle.measure_allocated_device_bytes(),
            self._lifecycle.device.baseline,
        )
        self._link.send(
            rank_ipc.RankShutdownReport(allocated, baseline, self._lifecycle.weights.is_fenced)
        )

    def _execute(self, command: rank_ipc.Command) -> rank_ipc.Reply | None:
        match command:
            case rank_ipc.Step(inputs):
                self._pool.compute_as_follower(inputs)
            case rank_ipc.CaptureGraph():
                self._pool.capture_next_graph()
            case rank_ipc.PrepareGraphs(max_rows, max_blocks, later, longest):
                self._pool.capture_graphs(max_rows, max_blocks, later, longest)
            case rank_ipc.CreatePool(num_blocks, block_size, layers, shared):
                self._release_pool()
                model = self._lifecycle.model
                if isinstance(model, Decoder) and layers < model.kv.layers:
                    model = model.truncate(layers)
                kv_dtype = self._lifecycle.kv_dtype
                nbytes = num_blocks * block_size * model.kv.compute_bytes_per_token(kv_dtype)
                memory = self._lifecycle.weights.map_pool(nbytes) if shared else None
                self._forward = Forward(model, num_blocks, block_size, memory, kv_dtype)
                return self._lifecycle.weights.claim_pool() if shared else rank_ipc.PoolReply()
            case rank_ipc.ChecksumBlocks(blocks):
                return rank_ipc.BlockChecksums(self._pool.compute_block_sums(blocks))
            case rank_ipc.ReleasePool():
                self._release_pool()
                return rank_ipc.Acknowledgement()
            case rank_ipc.MeasureFreeMemory():
                return rank_ipc.FreeMemory(self._lifecycle.device.measure_free_bytes())
            case rank_ipc.Freeze():
                self._lifecycle.freeze()
            case rank_ipc.ReportMemory():
                return self._create_memory_report()
            case rank_ipc.TrimRank():
                return rank_ipc.RankTrimReport(trim_process(self._device, self._python))
        return None

    @property
    def _pool(self) -> Forward:
        if self._forward is None:
            raise RuntimeError("rank 0 sent a step before it created the KV pool")
        return self._forward

    @property
    def _device(self) -> torch.device:
        return self._lifecycle.model.device

    def _create_memory_report(self) -> rank_ipc.RankReport:
        memory = measure_process_memory(
            Role.WORKER,
            self._python,
            self._lifecycle.heap.collections,
            self._lifecycle.mapped_host_bytes,
        )
        graphs = 0 if self._forward is None else self._forward.graph_bytes
        return rank_ipc.RankReport(memory, read_device_memory(self._device), graphs)

    def _release_pool(self) -> None:
        if self._forward is not None:
            self._forward.close()
            self._forward = None
