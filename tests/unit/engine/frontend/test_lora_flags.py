"""LoRA in the frontend: flags, and which adapters a worker must have.

Tests ``plimsoll_engine/settings.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll_engine.__main__ import _build_parser
from plimsoll_engine.errors import UsageError
from plimsoll_engine.frontend.requests.adapter_registry import AdapterRefusedError, AdapterRegistry
from plimsoll_engine.messages.lora_modules import LoraModule
from plimsoll_engine.messages.worker_ipc import AdapterLoadResult, UnloadAdapter
from plimsoll_engine.settings import Settings, create_settings


def settings(tmp_path: Path, *flags: str) -> Settings:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    (tmp_path / "adapter").mkdir()
    serve = ["serve", "--model", str(model), "--run-dir", str(tmp_path / "run")]
    return create_settings(_build_parser().parse_args([*serve, *flags]), {})


def test_adapters_are_off_by_default(tmp_path: Path) -> None:
    found = settings(tmp_path)
    assert (found.worker.max_loras, found.lora_modules) == (0, {})


def test_flags_reach_the_worker(tmp_path: Path) -> None:
    found = settings(
        tmp_path, "--enable-lora", "--max-lora-rank", "16", "--lora-modules",
        f"one={tmp_path}/adapter", json.dumps({"name": "two", "path": f"{tmp_path}/adapter"}),
        json.dumps({"name": "=", "path": f"{tmp_path}/adapter", "base_model_name": "base"}),
    )  # fmt: skip
    path = str(tmp_path / "adapter")
    assert found.lora_modules == {
        "one": LoraModule("one", path),
        "two": LoraModule("two", path),
        "=": LoraModule("=", path, "base"),
    }
    config = found.worker
    assert (config.max_loras, config.max_lora_rank) == (4, 16)


WRONG = [
    (["--lora-modules", "one={0}/adapter"], "--lora-modules requires --enable-lora"),
    (["--enable-lora", "--tensor-parallel-size", "2"], "--enable-lora supports only one GPU"),
    (["--enable-lora", "--lora-modules", "one"], "--lora-modules one: use NAME=PATH"),
    (["--enable-lora", "--lora-modules", '{{"name": "a"}}'], "missing required field `path`"),
    (["--enable-lora", "--lora-modules", '{{"name": "", "path": "/"}}'], "length >= 1"),
    (
        ["--enable-lora", "--lora-modules", '{{"name": "a", "path": "/", "rank": 1}}'],
        "unknown field `rank`",
    ),
    (["--enable-lora", "--lora-modules", '{{"name": "a"'], "--lora-modules .*truncated"),
    (
        ["--enable-lora", "--lora-modules", '{{"name": "a", "path": "{0}/no"}}'],
        "/no does not exist or cannot be read",
    ),
    (["--enable-lora", "--lora-modules", "=x"], "--lora-modules =x: use NAME=PATH"),
    (["--enable-lora", "--lora-modules", "one={0}/no"], "/no does not exist or cannot be read"),
    (["--enable-lora", "--lora-modules", "model={0}/adapter"], "the name model is already used"),
    (
        ["--enable-lora", "--lora-modules", "a={0}/adapter", "a={0}/adapter"],
        "name a is already used",
    ),
    (
        ["--enable-lora", "--max-loras", "1", "--lora-modules", "a={0}/adapter", "b={0}/adapter"],
        "--lora-modules has 2 adapters, but --max-loras is 1",
    ),
]


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_a_wrong_flag_is_named(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        settings(tmp_path, *(flag.format(tmp_path) for flag in flags))


def test_an_unloaded_adapter_is_known_until_its_last_request_is_released() -> None:
    adapters = AdapterRegistry(2, {"one": LoraModule("one", "/one")})
    one = adapters.find("one")
    assert one is not None
    assert one.required
    assert adapters.handle_load_result(AdapterLoadResult("", one.number)) is None
    assert not one.required
    with pytest.raises(AdapterRefusedError, match="already loaded"):
        adapters.create("one", Path("/other"))
    adapters.add_user(one)
    adapters.add_user(one)
    assert adapters.find_problems([one, one]) == []
    assert adapters.find_problems([one]) == [
        "adapter one has 2 registered users, but 1 requests use it"
    ]
    assert adapters.hide(one) is None
    assert (adapters.find("one"), adapters.list_visible(), adapters.list_for_worker()) == (
        None,
        [],
        [one],
    )

    again = adapters.create("one", Path("/one"))
    assert again.number != one.number, "another loading is another adapter"
    adapters.add(again)
    with pytest.raises(AdapterRefusedError, match="--max-loras 2"):
        adapters.create("two", Path("/two"))
    assert adapters.remove_user(one) is None
    assert adapters.remove_user(one) == UnloadAdapter(one.number)
    assert adapters.list_for_worker() == [again]
    assert adapters.hide(again) == UnloadAdapter(again.number)
    assert adapters.list_for_worker() == []


def test_an_adapter_that_a_worker_cannot_load_is_listed_no_more() -> None:
    adapters = AdapterRegistry(1, {"one": LoraModule("one", "/one")})
    (one,) = adapters.list_for_worker()
    adapters.add_user(one)
    assert adapters.handle_load_result(AdapterLoadResult("", one.number, "no such file")) is one
    assert (adapters.list_visible(), adapters.list_for_worker()) == ([], [])
    assert adapters.remove_user(one) is None
    assert adapters.find_problems([]) == []
