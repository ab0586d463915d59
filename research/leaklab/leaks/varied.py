"""How leaks come about: mechanisms under a load that changes.

Their engines are as busy as healthy ones. How unsteady their memory is, ``views`` says.
"""

from __future__ import annotations

from leaklab.demand import beating, drifting, rushes, two_humps
from leaklab.leaks.basics import Mechanism
from leaklab.series import HOUR, MIB, diurnal, high_water, sawtooth

MECHANISMS = (
    # A time limit of an hour or a day is a timer with a closure over its request. A timer that was
    # cancelled is taken out of the event loop's heap only when most of them are cancelled, and the
    # long ones of health checks never are.
    Mechanism(
        "cancelled_timers",
        "python_objects",
        role="frontend",
        shapes=("load", "humps", "compounding"),
        load=drifting(21, 11, 2400),
    ),
    # A warning has the request's name in its text, so it is a new one each time, and the module's
    # registry of warnings keeps each text to warn but once.
    Mechanism(
        "warning_registry",
        "python_objects",
        shapes=("errors", "telegraph", "steady"),
        load=two_humps(2, 14, 9.5 * HOUR),
    ),
    # A class is made from the schema of each tool. Classes refer to themselves, to their validators
    # and from a registry of subclasses, and are not collected.
    Mechanism(
        "schema_classes",
        "python_objects",
        role="frontend",
        shapes=("settling", "jobs", "late"),
        load=rushes(22, 3, 17, (1200, 5000), (500, 2500)),
        beside={"other": sawtooth(50 * MIB, 1700), "other_in": "python_objects"},
    ),
    # A block of the prefix cache has an entry with its hash, its parent and its tokens. The block
    # is used again in the end, and its entry stays where an adapter's name had changed the hash.
    Mechanism(
        "block_metadata",
        "python_objects",
        shapes=("prefixes", "load", "steady"),
        accounted=500 * MIB,
        load=beating(4, 18, 2100, 5300),
    ),
    # Who fetches a picture over a new connection reads half a MiB of certificates for it. After a
    # failed handshake the connection is in nobody's pool, and nobody closes it.
    Mechanism(
        "trust_stores",
        "malloc_in_use",
        shapes=("errors", "crowds", "humps"),
        load=rushes(23, 4, 13, (700, 3900), (500, 3100)),
    ),
    # A request with a seed has generators of its own, by the place that it has in the batch. Where
    # the batch is condensed the entry moves, and the one of before is not overwritten.
    Mechanism(
        "seeded_generators",
        "malloc_in_use",
        shapes=("load", "tokens", "late"),
        load=diurnal(4, 16, 6600),
        beside={"other": high_water(70 * MIB, (1200, 9900, 25_000), 200), "other_in": "retained"},
    ),
    # One message is used again for each call of a stream, and so is the arena that its fields were
    # taken from, which is emptied only when the stream ends. Streams between servers never end.
    Mechanism(
        "message_arenas",
        "malloc_in_use",
        shapes=("steady", "compounding", "telegraph"),
        load=drifting(24, 8, 4000),
    ),
    # Reads of the disk tier go through a ring with buffers that are registered with the kernel. A
    # ring is made anew for each device of the tier, and one with reads under way cannot be closed.
    Mechanism(
        "uring_buffers",
        "anonymous_other",
        shapes=("jobs", "telegraph", "steady"),
        accounted=600 * MIB,
        load=two_humps(4, 16, 6 * HOUR),
    ),
    # A peer that comes back makes a new pair of queues, with its receive buffers. The half that the
    # engine had of the old pair waits for a farewell that is never sent.
    Mechanism(
        "half_open_pairs",
        "anonymous_other",
        shapes=("compounding", "crowds", "humps"),
        load=beating(3, 15, 3500, 8100),
    ),
    # A kernel is compiled in a folder of its own in memory. Where the compiler fails the folder is
    # kept, lest someone should want to look at it.
    Mechanism(
        "compiler_scratch",
        "shared",
        shapes=("jobs", "settling", "lumps"),
        load=drifting(25, 6, 3300),
    ),
    # A watchdog writes down the last thousand collectives whenever one was slow, to a file in
    # memory whose name has the time in it.
    Mechanism(
        "flight_dumps",
        "shared",
        shapes=("telegraph", "uneven", "late"),
        load=rushes(26, 5, 16, (800, 4400), (600, 3000)),
        beside={"other": sawtooth(40 * MIB, 830)},
    ),
    # Buffers for the records of a profile are asked for by the driver and given back when they were
    # read. The last ones of each profile, which are not full, are not read.
    Mechanism(
        "activity_buffers",
        "non_torch",
        shapes=("jobs", "humps", "steady"),
        load=two_humps(3, 18, 11 * HOUR),
    ),
    # Processes share the device through a server. What a process had that was killed within a
    # kernel the server keeps, until it is started anew itself.
    Mechanism(
        "ghost_contexts",
        "non_torch",
        shapes=("lumps", "crowds", "steady"),
        load=diurnal(5, 14, 7500),
        beside={"other": sawtooth(90 * MIB, 1450), "other_in": "python_objects"},
    ),
    # A client sends embeddings in the place of a prompt. The answer refers to its request for the
    # sake of its usage, and a store of answers keeps the last thousand for each client.
    Mechanism(
        "prompt_embeddings",
        "torch_allocated",
        shapes=("prompts", "load", "compounding"),
        load=beating(5, 17, 2900, 6100),
    ),
    # Experts that move are copied to a shadow first. When the next plan comes before a move is done
    # the shadow is dropped from the plan, and stays in the list of what is under way.
    Mechanism(
        "expert_shadows",
        "torch_allocated",
        shapes=("jobs", "humps", "late"),
        load=drifting(27, 10, 2000),
        beside={"device_other": sawtooth(110 * MIB, 2500)},
    ),
    # A tensor that a second stream has used is free only when an event in that stream was met. The
    # stream waits for a peer, and the events behind it are not met.
    Mechanism(
        "pending_events",
        "torch_reserved_unused",
        shapes=("telegraph", "tokens", "steady"),
        load=rushes(28, 4, 15, (1000, 5600), (700, 3500)),
    ),
    # A separate server that splits texts in tokens, without a probe, keeps what it has found for
    # each word. Words are numbers, names and typing errors, too.
    Mechanism(
        "foreign_tokenizer",
        "anonymous_other",
        role="frontend",
        malloc=False,
        shapes=("settling", "prefixes", "humps"),
        load=drifting(29, 9, 5000),
    ),
    # The master of a shared cache, in C++ and without a probe, drops an object whose lease is over,
    # and keeps the record of its replicas if one of them was not reached.
    Mechanism(
        "foreign_cache_master",
        "anonymous_other",
        malloc=False,
        shapes=("telegraph", "humps", "load", "steady"),
        load=two_humps(3, 13, 4 * HOUR),
        beside={"other": sawtooth(55 * MIB, 520)},
    ),
)
