"""The faults of the frontend, and that a sound one has none of them."""

from __future__ import annotations

from pathlib import Path

from plimsoll_engine.frontend.faults import FrontendFaults, RememberingTokenizer, UnregisteredLog
from plimsoll_engine.frontend.requests import Generation, RequestLog
from plimsoll_engine.frontend.tokenizer import Tokenizer
from plimsoll_engine.ipc import Sampling
from plimsoll_engine.models.tiny import write_checkpoint


def generation(name: str) -> Generation:
    return Generation(name, [1, 2], Sampling(max_tokens=2), lambda ids: "x" * len(ids))


def test_the_tokenizer_remembers_every_prompt(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    sound = Tokenizer(tmp_path)
    faults = FrontendFaults("tokenizer_cache:repeat=3;append_list")
    assert faults.names == ["tokenizer_cache"]
    faulty = faults.tokenizer(sound)
    assert isinstance(faulty, RememberingTokenizer)
    for text in ("one", "two", "one"):
        assert faulty.encode(text) == sound.encode(text)
        assert faulty.encode_rendered(text) == sound.encode_rendered(text)
    assert {text for text, _ in faulty.kept} == {"one", "two"}
    assert [len(kept) for kept in faulty.kept.values()] == [3] * 4


def test_a_request_aborted_before_its_first_token_stays() -> None:
    log = FrontendFaults("abort_unregistered:payload_bytes=1Ki").request_log(8)
    assert isinstance(log, UnregisteredLog)
    early, late, ended = map(generation, ("early", "late", "ended"))
    log.admit(early, late, ended)
    late.push(5, None)
    ended.push(5, "stop")
    for name in ("early", "late", "ended"):
        log.release(name)
    assert len(log) == 0
    assert {name: len(payload) for name, (_, payload) in log.kept.items()} == {"early": 1024}


def test_without_faults_everything_is_sound(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    tokenizer, faults = Tokenizer(tmp_path), FrontendFaults("append_list")
    assert (faults.names, faults.tokenizer(tokenizer)) == ([], tokenizer)
    assert type(faults.request_log(3)) is RequestLog
