"""How leaks come about: mechanisms of engines that are not at rest.

Who leaks is seldom at rest: some of these engines collect garbage, keep what a burst has freed or
fill a cache meanwhile.
"""

from __future__ import annotations

from leaklab.leaks.basics import Mechanism
from leaklab.series import MIB, diurnal, high_water, sawtooth

MECHANISMS = (
    # A subscriber of the cache's events has gone without a word. Its queue has no bound, so each
    # block that is stored or removed adds an event of some hundred bytes.
    Mechanism(
        "unread_events",
        "malloc_in_use",
        noises=(17 * MIB,),
        shapes=("steady", "load", "tokens", "late"),
    ),
    # The list of blocks of a transfer is freed when the transfer ends, and an aborted one does not.
    # It is some kilobytes long for each thousand tokens.
    Mechanism(
        "transfer_descriptors",
        "malloc_in_use",
        noises=(26 * MIB,),
        shapes=("aborts", "load", "regimes", "uneven"),
        load=diurnal(5, 15, 6840),
        beside={"other": high_water(110 * MIB, (900, 9000, 30_000), 240), "other_in": "retained"},
    ),
    # Tasks in the background are kept in a set, lest they be collected early, and nobody takes out
    # the finished ones: each has its frame, and with it the request's text.
    Mechanism(
        "background_tasks",
        "python_objects",
        role="frontend",
        noises=(14 * MIB,),
        shapes=("steady", "load", "adopted", "late"),
        beside={"other": sawtooth(70 * MIB, 1100), "other_in": "python_objects", "collects": 1100},
    ),
    # The parser of tool calls has a state for each request, which the normal end removes, and a
    # client that leaves does not.
    Mechanism(
        "parser_states",
        "python_objects",
        noises=(20 * MIB,),
        shapes=("aborts", "regimes", "steady", "uneven"),
        accounted=800 * MIB,
    ),
    # An adapter's file is mapped privately and converted in place. A view of one tensor, kept for
    # its shape, holds the whole mapping after the adapter has gone.
    Mechanism(
        "adapter_mappings",
        "anonymous_other",
        noises=(35 * MIB,),
        shapes=("stairs", "uneven", "regimes", "late"),
    ),
    # Pools of decoded frames are made anew for each resolution of a video, and a reference to one
    # frame keeps its pool: 30 frames of 3 MiB.
    Mechanism(
        "frame_pools",
        "anonymous_other",
        noises=(28 * MIB,),
        shapes=("pictures", "uneven", "bursty", "late"),
        load=diurnal(4, 12, 9720),
    ),
    # A large result is handed over in a block of shared memory of its own. If the receiver has
    # given up by then, nobody removes the block.
    Mechanism(
        "result_blocks",
        "shared",
        noises=(42 * MIB,),
        shapes=("aborts", "bursty", "steady", "regimes"),
    ),
    # Each thread that calls the library of matrix products has a handle with a workspace, and the
    # threads of a pool that is scaled down leave theirs.
    Mechanism(
        "library_handles",
        "non_torch",
        noises=(12 * MIB,),
        shapes=("stairs", "late", "uneven", "steady"),
        load=diurnal(6, 17, 5400),
    ),
    # A small tensor that lives for long lies at the end of each large segment, which therefore can
    # be neither given back nor used for a prompt of the same size.
    Mechanism(
        "pinned_segments",
        "torch_reserved_unused",
        noises=(31 * MIB,),
        shapes=("adopted", "uneven", "regimes", "late"),
    ),
    # Embeddings of positions are kept for each size of picture, by a decorator without a bound: the
    # clients of a new app send pictures of any size.
    Mechanism(
        "position_grids",
        "torch_allocated",
        noises=(11 * MIB,),
        shapes=("pictures", "adopted", "renewed", "steady"),
        load=diurnal(4, 11, 7920),
    ),
    # A mean is kept as a sum of tensors, not of numbers, and so is all that they were made from.
    Mechanism(
        "metric_tensors",
        "torch_allocated",
        noises=(24 * MIB,),
        shapes=("tokens", "load", "steady", "regimes"),
        beside={"device_other": sawtooth(160 * MIB, 2700)},
    ),
    # A gateway in front of the engine, without a probe, leaves a thread of its runtime waiting for
    # each stream that was cancelled, with the stream's buffers.
    Mechanism(
        "foreign_gateway",
        "anonymous_other",
        role="frontend",
        malloc=False,
        noises=(16 * MIB,),
        shapes=("aborts", "load", "late", "steady"),
        load=diurnal(5, 14, 10_080),
    ),
    # A server of models in another language, without a probe, keeps the decoded input of requests
    # that fail its checks. Its heap grows and is collected meanwhile.
    Mechanism(
        "foreign_pipeline",
        "anonymous_other",
        malloc=False,
        noises=(29 * MIB,),
        shapes=("pictures", "steady", "uneven", "adopted"),
        beside={"other": sawtooth(90 * MIB, 430)},
    ),
)
