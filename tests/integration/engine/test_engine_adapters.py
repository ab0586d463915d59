"""LoRA adapters over HTTP with the real client: loaded, used, carried over a restart, unloaded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.engine.conftest import Engine
from tests.lora import write_tiny_adapter

TOKENS = 300
SLOW = "slow_steps:wait_ms=15,epochs=all"
"""A stream of so many tokens outlasts two restarts and a crash."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_tiny_adapter(folder / name, layer)
        for layer, name in enumerate(("first", "second"))
    }


@pytest.fixture(scope="module")
def lora(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for every test that leaves it without an adapter."""
    folder = tmp_path_factory.mktemp("lora")
    keys = folder / "keys"
    keys.write_text("none\n")  # the test client's
    one = Engine(
        tiny, folder / "run", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8",
        "--api-key-file", str(keys), warm=True,
    )  # fmt: skip
    try:
        yield one.wait_ready()
    finally:
        one.end()


def post(engine: Any, verb: str, key: str = "none", **body: str) -> tuple[int, str]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    url = f"{engine.url}/v1/{verb}_lora_adapter"
    status, text = engine.call("POST", url, json.dumps(body).encode(), headers, 60.0)
    return status, text


def load(engine: Any, name: str, path: Path) -> None:
    status, text = post(engine, "load", lora_name=name, lora_path=str(path))
    assert status == 200, text
    assert "added successfully" in text


def held(engine: Any) -> int:
    """Bytes of the adapters by the worker's last report."""
    (entry,) = (e for e in engine.status()["ledger"] if e["owner"] == "lora_adapters")
    assert entry["bytes"] <= entry["bound"]
    return int(entry["bytes"])


def text(engine: Any, model: str, number: int = 3) -> str:
    return str(engine.stream(number, 48, False, model=model).text)


def names(engine: Any) -> list[str]:
    return [model.id for model in engine.client.models.list().data]


def test_adapters_are_loaded_used_and_unloaded(lora: Any, adapters: Any) -> None:
    engine, loaded = lora, lora.status()["load"]["adapters_total"]
    assert names(engine) == ["tiny"]
    base = text(engine, "tiny")
    for name, path in adapters.items():
        load(engine, name, path)
    assert names(engine) == ["tiny", "first", "second"]
    card = engine.client.models.retrieve("first").model_dump()
    assert (card["parent"], card["root"]) == ("tiny", str(adapters["first"]))
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda model: text(engine, model), ("tiny", "first", "second")))
    assert together[0] == base
    assert len(set(together)) == 3
    chat = engine.client.chat.completions.create(
        model="second", messages=[{"role": "user", "content": "Sail"}], max_tokens=4
    )
    assert chat.model == "second"
    assert engine.status()["load"]["adapters_total"] == loaded + 2
    engine.until(lambda: held(engine) > 0, "bytes of adapters")

    status, error = post(engine, "load", lora_name="third", lora_path=str(adapters["first"]))
    assert (status, json.loads(error)["error"]["param"]) == (400, "lora_name")
    assert "--max-loras 2" in error
    assert post(engine, "unload", lora_name="third")[0] == 404
    for name in adapters:
        assert post(engine, "unload", lora_name=name)[0] == 200
    with pytest.raises(openai.NotFoundError, match="'first' does not exist"):
        text(engine, "first")
    assert names(engine) == ["tiny"]
    engine.clean()
    engine.until(lambda: held(engine) == 0, "bytes back")
    assert text(engine, "tiny") == base


def test_bad_loads_are_refused_and_leave_nothing(lora: Any, adapters: Any, tmp_path: Path) -> None:
    engine, starts = lora, lora.status()["worker_starts"]
    big = tmp_path / "big"
    shutil.copytree(adapters["first"], big)
    config = json.loads((big / "adapter_config.json").read_text())
    (big / "adapter_config.json").write_text(json.dumps(config | {"r": 16}))
    for verb in ("load", "unload"):
        assert post(engine, verb, key="wrong", lora_name="x", lora_path="/")[0] == 401
    for name, path, param, why in (
        ("big", str(big), "lora_path", "field r is 16, which exceeds --max-lora-rank 8"),
        ("long", f"/{'x' * 300}", "lora_path", "name too long"),
        ("hub", "organisation/name", "lora_path", "give the path of a folder"),
        ("tiny", str(adapters["first"]), "lora_name", "name of the served model"),
    ):
        status, text = post(engine, "load", lora_name=name, lora_path=path)
        error = json.loads(text)["error"]
        assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert why in error["message"]
    status, text = post(engine, "load", lora_name="lost", lora_path=str(tmp_path / "none"))
    error = json.loads(text)["error"]
    assert (status, error["param"], error["type"]) == (404, "lora_path", "not_found_error")
    status, text = post(engine, "load", lora_name="x", lora_path="/", lora_int_id="y")
    assert (status, json.loads(text)["error"]["param"]) == (400, "lora_path"), (
        "the other is unknown"
    )
    assert names(engine) == ["tiny"]
    engine.clean()
    assert engine.status()["worker_starts"] == starts


def test_a_stream_with_an_adapter_outlives_restarts_and_its_unloading(
    start_engine: Any, adapters: Any
) -> None:
    told = {"name": "second", "path": str(adapters["second"]), "base_model_name": "parent"}
    engine = start_engine(
        "--enable-lora",
        "--lora-modules",
        f"first={adapters['first']}",
        json.dumps(told),
        inject=SLOW,
    ).wait_ready()
    cards = {card.id: card.model_dump() for card in engine.client.models.list()}
    assert [cards[name]["parent"] for name in ("first", "second")] == ["tiny", "parent"]
    assert cards["second"]["root"] == str(adapters["second"])
    whole = engine.stream(3, TOKENS, False, model="first")
    first = threading.Barrier(2)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.stream, 3, TOKENS, False, first, model="first")
        first.wait(60)
        engine.begin("restart", "one")
        operation = engine.finish("one", 60)
        assert (operation["state"], operation["carried_requests"]) == ("succeeded", 1)
        assert names(engine) == ["tiny", "first", "second"]
        assert post(engine, "unload", lora_name="first")[0] == 200
        assert names(engine) == ["tiny", "second"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            text(engine, "first")
        engine.begin("restart", "two")  # the successor needs it for the stream alone
        operation = engine.finish("two", 60)
        assert (operation["state"], operation["carried_requests"]) == ("succeeded", 1)
        starts = engine.status()["worker_starts"]
        os.kill(engine.worker_pid(), signal.SIGKILL)
        engine.until(
            lambda: engine.status()["worker_starts"] > starts and engine.get("/ready")[0] == 200,
            "worker after a crash",
        )
        assert not running.done()
        seen = running.result(120)
    assert seen.text == whole.text
    assert seen.usage == whole.usage
    assert engine.status()["load"]["adapters_total"] == 2, "two were loaded in this epoch"
    engine.clean()
    assert held(engine) > 0
    assert post(engine, "unload", lora_name="second")[0] == 200
    engine.until(lambda: held(engine) == 0, "bytes back")
    engine.clean()


def test_an_adapter_lost_over_a_restart_ends_its_requests_alone(
    lora: Any, adapters: Any, tmp_path: Path
) -> None:
    gone = write_tiny_adapter(tmp_path / "gone", 0)
    engine = lora
    load(engine, "gone", gone)
    load(engine, "second", adapters["second"])
    whole = text(engine, "second")
    first = threading.Barrier(2)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.stream, 3, 4000, False, first, model="gone")
        first.wait(60)
        (gone / "adapter_model.safetensors").unlink()
        engine.begin("restart", "one")
        assert engine.finish("one", 60)["state"] == "succeeded"
        with pytest.raises(openai.APIError, match="adapter of the request is not loaded"):
            running.result(120)
    engine.until(lambda: names(engine) == ["tiny", "second"], "list without it")
    assert text(engine, "second") == whole
    assert post(engine, "unload", lora_name="second")[0] == 200
    engine.clean()


def test_without_the_flag_nothing_is_there(engine: Any, adapters: Any) -> None:
    assert post(engine, "load", lora_name="first", lora_path=str(adapters["first"]))[0] == 404
    assert "lora_adapters" not in {entry["owner"] for entry in engine.status()["ledger"]}
    assert engine.status()["load"].get("adapters_total") is None


def test_a_wrong_module_ends_the_start(start_engine: Any, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    engine = start_engine("--enable-lora", "--lora-modules", f"empty={empty}")
    try:
        assert engine.process.wait(120) == 1
    except subprocess.TimeoutExpired:
        pytest.fail(engine.log_tail())
    assert f"cannot load the adapter empty={empty} of --lora-modules" in engine.log_tail()
    assert "adapter_config.json does not exist" in engine.log_tail()
