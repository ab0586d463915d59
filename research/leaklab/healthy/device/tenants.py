"""What only looks like a leak: what else a device is used for.

Each is bounded as in ``host/kernels``.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from itertools import accumulate

from leaklab.demand import beating, between_steps, drifting, rushes, two_humps
from leaklab.healthy_runs import Spells, integral, last, levels, long
from leaklab.series import DAY, GIB, HOUR, MIB, Build, Series, diurnal
from leaklab.views import LONGEST, habits


def _mapped_blocks(seed: int) -> Series:
    """Blocks of the cache are mapped as contexts need them, not all at the start. They take some
    GiB by the afternoon, and the engine accounts for each on the device."""
    rng = random.Random(seed)
    load, bound = two_humps(2, 22, rng.uniform(0, DAY)), rng.uniform(1.5, 4) * GIB
    tau, minutes, held = rng.uniform(0.3, 2) * HOUR, list[float](), 0.0
    for minute in range(int(LONGEST / 60) + 1):
        held += (bound * load(minute * 60) / 24 - held) * 60 / tau
        minutes.append(held)
    blocks = between_steps(minutes, 60)
    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=blocks,
        device_other_in="torch_allocated",
        ledger=blocks,
        ledger_bound=int(bound),
        ledger_kind="device",
        load=load,
        counters={"kv_usage_ratio": lambda t: blocks(t) / bound},
    )


def _trained_in_place(seed: int) -> Series:
    """An adapter is trained on the engine's own device, each few hours for a quarter of an hour or
    so: its gradients and the states of its optimizer are there meanwhile, and its batch on the
    host."""
    rng = random.Random(seed)
    trains = Spells(rng, (1.2 * HOUR, 7 * HOUR), (300, 2400), LONGEST)
    states, grows = rng.uniform(170, 390) * MIB, rng.uniform(10, 200)
    batch, load = rng.uniform(40, 120) * MIB, drifting(seed, 8, HOUR)
    return long(
        seed,
        **habits(seed),
        other=lambda t: batch * trains.on(t),
        device=True,
        device_other=lambda t: states * trains.on(t) * min(1.0, trains.since(t) / grows),
        device_other_in="torch_allocated",
        load=load,
    )


def _diagnostics_in_passing(seed: int) -> Series:
    """An agent of the node looks after the devices. Each few hours it runs a short test on each, in
    a process of its own with a context and some buffers; after a fault it runs a longer one."""
    rng = random.Random(seed)
    apart, long_one = (HOUR, 6 * HOUR), rng.uniform(900, 3 * HOUR)
    short_ones = Spells(rng, apart, (40, 240), LONGEST)
    long_ones = Spells(rng, (12 * HOUR, 40 * HOUR), (long_one, long_one + 1), LONGEST)
    context, buffers = rng.uniform(180, 260) * MIB, rng.uniform(60, 190) * MIB

    def tested(t: float) -> float:
        if not (short_ones.on(t) or long_ones.on(t)):
            return 0.0
        return context + buffers * min(1.0, (t % 97) / 60)

    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=tested,
        device_other_in="non_torch",
        load=diurnal(4, 17),
    )


def _pooled_prompts(seed: int) -> Series:
    """For an embedding of a long document the states of all its tokens stay on the device until its
    last chunk is done: 8 KiB for each of up to 50,000 tokens. Documents come in jobs."""
    rng = random.Random(seed)
    jobs, at = Spells(rng, (0.5 * HOUR, 6 * HOUR), (600, 3 * HOUR), LONGEST), 0.0
    changes, chunks = list[tuple[float, float]](), 6
    while at < LONGEST:
        at += rng.expovariate(1 / (15 if jobs.on(at) else 900))
        size, lasts = min(360.0, 18 * rng.paretovariate(0.8)) * MIB, rng.uniform(5, 80)
        changes += [(at + lasts * chunk / chunks, size / chunks) for chunk in range(chunks)]
        at += lasts
        changes.append((at, -size))
    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=levels(changes),
        device_other_in="torch_allocated",
        load=lambda t: 13.0 if jobs.on(t) else 4.0,
        counters={"prompt_tokens_total": integral(lambda t: 8000 if jobs.on(t) else 500, LONGEST)},
    )


def _cross_attention_slots(seed: int) -> Series:
    """Speech is transcribed in slots, each with the states of its recording. A slot is made when
    more recordings than ever before are in work at once, and is used again from then on."""
    rng = random.Random(seed)
    load, slots = drifting(seed, 7, rng.uniform(0.5, 3) * HOUR, 0.5), rng.choice((16, 24, 32))
    each, most, records = rng.uniform(110, 220) * MIB / slots, 0, list[tuple[float, float]]()
    at = 0.0
    while at < LONGEST:
        at += rng.expovariate(1 / 20)
        needed = min(slots, round(rng.gauss(load(at), math.sqrt(load(at)))))
        if needed > most:
            records.append((at, (needed - most) * each))
            most = needed
    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=levels(records),
        device_other_in="torch_allocated",
        load=load,
        counters={"audios_total": integral(lambda t: 0.06 * load(t), LONGEST)},
    )


def _merged_adapters(seed: int) -> Series:
    """While most requests are for one adapter, the layers that it changes are there once more with
    the adapter merged into them. The copy goes when another one is asked for more."""
    rng = random.Random(seed)
    hot = Spells(rng, (0.4 * HOUR, 5 * HOUR), (900, 6 * HOUR), LONGEST)
    size, merges = rng.uniform(150, 380) * MIB, rng.uniform(5, 300)
    layers = rng.randint(8, 32)

    def merged(t: float) -> float:
        done = math.floor(layers * min(1.0, hot.since(t) / merges)) / layers
        return size * done * hot.on(t)

    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=merged,
        device_other_in="torch_allocated",
        load=beating(3, 16, 3 * HOUR, rng.uniform(4, 9) * HOUR),
        counters={"adapters_total": integral(lambda t: 0.004 * (1 + hot.on(t)), LONGEST)},
    )


def _elastic_ranks(seed: int) -> Series:
    """Experts are spread over more machines as the day gets busier, and over fewer by night. Each
    rank has a buffer for each other one, made anew at each change; those of before go with the last
    step that used them."""
    rng = random.Random(seed)
    changes = [0.0, *accumulate(rng.uniform(0.7, 7) * HOUR for _ in range(60))]
    ranks = [rng.choice((4, 6, 8, 10, 12, 16)) for _ in changes]
    each, overlaps = rng.uniform(10, 20) * MIB, rng.uniform(20, 300)

    def buffers(t: float) -> float:
        turn = bisect_right(changes, t) - 1
        old = ranks[turn - 1] if turn and t - last(changes, t) < overlaps else 0
        return each * (ranks[turn] + 0.5 * old)

    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=buffers,
        device_other_in="non_torch",
        load=rushes(seed, 6, 20, (HOUR, 5 * HOUR), (HOUR, 5 * HOUR)),
    )


FAMILIES: dict[str, Build] = {
    "mapped blocks": _mapped_blocks,
    "trained in place": _trained_in_place,
    "diagnostics in passing": _diagnostics_in_passing,
    "pooled prompts": _pooled_prompts,
    "cross-attention slots": _cross_attention_slots,
    "merged adapters": _merged_adapters,
    "elastic ranks": _elastic_ranks,
}
