"""Faults that allocate or keep memory of the model's device."""

from __future__ import annotations

from plimsoll_faults.kinds.base import MIB, Fault


class DeviceDict(Fault, frozen=True, tag="device_dict"):
    """For each request, a dictionary keeps a tensor of ``bytes_per_request`` on the device."""

    owner = "a dictionary of tensors"
    segment = "torch_allocated, malloc_in_use on a CPU"
    bytes_per_request: int = 1 * MIB


class SliceRetention(Fault, frozen=True, tag="slice_kept"):
    """For each prompt, one row of a step's hidden states is kept as a slice, and not as a copy.

    The row has a few KiB, but the slice keeps the storage of all rows of the step.
    """

    owner = "slices of hidden states"
    segment = "torch_allocated, malloc_in_use on a CPU"


class DeviceRaw(Fault, frozen=True, tag="device_raw"):
    """A library allocates ``bytes_per_request`` from the driver and never frees it.

    This bypasses torch's allocator. Needs a CUDA device.
    """

    owner = "driver allocations"
    segment = "non_torch"
    bytes_per_request: int = 2 * MIB


class KvPoolRetention(Fault, frozen=True, tag="kept_kv"):
    """A registry keeps the KV pool beyond the engine's shutdown.

    At its exit, the worker reports device memory above the baseline.
    """

    owner = "a global registry of layers"
    segment = "torch_allocated, after the shutdown in the same process"


class UnreleasedIpcTensor(Fault, frozen=True, tag="ipc_unreleased"):
    """A tensor of ``bytes_per_request`` is shared through CUDA IPC and never released.

    The receiving process exits without releasing it. Torch keeps the memory, although nothing in
    the worker refers to the tensor. Needs a CUDA device.
    """

    owner = "tensors shared with processes that have ended"
    segment = "torch_allocated"
    bytes_per_request: int = 2 * MIB


class GraphPerKey(Fault, frozen=True, tag="graph_per_key"):
    """A CUDA graph is captured for each pair of batch size and context length.

    A correct engine captures only one graph for each padded batch size. Each graph is kept with its
    own memory pool. Needs a CUDA device and one rank.
    """

    owner = "CUDA graphs"
    segment = "torch_reserved_unused, non_torch"


class FailedCapture(Fault, frozen=True, tag="failed_capture"):
    """The capture of a CUDA graph runs out of memory.

    It is tried again after every ``every_requests`` finished requests. The error is stored with its
    traceback, whose frame keeps the incomplete graph and its memory pool. Needs a CUDA device and
    one rank.
    """

    owner = "pools of failed captures"
    segment = "torch_reserved_unused"
    every_requests: int = 4


class GrammarMasks(Fault, frozen=True, tag="grammar_masks"):
    """The device copy of each grammar mask is kept.

    Each token of structured output has a mask, with a bit for each token of the vocabulary. Needs a
    CUDA device.
    """

    owner = "grammar masks"
    segment = "torch_allocated"


class CollectiveScratch(Fault, frozen=True, tag="collective_scratch"):
    """For each shape of an all-reduce, a buffer is kept in a separate memory pool.

    Each new prompt length is a new shape. Only rank 0 leaks. Needs ``--tensor-parallel-size`` of at
    least 2 on CUDA devices.
    """

    owner = "scratch buffers of collectives"
    segment = "torch_allocated"
