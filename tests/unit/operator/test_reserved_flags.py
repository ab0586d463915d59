"""What the renderer writes for an engine is what a manifest must not write: they cannot drift.

Tests ``render/engine.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_api.engines import RESERVED_FLAGS, EngineType
from plimsoll_engine import __main__ as engine
from plimsoll_operator.plans.service import parse_service
from plimsoll_operator.render import Images
from plimsoll_operator.render.engine import make_engine_container

SYNONYMS = {(EngineType.VLLM, "--model"), (EngineType.SGLANG, "--model")}
"""Flags for what the operator writes in another form."""
OPEN = {"--host"}
"""Flags that the operator writes and a manifest may write again."""


def command(type_: EngineType) -> list[str]:
    spec: dict[str, Any] = {"type": type_, "image": "i"}
    if type_ is EngineType.PLIMSOLL:
        spec["apiKeySecretRef"] = {"name": "clients"}
    meta = {"name": "qwen", "namespace": "ml"}
    item = {"metadata": meta, "spec": {"model": {"uri": "file:///m"}, "engine": spec}}
    made = make_engine_container(parse_service(item), Images("engine:1", "supervisor:1"))
    return [*made.get("command", ()), *made.get("args", ())]


@pytest.mark.parametrize("type_", list(EngineType))
def test_every_flag_that_is_rendered_is_reserved_and_no_other(type_: EngineType) -> None:
    rendered = {word.partition("=")[0] for word in command(type_) if word.startswith("--")}
    reserved = {one.flag for one in RESERVED_FLAGS if type_ in one.types}
    synonyms = {flag for of, flag in SYNONYMS if of is type_}
    assert reserved - synonyms == rendered - OPEN


def test_the_manifests_address_comes_last_and_wins() -> None:
    spec = {"type": "vllm", "image": "i", "args": ["--host=::1"]}
    item = {"metadata": {"name": "q"}, "spec": {"model": {"uri": "file:///m"}, "engine": spec}}
    words = make_engine_container(parse_service(item), Images("e", "s", host="::"))["command"]
    assert [word for word in words if word.startswith("--host")] == ["--host=::", "--host=::1"]


@pytest.mark.parametrize("flag", ["--por=9000", "--served-model=x", "--startup=1"])
def test_our_engine_takes_no_shortened_flag(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Which would be a reserved one under another name."""
    needed = ["serve", "--model=/m", "--run-dir=/tmp/x"]
    with pytest.raises(SystemExit) as ended:
        engine._build_parser().parse_args([*needed, flag])
    assert ended.value.code == 2
    assert flag in capsys.readouterr().err
