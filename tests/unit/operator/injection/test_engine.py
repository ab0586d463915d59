"""Which container is the engine: by what it runs, not by what anything is called."""

from __future__ import annotations

import shlex
import time
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plimsoll_api.engines import EngineType
from plimsoll_api.supervision_policy import SelectedEngine
from plimsoll_operator.injection import engine
from plimsoll_operator.injection.command_line import MAX_COMMAND_CHARS, split_commands
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import InjectionOptions

Object = dict[str, Any]
OPTIONS = InjectionOptions("supervisor:1")


@pytest.mark.parametrize(
    ("container", "kind"),
    [
        ({"image": "vllm/vllm-openai:v1", "args": ["--model", "m"]}, EngineType.VLLM),
        ({"image": "r/team/vllm@sha256:00", "args": ["org/small-router"]}, EngineType.VLLM),
        ({"image": "x", "command": ["vllm", "serve", "org/small-router"]},
         EngineType.VLLM),
        ({"image": "x", "command": ["bash", "-c", "a b c d e f g h i j k l; exec vllm serve m"]},
         EngineType.VLLM),
        ({"image": "python:3", "command": ["python", "-m", "vllm.entrypoints.openai.api_server"]},
         EngineType.VLLM),
        ({"image": "ghcr.io/vllm-project/production-stack/router:1", "args": ["--port", "8000"]},
         EngineType.CUSTOM),
        ({"image": "ghcr.io/vllm-project/semantic/extproc:1"}, EngineType.CUSTOM),
        ({"image": "ghcr.io/vllm-project/vllm-cpu:1"}, EngineType.VLLM),
        ({"image": "kserve/huggingfaceserver:1", "args": ["--backend=vllm"]}, EngineType.VLLM),
        ({"image": "x", "args": ["--backend", "sglang"]}, EngineType.SGLANG),
        ({"image": "x/proxy:1", "args": ["--vllm-port=8200", "--namespace", "vllm"]},
         EngineType.CUSTOM),
        ({"image": "nvcr.io/ai-dynamo/vllm-runtime:1", "command": ["python3", "-m",
         "dynamo.frontend"]}, EngineType.CUSTOM),
        ({"image": "lmsysorg/sglang-router:1"}, EngineType.CUSTOM),
    ],
)  # fmt: skip
def test_an_engine_is_what_runs_and_not_what_is_named(container: Object, kind: EngineType) -> None:
    pod = {"containers": [{"name": "c", **container}]}
    found = engine.find_engine(
        pod, "Pod p", InjectionOptions("s", SelectedEngine(port=1), unrecognized=True)
    )
    assert found is not None
    assert found.type is kind


SCRIPTS = st.lists(
    st.sampled_from(
        ["vllm", " ", "serve", "'", '"', "\\", "\t", "a b", "--port=1", "$x", "é", "9"]
    ),
    max_size=12,
).map("".join)


@given(SCRIPTS)
def test_a_script_is_split_as_a_shell_splits_it(script: str) -> None:
    assume("\\$" not in script)  # A shell drops this backslash within quotes, and shlex keeps it.
    try:
        wanted = shlex.split(script, comments=True)
    except ValueError:
        wanted = script.split()
    assert [word for command in split_commands(script) for word in command] == wanted


@pytest.mark.parametrize(
    ("script", "commands"),
    [
        ("a#b 'c d'#e # f\ng", [["a#b", "c d#e"], ["g"]]),
        ("a && b || c; d & e | tee f", [["a"], ["b"], ["c"], ["d"], ["e"], ["tee", "f"]]),
        ("a \\\n  --b 2>&1 >>log <in", [["a", "--b"]]),
        ('a "$(b; c)" `d; e` f', [["a", "$(b; c)", "`d; e`", "f"]]),
        ("cat <<EOF > x\nvllm serve no\nEOF\nvllm serve m", [["cat"], ["vllm", "serve", "m"]]),
        ("(a; b)", [["a"], ["b"]]),
        ("a '", [["a", "'"]]),
    ],
)
def test_the_commands_of_a_script(script: str, commands: list[list[str]]) -> None:
    assert list(split_commands(script)) == commands


SIZE = MAX_COMMAND_CHARS - 16
HOSTILE = {
    "one word": "y" * SIZE,
    "one quoted word": "'" + "y" * (SIZE - 2) + "'",
    "an open quote": "'" + "y" * (SIZE - 1),
    "open quotes": "\"'" * (SIZE // 2 - 1) + "'",
    "substitutions": "$(" * (SIZE // 2),
    "backslashes": "\\" * SIZE,
    "escaped quotes": '"' + '\\"' * (SIZE // 2 - 1),
    "commands": "a;" * (SIZE // 2),
    "short words": "a '" * (SIZE // 3),
    "comments": "#\n" * (SIZE // 2),
    "options": "--backend " * (SIZE // 10),
}


@pytest.mark.parametrize("shape", HOSTILE)
def test_no_script_takes_longer_than_its_length(shape: str) -> None:
    pod = {
        "containers": [
            {"name": "c", "image": "vllm/vllm:1", "command": ["sh", "-c"], "args": [HOSTILE[shape]]}
        ]
    }
    began = time.process_time()
    engine.find_engine(pod, "Pod p", InjectionOptions("s", SelectedEngine(port=1)))
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["sh", "-c", "vllm serve " + "y" * MAX_COMMAND_CHARS]},
        {"args": ["serve", "x"] + ["a" * 8] * 80_000},
    ],
)
def test_a_command_that_is_not_searched_to_its_end_is_refused(container: Object) -> None:
    began = time.process_time()
    with pytest.raises(InjectionError, match="has more than 65536 characters"):
        engine.find_engine(
            {"containers": [{"name": "c", "image": "vllm/vllm:1", **container}]}, "Pod p", OPTIONS
        )
    assert time.process_time() - began < 5
    other = {"containers": [{"name": "c", "image": "vllm/vllm:1"}, {"name": "d", **container}]}
    assert engine.find_engine(other, "Pod p", OPTIONS) is not None, (
        "of a container that is no engine"
    )


def test_a_port_that_is_no_number_is_not_one_and_a_long_one_is_refused() -> None:
    """``isdigit`` lets both through, and ``int`` refuses them: the webhook failed."""

    def found(port: str) -> object:
        container = {"name": "c", "image": "vllm/vllm:1", "args": [f"--port={port}"]}
        return engine.find_engine({"containers": [container]}, "Pod p", OPTIONS)

    for unknown in ("²", "$(PORT)"):
        with pytest.raises(
            InjectionError, match=r"port is unknown .* --port .* only in the cluster"
        ):
            found(unknown)
    with pytest.raises(InjectionError, match="not a valid port number"):
        found("8" * 5000)
