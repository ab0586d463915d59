"""What only looks like a hang: engines that make no step for some seconds.

None is still for half a minute while it has work.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import chain

from leaklab.healthy.steps.turns import ENDS, LONGEST_S, queues, totals, waiting_engine
from leaklab.healthy_runs import Spells, integral
from leaklab.series import HOUR, Build, Series, flat


def _head_of_line(seed: int) -> Series:
    """The first in the queue has a prompt for which there is no room yet, and nobody may pass it.
    So requests that run end one by one and the others wait. Then the prompt has the engine for
    itself, in steps of some seconds each."""
    rng = random.Random(seed)
    large = Spells(rng, (400, 3000), (90, 900), ENDS)
    count, drains, chunk = rng.randint(4, 24), rng.uniform(20, 200), rng.randint(2, 15)
    comes, most = rng.uniform(0.05, 1.0), rng.uniform(10, 120)

    def running(t: float) -> float:
        return max(1, count * (1 - large.since(t) / drains)) if large.on(t) else count

    def waiting(t: float) -> float:
        return min(most, comes * large.since(t)) if large.on(t) else 0

    return waiting_engine(
        seed,
        lambda t: waiting(t) / most,
        "python_objects",
        paused=lambda t: large.on(t) and large.since(t) > drains and int(t) % chunk > 0,
        load=flat(float(count)),
        counters=queues(running, waiting),
    )


def _endless_thoughts(seed: int) -> Series:
    """All requests of the moment think for an hour or two before they answer. None ends meanwhile,
    and each holds more from minute to minute, until it ends and another one begins."""
    rng = random.Random(seed)
    count, usual = rng.randint(1, 10), rng.uniform(0.4, 2) * HOUR
    begins = [sorted(rng.uniform(0, ENDS) for _ in range(int(ENDS / usual))) for _ in range(count)]
    done, pauses = sorted(chain.from_iterable(begins)), Spells(rng, (20, 200), (1, 8), ENDS)

    def thought(t: float) -> float:
        since = (t - ends[bisect_right(ends, t) - 1] if t >= ends[0] else t for ends in begins)
        return min(1.0, sum(since) / (2.5 * usual * count))

    return waiting_engine(
        seed,
        thought,
        "python_objects",
        paused=pauses.on,
        load=flat(float(count)),
        counters=queues(flat(float(count)), flat(0.0)) | {"requests_total": totals(done)},
    )


def _live_microphones(seed: int) -> Series:
    """Speech is written down as it is spoken. A request runs for the whole meeting and makes a step
    when somebody has said something; while all are silent it waits, up to a third of a minute."""
    rng = random.Random(seed)
    silence = Spells(rng, (2, rng.uniform(8, 40)), (1, LONGEST_S), ENDS)
    meetings, count = Spells(rng, (600, 4000), (60, 300), ENDS), rng.randint(1, 4)
    spoken = integral(lambda t: 0.3 * (not silence.on(t)), ENDS)
    return waiting_engine(
        seed,
        lambda t: 0.0 if meetings.on(t) else min(1.0, meetings.since(t) / 4000),
        "malloc_in_use",
        paused=silence.on,
        load=flat(float(count)),
        counters=queues(flat(float(count)), flat(0.0)) | {"audios_total": spoken},
    )


def _rationed_tenants(seed: int) -> Series:
    """A tenant who has used up what was paid for goes on with a few tokens each dozen seconds. When
    all who run are such tenants, the engine has requests and mostly nothing to do."""
    rng = random.Random(seed)
    rationed = Spells(rng, (300, 2500), (300, 3000), ENDS)
    every, count = rng.uniform(4, LONGEST_S), rng.randint(2, 30)
    return waiting_engine(
        seed,
        lambda t: min(1.0, rationed.since(t) / 1500) * rationed.on(t),
        "python_objects",
        paused=lambda t: rationed.on(t) and t % every > 1.0,
        load=flat(float(count)),
        counters=queues(flat(float(count)), flat(0.0)),
    )


def _withdrawn_notices(seed: int) -> Series:
    """The provider says that it wants its machine back. The engine takes in nobody more, ends what
    runs and writes its cache to a disk, with all others waiting. Then the notice is withdrawn, as
    most are, and it goes on where it was."""
    rng = random.Random(seed)
    notices = Spells(rng, (600, 5000), (60, 200), ENDS)
    count, comes, writes = rng.randint(4, 20), rng.uniform(0.05, 0.6), rng.uniform(4, LONGEST_S)

    def noticed(t: float) -> float:
        """For how long, in seconds."""
        return notices.since(t) if notices.on(t) else 0.0

    def running(t: float) -> float:
        return max(1.0, count * (1 - noticed(t) / 60))

    return waiting_engine(
        seed,
        lambda t: min(1.0, noticed(t) / 100),
        "shared",
        paused=lambda t: noticed(t) > 40 and not notices.on(t + writes),
        load=flat(float(count)),
        counters=queues(running, lambda t: comes * noticed(t)),
    )


def _renewed_attestation(seed: int) -> Series:
    """The device computes on encrypted memory, and proves each quarter of an hour or so that it may
    be trusted. New keys are agreed on meanwhile, with one processor busy, and no step is made."""
    rng = random.Random(seed)
    every, lasts = rng.uniform(200, 1500), rng.uniform(3, LONGEST_S)
    cores, count = rng.uniform(0.3, 1.5), rng.randint(3, 25)
    renews = integral(lambda t: cores + (t % every < lasts), ENDS)
    return waiting_engine(
        seed,
        lambda t: min(1.0, (t % every) / lasts) * (t % every < 3 * lasts),
        "malloc_in_use",
        paused=lambda t: t % every < lasts,
        cpu_s=renews,
        load=flat(float(count)),
        counters=queues(flat(float(count)), flat(0.0)),
    )


FAMILIES: dict[str, Build] = {
    "head of line": _head_of_line,
    "endless thoughts": _endless_thoughts,
    "live microphones": _live_microphones,
    "rationed tenants": _rationed_tenants,
    "withdrawn notices": _withdrawn_notices,
    "renewed attestation": _renewed_attestation,
}
