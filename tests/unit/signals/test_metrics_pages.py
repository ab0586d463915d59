"""Metrics pages of real engines by version, and pages made at random from the schema.

Each file in ``pages`` says whether it was recorded or written from an engine's sources. Tests
``signals/metrics_page.py`` and ``act/adapters/external_load.py``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from plimsoll_api.admin import Load
from plimsoll_api.trace import Sample
from plimsoll_sidecar.act.adapters.external_load import ExternalLoad, read_load
from plimsoll_sidecar.act.adapters.external_profile import SGLANG, VLLM, EngineProfile
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.detect.losses import MIN_IDLE_S, CapacityWatch
from plimsoll_sidecar.detect.stall import StallWatch
from plimsoll_sidecar.signals.metrics_page import make_page_reader

PAGES = Path(__file__).with_name("pages")

# running, waiting, share of the cache, prompt tokens, generated tokens, requests, steps
VLLM_ONE = (0, 0, 0.0, 8, 20, 1, 20)
TWO_ENGINES = (3, 1, 0.5, 1500, 1150, 11, 107)
RAY = (2, 1, 0.25, 1200, 900, 8, 77)
RECORDED = {
    "vllm-0.24-single": VLLM_ONE,
    "vllm-0.32-single": VLLM_ONE,
    "vllm-0.32-api-servers": (0, 0, 0.0, 15, 56, 3, 56),
    "vllm-0.32-data-parallel": (0, 0, 0.0, 25, 91, 5, 91),
    "vllm-0.32-nixl-prefill": (0, 0, 0.11721611721611724, 66000, 24, 24, 24),
    "vllm-0.32-nixl-decode": (0, 3, 0.01172161172161168, 1500, 4, 1, 4),
    "vllm-0.8-data-parallel": (0, 0, 0.1, 10, 20, 1, 5),
    "vllm-0.11-data-parallel": TWO_ENGINES,
    "vllm-0.24-api-servers": TWO_ENGINES,
    "vllm-0.32-ray": RAY,
    "vllm-ray-2.46": RAY,
    "sglang-0.5.23-single": (2, 0, 0.0, 25, 47, 2, 1125),
    "sglang-0.5.23-tensor-parallel": (2, 1, 0.5, 35, 67, 3, 100),
    "sglang-0.5.23-data-parallel": (3, 0, 0.05, 55, 52, 5, 656),
    "sglang-0.5.23-dp-attention": (3, 1, 0.2, 35, 67, 3, 153),
    "sglang-0.5.23-context-parallel": (1, 0, 0.25, 35, 67, 3, 43),
    "sglang-0.5.23-priorities": (3, 2, 0.5, 35, 67, 3, 100),
    "sglang-router": (3, 1, 0.4, 35, 67, 3, 43),
}


def profile_of(name: str) -> EngineProfile:
    return VLLM if name.startswith("vllm") else SGLANG


def loaded(page: bytes, profile: EngineProfile) -> Load:
    load = read_load(make_page_reader(profile.iterate_series())(page), profile)
    assert load is not None
    return load


@pytest.mark.parametrize("name", RECORDED)
def test_pages_of_engines_by_version(name: str) -> None:
    load = loaded((PAGES / f"{name}.txt").read_bytes(), profile_of(name))
    assert load.kv_usage_least_ratio is None, "the caches' sizes are known"
    *counts, steps = RECORDED[name]
    running, waiting, share, prompt, generated, requests = counts
    assert load.kv_usage_ratio == pytest.approx(share)
    assert (load.running, load.waiting, load.requests_total) == (running, waiting, requests)
    assert (load.prompt_tokens_total, load.generation_tokens_total) == (prompt, generated)
    assert load.steps_total == steps


def test_every_page_has_its_expectation_and_says_where_it_is_from() -> None:
    assert {one.stem for one in PAGES.glob("*.txt")} == set(RECORDED)
    for one in PAGES.glob("*.txt"):
        assert one.read_text().startswith(("# Recorded from ", "# Written from ")), one.name


def idle_ranks(share: str, count: int = 8) -> bytes:
    return "".join(
        f'vllm:num_requests_running{{engine="{i}"}} 0\n'
        f'vllm:num_requests_waiting{{engine="{i}"}} 0\n'
        f'vllm:kv_cache_usage_perc{{engine="{i}"}} {share}\n'
        for i in range(count)
    ).encode()


def lost(load: Load) -> float | None:
    watch, found = CapacityWatch(), None
    for t in range(int(MIN_IDLE_S) + 2):
        found = watch.update(Sample(t=float(t), epoch=1, load=load))
    return found.consumed_ratio if found is not None else None


def test_blocks_held_for_a_decode_engine_are_lost_after_the_timeout_alone() -> None:
    load = loaded((PAGES / "vllm-0.32-nixl-prefill.txt").read_bytes(), VLLM)
    assert lost(load) == pytest.approx(0.1172), "of an engine that holds none for others, it is"
    load.kv_lease_s = 480.0
    watch = CapacityWatch()
    seen = [watch.update(Sample(t=float(t), epoch=1, load=load)) for t in range(600)]
    assert [one is not None for one in seen].index(True) == pytest.approx(480 + MIN_IDLE_S, abs=1)


def test_short_prefills_between_two_samples_hold_blocks_of_their_own() -> None:
    load = loaded((PAGES / "vllm-0.32-nixl-prefill.txt").read_bytes(), VLLM)
    load.kv_lease_s, watch = 480.0, CapacityWatch()
    for t in range(2000):
        if t % 400 == 0:
            load.prompt_tokens_total = (load.prompt_tokens_total or 0) + 1000
        assert watch.update(Sample(t=float(t), epoch=1, load=load)) is None


def test_requests_that_wait_for_a_prefill_engine_are_no_stall_of_the_decode_engine() -> None:
    page = (PAGES / "vllm-0.32-nixl-decode.txt").read_bytes()
    load, watch = loaded(page, VLLM), StallWatch(10, 1)
    assert (load.waiting, load.deferred) == (3, 3)
    sample = [Sample(t=float(t), epoch=1, load=load) for t in range(60)]
    assert all(watch.update(one) is None for one in sample)
    load.inflight, other = 4, StallWatch(10, 1)  # one more that the engine has not accepted
    assert any(other.update(one) is not None for one in sample)


def test_a_ratio_of_ranks_is_no_sum() -> None:
    """Eight times 1.5 % read as a loss of 12 %, which ended a healthy engine; 8 x 15 % as 120 %."""
    assert loaded(idle_ranks("0.015"), VLLM).kv_usage_ratio == 0.015
    assert lost(loaded(idle_ranks("0.015"), VLLM)) is None
    assert lost(loaded(idle_ranks("0.15"), VLLM)) == 0.15


def test_of_caches_of_unknown_sizes_the_smallest_share_is_surely_lost() -> None:
    page = idle_ranks("0.5", 1) + idle_ranks("0.03", 2).replace(b'"0"', b'"2"')
    load = loaded(page, VLLM)
    assert (load.kv_usage_ratio, load.kv_usage_least_ratio) == (0.5, 0.03)
    assert lost(load) == 0.03


@pytest.mark.parametrize("label", ["tp_rank", "cp_rank", "pp_rank", "moe_ep_rank", "attn_cp_rank"])
def test_ranks_that_report_the_same_requests_count_once(label: str) -> None:
    page = "".join(f'sglang:num_running_reqs{{model_name="m",{label}="{i}"}} 1\n' for i in range(8))
    page += 'sglang:http_requests_active{endpoint="/v1/chat/completions"} 1\n'
    assert loaded(page.encode(), SGLANG).running == 1


@pytest.mark.parametrize(
    "page",
    [
        "sglang_num_running_reqs 3\nsglang_token_usage 0.4\n",
        "ray_sglang_num_running_reqs 3\nray_sglang_token_usage 0.4\n",
        '{"sglang:num_running_reqs"} 3\n{"sglang:token_usage",model_name="m"} 0.4\n',
        "sglang:num_running_reqs 3\nsglang_num_running_reqs 3\nsglang:token_usage 0.4\n",
    ],
)
def test_other_spellings_are_read(page: str) -> None:
    load = loaded(page.encode(), SGLANG)
    assert (load.running, load.kv_usage_ratio) == (3, 0.4)


def test_an_outcome_that_all_requests_have_says_nothing() -> None:
    """With Ray, vLLM 0.11 sets the labels of all outcomes on one metric, and the last one wins."""
    page = (
        "ray_vllm_num_requests_running 0\n"
        'ray_vllm_request_success_total{finished_reason="abort",WorkerId="a"} 7\n'
        'ray_vllm_request_success_total{finished_reason="abort",WorkerId="b"} 2\n'
    )
    load = loaded(page.encode(), VLLM)
    assert (load.requests_total, load.aborted_total) == (9, None)
    told = page.replace('abort",WorkerId="b"', 'stop",WorkerId="b"')
    assert loaded(told.encode(), VLLM).aborted_total == 7


class Server:
    """Answers with the page that is set, an error where it is None."""

    def __init__(self) -> None:
        self.status, self.page = 200, b""

    def call(
        self, method: str, path: str, timeout_s: float, body: object = None
    ) -> tuple[int, bytes]:
        if path != "/metrics":
            raise EngineError("no such path")
        return self.status, self.page


@pytest.mark.parametrize(
    ("status", "page", "reason"),
    [
        (401, b"", "MetricsUnauthorized"),
        (404, b"", "MetricsMissing"),
        (503, b"", "MetricsSilent"),
        (200, b"python_info 1\n", "MetricsUnknownNames"),
        (200, b"vllm:num_requests_running 1\n", "MetricsIncomplete"),
        (200, idle_ranks("NaN"), "MetricsIncomplete"),
        (200, idle_ranks("0.1"), ""),
    ],
)
def test_what_a_page_lacks_is_said(status: int, page: bytes, reason: str) -> None:
    server = Server()
    server.status, server.page = status, page
    load = ExternalLoad(server, VLLM)  # type: ignore[arg-type]
    load.get_newest_load()
    assert (load.signal.ok, load.signal.reason) == (not reason, reason)
    assert bool(load.signal.message) == bool(reason)


# ---- pages made at random


@dataclass
class Rank:
    """One part that has requests of its own, and so the truth about them."""

    number: int
    running: int = 0
    waiting: int = 0
    used: int = 0
    pool: int = 1000
    counters: Counter[str] = field(default_factory=Counter)
    shown: Counter[str] = field(default_factory=Counter)
    """The counters as the engine last reported them."""

    def work(self, dice: random.Random) -> None:
        self.running, self.waiting = dice.randrange(0, 9), dice.randrange(0, 4)
        self.used = dice.randrange(0, self.pool + 1)
        for name in ("prompt", "generation", "stop", "abort", "steps", "prefill"):
            self.counters[name] += dice.randrange(0, 1 << dice.randrange(1, 12))


COUNTERS = {
    "requests_total": ("stop", "abort"),
    "prompt_tokens_total": ("prompt",),
    "generation_tokens_total": ("generation",),
}


class Writer:
    """Writes pages of one engine, as one release of it does."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.vllm = dice, dice.random() < 0.5
        self.profile = VLLM if self.vllm else SGLANG
        self.spelling = dice.choice(("plain", "plain", "underscore", "ray", "ray colon"))
        self.bare = dice.choice(("", "", "instead", "as well"))
        self.quoted = self.spelling == "plain" and dice.random() < 0.2
        self.ranks = [
            Rank(i, pool=dice.choice((1000, 1000, 4000))) for i in range(dice.choice((1, 1, 2, 8)))
        ]
        self.same = dice.choice((1, 1, 2, 4))
        self.same_label = dice.choice(("tp_rank", "cp_rank", "pp_rank", "attn_tp_rank"))
        self.sizes = dice.random() < 0.6
        self.priorities = not self.vllm and dice.random() < 0.3
        self.registries = 2 if dice.random() < 0.2 else 1
        self.begin()

    def begin(self) -> None:
        """Begin anew: another process, or others under the same main one."""
        self.began = [self.dice.uniform(1.6e9, 1.9e9) for _ in range(self.registries)]
        self.gone: Counter[str] = Counter()
        self.told = self.dice.random() < 0.7 or self.registries > 1
        for rank in self.ranks:
            rank.counters, rank.shown = Counter(), Counter()

    def name(self, name: str) -> str:
        if self.spelling in ("underscore", "ray"):
            name = name.replace(":", "_")
        return f"ray_{name}" if self.spelling.startswith("ray") else name

    def names(self, name: str) -> list[str]:
        bare = name.removesuffix("_total")
        if not self.bare or bare == name:
            return [self.name(name)]
        return [self.name(bare)] if self.bare == "instead" else [self.name(name), self.name(bare)]

    def line(self, name: str, labels: Mapping[str, object], value: object) -> list[str]:
        written = ",".join(f'{label}="{text}"' for label, text in labels.items())
        if self.quoted:
            return [
                f'{{"{one}"{"," if written else ""}{written}}} {value}' for one in self.names(name)
            ]
        braces = f"{{{written}}}" if written or self.dice.random() < 0.5 else ""
        return [f"{one}{braces} {value}" for one in self.names(name)]

    def page(self, registry: int, ranks: list[Rank]) -> list[str]:
        found = [f"process_start_time_seconds {self.began[registry]}"] if self.told else []
        for rank in ranks:
            found += self.of_vllm(rank, registry) if self.vllm else self.of_sglang(rank)
        self.dice.shuffle(found)
        return found

    def of_vllm(self, rank: Rank, registry: int) -> list[str]:
        labels: dict[str, object] = {"engine": rank.number, "model_name": "a} 7"}
        one, found = rank.counters, []
        for name, value in (
            ("vllm:num_requests_running", rank.running),
            ("vllm:num_requests_waiting", rank.waiting),
            ("vllm:kv_cache_usage_perc", rank.used / rank.pool),
            ("vllm:prompt_tokens_total", one["prompt"]),
            ("vllm:generation_tokens_total", one["generation"]),
            ("vllm:iteration_tokens_total_count", one["steps"]),
        ):
            found += self.line(name, labels, value)
        for reason in ("stop", "abort"):
            found += self.line(
                "vllm:request_success_total", labels | {"finished_reason": reason}, one[reason]
            )
        if self.told:
            found += self.line("vllm:prompt_tokens_created", labels, self.began[registry])
        if self.sizes:
            about = {"block_size": 16, "num_gpu_blocks": rank.pool, "engine": rank.number}
            found += self.line("vllm:cache_config_info", about, 1.0)
        return found

    def of_sglang(self, rank: Rank) -> list[str]:
        found, one = [], rank.counters
        for same in range(self.same):
            labels: dict[str, object] = {"dp_rank": rank.number, self.same_label: same}
            total = labels | ({"priority": ""} if self.priorities else {})
            for name, count in (("running", rank.running), ("queue", rank.waiting)):
                found += self.line(f"sglang:num_{name}_reqs", total, count)
                if self.priorities:
                    for priority, part in ((1, count // 2), (5, count - count // 2)):
                        split = labels | {"priority": priority}
                        found += self.line(f"sglang:num_{name}_reqs", split, part)
            found += self.line("sglang:token_usage", total, rank.used / rank.pool)
            for mode in ("steps", "prefill"):
                passes = total | {"mode": mode}
                found += self.line("sglang:cuda_graph_passes_total", passes, one[mode])
            if self.sizes:
                found += self.line("sglang:max_total_num_tokens", total, rank.pool)
        # The server's own process counts these, once for all of a rank's processes.
        labels = {"dp_rank": rank.number}
        for name, value in (
            ("prompt_tokens_total", one["prompt"]),
            ("generation_tokens_total", one["generation"]),
            ("num_requests_total", one["stop"] + one["abort"]),
        ):
            found += self.line(f"sglang:{name}", labels, value)
        return found


def wrong(load: Load, ranks: list[Rank], counted: Counter[str], steps: int) -> list[str]:
    """The figures that are neither unknown nor the truth."""
    truth: dict[str, float] = {
        "running": sum(one.running for one in ranks),
        "waiting": sum(one.waiting for one in ranks),
        "steps_total": steps,
    }
    truth |= {name: sum(counted[one] for one in parts) for name, parts in COUNTERS.items()}
    found = [
        f"{name}: {getattr(load, name)} is not {value}"
        for name, value in truth.items()
        if getattr(load, name) not in (None, value)
    ]
    share = sum(one.used for one in ranks) / max(1, sum(one.pool for one in ranks))
    most, least = load.kv_usage_ratio, load.kv_usage_least_ratio
    if most is not None:
        least = most if least is None else least
        if not least - 1e-9 <= share <= most + 1e-9:
            found.append(f"kv: {share} is not from {least} to {most}")
    return found


def played(seed: int, pages: int = 12) -> Counter[str]:
    """One engine's life. Returns what happened; fails at a figure that is wrong."""
    dice = random.Random(seed)
    writer, server, now = Writer(dice), Server(), [0.0]
    replaced = [False]
    load = ExternalLoad(
        server,  # type: ignore[arg-type]
        writer.profile,
        clock=lambda: now[0],
        are_helpers_replaced=lambda: replaced[0],
    )
    seen: Counter[str] = Counter()
    registries = [writer.ranks] + [
        [Rank(one.number, pool=one.pool) for one in writer.ranks]
        for _ in range(writer.registries - 1)
    ]
    answered: set[int] = set()
    restarts = damage = 0
    for _ in range(pages):
        now[0] += dice.choice((2.0, 2.0, 700.0))
        for ranks in registries:
            for rank in ranks:
                rank.work(dice)
        event = dice.random()
        if event < 0.06:  # another process
            writer.begin()
            load.reset()
            answered, restarts = set(), 0
            for ranks in registries:
                for rank in ranks:
                    rank.counters, rank.shown = Counter(), Counter()
        elif event < 0.1 and writer.told and writer.registries == 1:  # its helpers are others
            writer.begin()
            writer.told, replaced[0] = True, True
            restarts += bool(answered)
        elif event < 0.16 and len(writer.ranks) > 1 and not damage and writer.registries == 1:
            # A rank leaves; what it did last was on a page that could be read.
            writer.gone += writer.ranks.pop(dice.randrange(len(writer.ranks))).shown
        elif event < 0.22:  # a gap
            server.status = dice.choice((500, 404, 401))
            assert load.get_newest_load() is None
            server.status = 200
            seen["gap"] += 1
            continue
        registry = dice.randrange(writer.registries)
        lines = writer.page(registry, registries[registry])
        damage = dice.choice((0, 0, 0, 1, 3))
        for _ in range(damage):
            at = dice.randrange(len(lines))
            if lines[at].startswith("process_start"):
                continue  # written by the client library itself, from the kernel's figure
            head = lines[at].rpartition(" ")[0]
            bad = ("NaN", "-3", "+Inf", "1e300", "x", "")
            lines[at] = dice.choice((lines[at] + "\n" + lines[at], f"{head} {dice.choice(bad)}"))
        for rank in registries[registry]:
            rank.shown = rank.counters.copy()
        server.page = "\n".join(lines).encode() + b"\n"
        newest = load.get_newest_load()
        answered.add(registry)
        replaced[0] = False
        if writer.registries == 1:
            assert damage or newest is not None, (seed, "a sound page is unknown")
            assert load.signal.reason != "MetricsInconsistent", seed
        if newest is None:
            seen["unknown"] += 1
        else:
            ranks = [rank for one in answered for rank in registries[one]]
            counted = sum((rank.counters for rank in ranks), Counter()) + writer.gone
            steps = counted["steps"] + (0 if writer.vllm else counted["prefill"])
            assert not (bad_ones := wrong(newest[0], ranks, counted, steps)), (seed, bad_ones)
            seen["known"] += 1
            seen["exact"] += newest[0].running is not None
        assert load.restarts <= restarts, (seed, "a restart without another process")
        if len(answered) > 1:
            assert newest is None, (seed, "a page of one registry of two")
            seen["inconsistent"] += load.signal.reason == "MetricsInconsistent"
    return seen


def summed(seeds: range, play: Callable[[int], Counter[str]] = played) -> Counter[str]:
    return sum((play(seed) for seed in seeds), Counter())


def test_no_figure_of_a_random_page_is_wrong() -> None:
    seen = summed(range(60))
    assert seen["exact"] > 200
    assert seen["inconsistent"] > 10
    assert seen["gap"] > 10


@pytest.mark.long
def test_no_figure_of_twenty_thousand_random_pages_is_wrong() -> None:
    seen = summed(range(1000, 2700))
    assert seen["known"] + seen["unknown"] + seen["gap"] >= 20_000
    assert seen["exact"] > 10_000
