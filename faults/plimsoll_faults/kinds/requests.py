"""Faults in the life of a request: it is not freed, or not aborted."""

from __future__ import annotations

from plimsoll_faults.kinds.base import MIB, Fault


class RequestCycle(Fault, frozen=True, tag="request_cycle"):
    """A request stores its own block hasher, so only the garbage collector can free it.

    It has a payload of ``payload_bytes``, like multimodal data. After every ``freeze_every``
    finished requests, an unpaired ``gc.freeze()`` hides the garbage from all collections. If
    ``freeze_every`` is 0, this does not happen, and a trim frees the requests.
    """

    owner = "cyclic requests"
    segment = "malloc_in_use"
    payload_bytes: int = 4 * MIB
    freeze_every: int = 1


class StoredException(Fault, frozen=True, tag="stored_exception"):
    """The exception of a failed forward pass is stored with its traceback.

    The frames of the traceback keep the tensors of the step: ``bytes_per_request`` on the model's
    device.
    """

    owner = "stored exceptions"
    segment = "torch_allocated, malloc_in_use on a CPU"
    bytes_per_request: int = 1 * MIB


class SlowSteps(Fault, frozen=True, tag="slow_steps"):
    """No defect: the worker waits for ``wait_ms`` milliseconds after each step.

    It therefore streams as slowly as a large model, while the machine is idle.
    """

    owner = "nothing"
    segment = "none: time"
    cure = "none: no defect"
    wait_ms: int = 20


class AbortChoices(Fault, frozen=True, tag="abort_choices"):
    """The abort of a request for n > 1 choices reaches only the first choice.

    The other choices run to their ``max_tokens`` without a client.
    """

    owner = "requests of the worker"
    segment = "KV blocks of requests without a client"
