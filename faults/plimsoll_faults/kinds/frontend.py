"""Faults of the frontend."""

from __future__ import annotations

from plimsoll_api.admin import Role
from plimsoll_faults.kinds.base import Fault


class UnregisteredAbort(Fault, frozen=True, tag="abort_unregistered"):
    """A client disconnects after its request was registered and before the first token.

    The abort does not find the request, and the frontend keeps the entry with ``payload_bytes`` of
    media.
    """

    owner = "request states of the frontend"
    segment = "python_objects, malloc_in_use"
    cure = "engine restart"
    process = Role.FRONTEND
    payload_bytes: int = 64 << 10


class TokenizerCache(Fault, frozen=True, tag="tokenizer_cache"):
    """The frontend keeps the text and the tokens of each prompt, ``repeat`` times.

    The defective cache is meant to avoid tokenizing a prompt again.
    """

    owner = "the tokenizer's cache of prompts"
    segment = "python_objects, malloc_in_use"
    cure = "engine restart"
    process = Role.FRONTEND
    repeat: int = 16


class MetricLabels(Fault, frozen=True, tag="metric_labels"):
    """A metric has the ID of the request as a label.

    Each request adds a time series to the registry and to every scrape. No series is ever removed.
    """

    owner = "time series of the metrics registry"
    segment = "python_objects"
    cure = "engine restart"
    process = Role.FRONTEND


class DescriptorGrowth(Fault, frozen=True, tag="descriptor_growth"):
    """For each request, a pipe is opened, of which only one end is closed.

    The pipe wakes the thread that watches for the client's disconnect. At the limit of open files,
    the server accepts no more connections.
    """

    owner = "pipes of requests that ended"
    segment = "none: file descriptors"
    cure = "engine restart"
    process = Role.FRONTEND
