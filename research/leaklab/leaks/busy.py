"""How leaks come about: mechanisms beside usual work.

Their engines are as busy as healthy ones: demand comes and goes, garbage is collected, and caches
fill beside the leak. How unsteady their memory is, ``views`` says.
"""

from __future__ import annotations

from leaklab.demand import beating, drifting, rushes, two_humps
from leaklab.leaks.basics import Mechanism
from leaklab.series import HOUR, MIB, diurnal, high_water, sawtooth

MECHANISMS = (
    # A counter of the metrics has the session's id among its labels, so each session adds a child,
    # with its buckets, that is never removed.
    Mechanism(
        "request_labels",
        "python_objects",
        role="frontend",
        shapes=("load", "prompts", "escalating", "steady"),
        load=two_humps(4, 17, 8.5 * HOUR),
    ),
    # A processor of logits that came with a request is a closure over it. The list of changes of
    # the batch keeps those of requests that ended between two steps.
    Mechanism(
        "processor_closures",
        "python_objects",
        shapes=("jittered", "load", "crowds", "late"),
        load=drifting(1, 9, 1500),
        beside={"other": sawtooth(80 * MIB, 1300), "other_in": "python_objects"},
    ),
    # A session with a server of tools is opened for each answer, and stays open if a call of a tool
    # failed: its streams and its buffered events with it.
    Mechanism(
        "tool_sessions",
        "python_objects",
        role="frontend",
        shapes=("errors", "crowds", "late"),
        load=rushes(2, 5, 16, (900, 5400), (300, 2700)),
    ),
    # What a library has found to be the best algorithm is kept by shape and by the alignment of the
    # operands. The alignment is nearly always new, so that no entry is ever met again.
    Mechanism(
        "algorithm_tables",
        "malloc_in_use",
        shapes=("steady", "prompts", "slowing"),
        load=beating(4, 16, 2400, 3100),
        beside={"other": high_water(90 * MIB, (600, 7200, 21_600), 300), "other_in": "retained"},
    ),
    # Work for the host is queued in a stream with a context of its own, which it frees when it
    # runs. After an error in the stream it does not run.
    Mechanism(
        "callback_contexts",
        "malloc_in_use",
        shapes=("errors", "uneven", "steady"),
        accounted=600 * MIB,
        load=diurnal(3, 15, 8640),
    ),
    # A transfer is cut in slices, each with a staging buffer. When a peer answers late, the slice
    # is sent again by another way and the first buffer is forgotten.
    Mechanism(
        "staging_slices",
        "anonymous_other",
        shapes=("regimes", "jittered", "crowds"),
        accounted=700 * MIB,
        load=rushes(3, 6, 18, (600, 3600), (400, 2400)),
    ),
    # A process that prepares pictures is replaced when it does not answer in time. Nobody ends the
    # old one, which waits on for work with its libraries and its last picture.
    Mechanism(
        "orphaned_processors",
        "anonymous_other",
        shapes=("pictures", "lumps", "escalating"),
        load=drifting(4, 7, 2700),
    ),
    # A download of an adapter that breaks off leaves its part in a file system in memory, and is
    # tried again under another name.
    Mechanism(
        "partial_downloads",
        "shared",
        shapes=("adapters", "uneven", "steady"),
        load=two_humps(3, 14, 7 * HOUR),
    ),
    # Clients register regions of shared memory for their tensors. One that is killed takes nothing
    # back, and the server holds its regions open.
    Mechanism(
        "client_regions",
        "shared",
        shapes=("aborts", "escalating", "crowds"),
        load=beating(3, 13, 1900, 4700),
        beside={"other": sawtooth(60 * MIB, 2000)},
    ),
    # Each thread that decodes pictures on the device has a state of its own, and the states of
    # threads that ended after a damaged picture stay.
    Mechanism(
        "decoder_states",
        "non_torch",
        shapes=("pictures", "lumps", "steady"),
        load=rushes(5, 4, 15, (1200, 7200), (600, 3600)),
    ),
    # A convolution gets a plan with a workspace for each length of a recording. Lengths are hardly
    # ever the same, and plans have no bound.
    Mechanism(
        "convolution_plans",
        "non_torch",
        shapes=("audios", "slowing", "escalating"),
        load=drifting(6, 8, 1800),
        beside={"other": sawtooth(70 * MIB, 950), "other_in": "python_objects"},
    ),
    # A sequence of a model with recurrent layers is given a new state when it goes on after a
    # preemption, while its old state stays in the table.
    Mechanism(
        "recurrent_states",
        "torch_allocated",
        shapes=("tokens", "jittered", "late"),
        load=diurnal(6, 19, 5100),
        beside={"device_other": sawtooth(140 * MIB, 3300)},
    ),
    # Vectors that steer the model come with an adapter and lie on the device. The adapter is
    # evicted in the end, its vectors never.
    Mechanism(
        "steering_vectors",
        "torch_allocated",
        shapes=("adapters", "regimes", "spells"),
        load=two_humps(5, 15, 9 * HOUR),
    ),
    # A pool for tensors that peers write to is made for each new group of ranks. A pool of a group
    # that is gone has no tensors any more, but a handle to it is left.
    Mechanism(
        "symmetric_pools",
        "torch_reserved_unused",
        shapes=("lumps", "escalating", "late"),
        load=drifting(7, 10, 3600),
    ),
    # A server in C++, without a probe, keeps prompts and their states in memory for conversations
    # that may go on. Its bound counts conversations, but not the turns of each.
    Mechanism(
        "foreign_prompt_store",
        "anonymous_other",
        malloc=False,
        shapes=("prompts", "load", "steady", "slowing"),
        load=beating(2, 9, 3300, 7700),
    ),
    # A proxy in front of the engine, without a probe, keeps what it has read of an answer for a
    # second try. A stream that breaks off is tried no more, and keeps its buffer.
    Mechanism(
        "foreign_ingress",
        "anonymous_other",
        role="frontend",
        malloc=False,
        shapes=("aborts", "errors", "jittered"),
        load=rushes(8, 5, 17, (1500, 6000), (500, 4000)),
        beside={"other": sawtooth(60 * MIB, 610)},
    ),
)
