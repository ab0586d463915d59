"""Faults of a request's life: it does not die, or it is not ended."""

from __future__ import annotations

from plimsoll_faults.kinds.base import MIB, Fault


class RequestCycle(Fault, frozen=True, tag="request_cycle"):
    """A request stores its own block hasher: it is garbage that only a collection frees.

    It has ``payload_bytes`` of multimodal-sized data. ``freeze_every`` N: after every N finished
    requests an unpaired ``gc.freeze()`` hides the garbage from all collections; 0 never, then a
    trim cures it.
    """

    owner = "cyclic requests"
    segment = "malloc_in_use"
    payload_bytes: int = 4 * MIB
    freeze_every: int = 1


class StoredException(Fault, frozen=True, tag="stored_exception"):
    """The exception of a failed forward is stored with its traceback.

    The frames of that hold the step's tensors: ``bytes_per_request`` on the model's device.
    """

    owner = "stored exceptions"
    segment = "torch_allocated, malloc_in_use on a CPU"
    bytes_per_request: int = 1 * MIB


class SlowSteps(Fault, frozen=True, tag="slow_steps"):
    """No defect: after each step the worker waits for ``wait_ms``.

    It then streams as slowly as a large model does, and the machine is free meanwhile.
    """

    owner = "nothing"
    segment = "none: time"
    cure = "none: it is sound"
    wait_ms: int = 20


class AbortChoices(Fault, frozen=True, tag="abort_choices"):
    """The abort of a request for n > 1 choices reaches only the first choice.

    The others run to their ``max_tokens`` without a client.
    """

    owner = "requests of the worker"
    segment = "KV blocks of requests without a client"
