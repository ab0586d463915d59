"""How leaks come about: mechanisms of engines with a daily rhythm.

The rhythms are like those of healthy engines. How unsteady their memory is, ``views`` says,
and what some of them hold in good health is at most a third of their budget.
"""

from __future__ import annotations

import random

from leaklab.days import MINUTE, Days
from leaklab.demand import between_steps
from leaklab.leaks.basics import Mechanism
from leaklab.series import MIB, Curve, high_water, sawtooth
from leaklab.views import LONGEST


def _traffic(number: int) -> Curve:
    days = Days(f"leaking/{number}", LONGEST, later=True)
    return between_steps(days.usual_traffic(random.Random(number)), MINUTE)


MECHANISMS = (
    # Each time that the log's settings are read anew, a handler more is hung into it, which keeps
    # the last records in memory for an error that may come. The handlers of before are not removed.
    Mechanism(
        "log_handlers",
        "python_objects",
        role="frontend",
        shapes=("clock", "walk", "load", "steady"),
        load=_traffic(1),
    ),
    # A request for several answers has a parent that waits for all. If one of them is aborted
    # before it began, the parent waits on, with the answers that have come.
    Mechanism(
        "waiting_parents",
        "python_objects",
        role="frontend",
        shapes=("aborts", "overflow", "late"),
        load=_traffic(2),
    ),
    # Who profiles hangs a hook into each layer. The hook is removed from the layer that is there at
    # the end, and the layers of before an update of the weights are kept by theirs.
    Mechanism(
        "module_hooks",
        "python_objects",
        shapes=("gaps", "weekdays", "steady"),
        load=_traffic(3),
        beside={"other": sawtooth(120 * MIB, 2300), "other_in": "python_objects"},
    ),
    # A model in Python is loaded anew in an interpreter of its own within the process. Types that
    # were made in it are in the tables of the libraries that it used, and it cannot go.
    Mechanism(
        "subinterpreters",
        "python_objects",
        shapes=("clock", "gaps", "compounding"),
        load=_traffic(4),
    ),
    # An agent that decides who may ask what writes each decision down. While its collector refuses
    # them they wait in a list that has a bound in the manual only.
    Mechanism(
        "decision_logs",
        "python_objects",
        role="frontend",
        shapes=("errors", "weekdays", "walk"),
        load=_traffic(5),
        beside={"other": high_water(90 * MIB, (2400, 17_000, 40_000), 400)},
    ),
    # A web socket has a window to compress with. Where the client is gone without a farewell, the
    # socket is closed by the kernel and the window is left to a callback that is never called.
    Mechanism(
        "socket_windows",
        "malloc_in_use",
        shapes=("aborts", "overflow", "load"),
        load=_traffic(6),
    ),
    # The texts at which an answer stops are made into an automaton, which is kept by the list that
    # they came in. The list is a new one for each request.
    Mechanism(
        "stop_automata",
        "malloc_in_use",
        shapes=("load", "walk", "late"),
        accounted=450 * MIB,
        load=_traffic(7),
    ),
    # A router has a node for each prefix, with the engines that know it. When an engine is gone its
    # name is removed from the leaves, and the nodes above them stay.
    Mechanism(
        "router_nodes",
        "malloc_in_use",
        role="frontend",
        shapes=("prefixes", "settling", "steady"),
        load=_traffic(8),
        beside={"other": sawtooth(75 * MIB, 1250), "other_in": "retained"},
    ),
    # A request that is pushed out of the batch is written down with what it takes to go on. If it
    # ends by its deadline while it waits, nobody takes the record back.
    Mechanism(
        "resume_records",
        "malloc_in_use",
        shapes=("preemptions", "overflow", "steady"),
        load=_traffic(9),
    ),
    # A thread that is moved to the other socket of the machine gets a copy of the tables there. The
    # kernel moves threads back and forth, and each move makes a copy.
    Mechanism(
        "numa_copies",
        "anonymous_other",
        shapes=("walk", "gaps", "late"),
        accounted=550 * MIB,
        load=_traffic(10),
    ),
    # A plug-in is updated under a name with a number, since a library of the same name is not
    # loaded twice. Those of before are never unloaded, for their threads still run.
    Mechanism(
        "plugin_images",
        "anonymous_other",
        shapes=("gaps", "clock", "steady"),
        load=_traffic(11),
        beside={"other": sawtooth(140 * MIB, 3700), "other_in": "python_objects"},
    ),
    # Texts are split by several processes, which exchange them in files in memory. A process that
    # is killed by a time limit leaves its files, and is started anew with other names.
    Mechanism(
        "exchange_files",
        "shared",
        shapes=("prompts", "overflow", "lumps"),
        load=_traffic(12),
    ),
    # A compiler tells profilers where its code lies, in a file in memory that each compiled kernel
    # makes longer. It is there for a profiler that nobody uses.
    Mechanism(
        "code_maps",
        "shared",
        shapes=("settling", "weekdays", "load"),
        load=_traffic(13),
    ),
    # Steps are prepared while the last one runs, and the logits of all ranks are held by a promise
    # of them. A promise that is cancelled with its request is never looked at again.
    Mechanism(
        "gathered_logits",
        "torch_allocated",
        shapes=("aborts", "tokens", "walk"),
        load=_traffic(14),
    ),
    # The tensors of all adapters are stacked. When one has a higher rank the stack is made anew,
    # and a captured graph keeps the old one as its input.
    Mechanism(
        "adapter_stacks",
        "torch_allocated",
        shapes=("adapters", "gaps", "steady"),
        load=_traffic(15),
        beside={"device_other": sawtooth(150 * MIB, 4100)},
    ),
    # A capture that fails in the middle leaves its private pool to the allocator, which cannot use
    # it for anything else, and the capture is tried again with the next batch.
    Mechanism(
        "failed_captures",
        "torch_reserved_unused",
        shapes=("clock", "overflow", "late"),
        load=_traffic(16),
    ),
    # A figure that speaks is encoded as a film on the device. A viewer who closes the window ends
    # the connection, and the session of the encoder is left without an owner.
    Mechanism(
        "encoder_sessions",
        "non_torch",
        shapes=("audios", "weekdays", "steady"),
        load=_traffic(17),
    ),
    # Pictures are made smaller by a library that has a context for each stream of work. Streams
    # come from a pool that makes new ones in a crowd, and contexts are found by the stream.
    Mechanism(
        "resize_contexts",
        "non_torch",
        shapes=("pictures", "overflow", "late"),
        load=_traffic(18),
        beside={"other": sawtooth(60 * MIB, 900), "other_in": "python_objects"},
    ),
    # A server of models in C++, without a probe, makes a factory of answers for each request that
    # may have many. One whose last answer is empty is not told that it was the last.
    Mechanism(
        "foreign_factories",
        "anonymous_other",
        malloc=False,
        shapes=("load", "walk", "telegraph", "steady"),
        load=_traffic(19),
    ),
    # A collector of metrics in the pod, in Go and without a probe, has the address of each client
    # among its labels, and addresses of phones are hardly ever the same.
    Mechanism(
        "foreign_series",
        "anonymous_other",
        role="frontend",
        malloc=False,
        shapes=("weekdays", "settling", "humps"),
        load=_traffic(20),
        beside={"other": sawtooth(85 * MIB, 640)},
    ),
)
