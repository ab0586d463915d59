"""Which container is the engine: by what it runs, not by what anything is called."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_api.engines import EngineType
from plimsoll_operator.injection import engine

Object = dict[str, Any]


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
    found = engine.find(pod, "Pod p", unrecognized=True)
    assert found is not None
    assert found.type is kind
