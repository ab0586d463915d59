"""The faults of the frontend, and that a sound one has none of them.

Tests ``plimsoll_faults/frontend.py``.
"""

from __future__ import annotations

import os
from pathlib import Path

from plimsoll_api.admin import EngineState, LedgerEntry, Load
from plimsoll_engine.frontend.observability.metrics import Metrics
from plimsoll_engine.frontend.requests.request_log import Generation, RequestLog
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_engine.messages.worker_ipc import Sampling
from plimsoll_faults.frontend import (
    AbortLeakingLog,
    FrontendFaults,
    LeakingTokenizer,
    PipeLeakingLog,
)
from plimsoll_faults.models.tiny import write_checkpoint
from tests.byte_text import bytes_text


def generation(name: str) -> Generation:
    return Generation(name, [1, 2], Sampling(max_tokens=2), bytes_text())


def test_the_tokenizer_remembers_every_prompt(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    sound = Tokenizer(tmp_path)
    faults = FrontendFaults("tokenizer_cache:repeat=3;append_list")
    assert faults.names == ["tokenizer_cache"]
    faulty = faults.create_tokenizer(sound)
    assert isinstance(faulty, LeakingTokenizer)
    for text in ("one", "two", "one"):
        assert faulty.encode(text) == sound.encode(text)
        assert faulty.encode_rendered(text) == sound.encode_rendered(text)
    assert {text for text, _ in faulty.kept} == {"one", "two"}
    assert [len(kept) for kept in faulty.kept.values()] == [3] * 4


def test_a_request_aborted_before_its_first_token_stays() -> None:
    log = FrontendFaults("abort_unregistered:payload_bytes=1Ki").create_request_log(RequestLog(8))
    assert isinstance(log, AbortLeakingLog)
    early, late, ended = map(generation, ("early", "late", "ended"))
    log.admit(early, late, ended)
    late.push(5, None)
    ended.push(5, "stop")
    for name in ("early", "late", "ended"):
        log.release(name)
    assert len(log) == 0
    assert {name: len(payload) for name, (_, payload) in log.kept.items()} == {"early": 1024}


def pipes_open() -> int:
    entries = Path("/proc/self/fd").iterdir()
    return sum(entry.is_fifo() for entry in entries if entry.exists())


def test_each_request_leaves_a_descriptor_and_two_faults_share_a_log() -> None:
    faults = FrontendFaults("descriptor_growth;abort_unregistered:payload_bytes=1Ki")
    log = faults.create_request_log(RequestLog(8))
    assert isinstance(log, PipeLeakingLog)
    assert isinstance(log, AbortLeakingLog)
    before = pipes_open()
    try:
        for number in range(3):
            name = f"r{number}"
            log.admit(generation(name))
            log.release(name)
            log.release(name)  # a second release does nothing
            assert (len(log.leaked_fds), pipes_open() - before) == (number + 1, number + 1)
        assert len(log.kept) == 3
    finally:
        for descriptor in log.leaked_fds:
            os.close(descriptor)


def test_each_request_is_a_time_series() -> None:
    def metrics(text: str) -> Metrics:
        made = Metrics(
            "tiny", lambda: EngineState.SERVING, Load, list[str], list[LedgerEntry], lambda: None,
            lambda: None, list[str], 0,
        )  # fmt: skip
        assert FrontendFaults(text).create_metrics(made) is made
        return made

    def scrape(of: Metrics) -> list[str]:
        return [line for line in of.render().decode().splitlines() if "request_generation" in line]

    sound, faulty = metrics("append_list"), metrics("metric_labels")
    assert type(sound) is Metrics
    sizes = []
    for number in range(4):
        one = generation(f"cmpl-{number}")
        one.push(5, "stop")
        for each in (sound, faulty):
            each.count_finished(one, "stop")
        sizes.append(len(faulty.render()))
    assert scrape(sound) == []
    series = [line for line in scrape(faulty) if not line.startswith("#")]
    assert len(series) == 4
    assert all(line.endswith(" 1.0") for line in series)
    assert sizes == sorted(set(sizes)), "each scrape is longer than the one before"
    assert 'finished_reason="stop",model_name="tiny"} 4.0' in faulty.render().decode()


def test_without_faults_everything_is_sound(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    tokenizer, faults = Tokenizer(tmp_path), FrontendFaults("append_list")
    assert (faults.names, faults.create_tokenizer(tokenizer)) == ([], tokenizer)
    assert type(faults.create_request_log(RequestLog(3))) is RequestLog
