"""Faults that grow on the model's device, or keep it."""

from __future__ import annotations

from plimsoll_faults.kinds.base import MIB, Fault


class DeviceDict(Fault, frozen=True, tag="device_dict"):
    """A dictionary keeps a tensor of ``bytes_per_request`` on the model's device per request."""

    owner = "a dictionary of tensors"
    segment = "torch_allocated, malloc_in_use on a CPU"
    bytes_per_request: int = 1 * MIB


class SliceKept(Fault, frozen=True, tag="slice_kept"):
    """The first hidden state of each prompt's last token is kept as a slice of its step's.

    A row of a few KiB pins the storage of all the step's rows.
    """

    owner = "slices of hidden states"
    segment = "torch_allocated, malloc_in_use on a CPU"


class DeviceRaw(Fault, frozen=True, tag="device_raw"):
    """A library takes ``bytes_per_request`` from the driver, past torch, and never frees it.

    Needs a CUDA device.
    """

    owner = "driver allocations"
    segment = "non_torch"
    bytes_per_request: int = 2 * MIB


class KeptKv(Fault, frozen=True, tag="kept_kv"):
    """A registry holds the KV pool beyond the engine's shutdown.

    The worker's last message says that its device memory is not back at the baseline.
    """

    owner = "a global registry of layers"
    segment = "torch_allocated, after shutdown in process"


class IpcUnreleased(Fault, frozen=True, tag="ipc_unreleased"):
    """A tensor of ``bytes_per_request`` is shared through CUDA IPC and never released.

    The process that it is shared with exits before it releases it: torch keeps the memory, though
    nothing here refers to the tensor. Needs a CUDA device.
    """

    owner = "tensors shared with processes that are gone"
    segment = "torch_allocated"
    bytes_per_request: int = 2 * MIB


class GraphPerKey(Fault, frozen=True, tag="graph_per_key"):
    """A CUDA graph is captured for every pair of batch size and context length.

    A sound engine captures one for each padded size only. Each graph is kept with a memory pool of
    its own. Needs a CUDA device and one rank.
    """

    owner = "CUDA graphs"
    segment = "torch_reserved_unused, non_torch"


class FailedCapture(Fault, frozen=True, tag="failed_capture"):
    """The capture of a CUDA graph runs out of memory, and is tried again.

    The next try follows ``every_requests`` finished requests. The error is stored with its
    traceback, whose frame holds the half-made graph and so its memory pool. Needs a CUDA device and
    one rank.
    """

    owner = "pools of failed captures"
    segment = "torch_reserved_unused"
    every_requests: int = 4


class GrammarMasks(Fault, frozen=True, tag="grammar_masks"):
    """The device's copy of each grammar mask is kept.

    Each token of structured output has a mask, with a bit for each token of the vocabulary. Needs a
    CUDA device.
    """

    owner = "grammar masks"
    segment = "torch_allocated"


class CollectiveScratch(Fault, frozen=True, tag="collective_scratch"):
    """A buffer from NCCL's allocator is kept for every shape that is all-reduced.

    Each new prompt length is a new shape. Only rank 0 leaks. Needs ``--tensor-parallel-size`` 2 or
    more on CUDA devices.
    """

    owner = "scratch buffers of collectives"
    segment = "torch_allocated"
