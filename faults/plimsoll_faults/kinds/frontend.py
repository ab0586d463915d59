"""Faults of the frontend."""

from __future__ import annotations

from plimsoll_api.admin import Role
from plimsoll_faults.kinds.base import Fault


class UnregisteredAbort(Fault, frozen=True, tag="abort_unregistered"):
    """A client disconnects after the registration of its request and before the first token.

    The abort finds no request, and the frontend keeps the entry with ``payload_bytes`` of media.
    """

    owner = "request states of the frontend"
    segment = "python_objects, malloc_in_use"
    cure = "engine restart"
    process = Role.FRONTEND
    payload_bytes: int = 64 << 10


class TokenizerCache(Fault, frozen=True, tag="tokenizer_cache"):
    """The frontend keeps the text and the tokens of each prompt, ``repeat`` times.

    The intention is to avoid a second tokenization.
    """

    owner = "the tokenizer's memory of prompts"
    segment = "python_objects, malloc_in_use"
    cure = "engine restart"
    process = Role.FRONTEND
    repeat: int = 16


class MetricLabels(Fault, frozen=True, tag="metric_labels"):
    """A metric has the id of the request as a label.

    Each request adds a time series to the registry and to every scrape, and none is ever removed.
    """

    owner = "time series of the metrics registry"
    segment = "python_objects"
    cure = "engine restart"
    process = Role.FRONTEND


class DescriptorGrowth(Fault, frozen=True, tag="descriptor_growth"):
    """A pipe wakes the thread that watches for each client's disconnect.

    The end of the request closes only one end of the pipe. At the limit of open files, no
    connection is accepted.
    """

    owner = "pipes of requests that ended"
    segment = "none: file descriptors"
    cure = "engine restart"
    process = Role.FRONTEND
