"""Drafts on CUDA: the same tokens, by captured steps, and bytes back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.graphs import DecodeGraphs
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.messages.speculative import Speculative
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_faults.models.tiny import write_checkpoint
from tests.draft_checkpoint import write_draft_checkpoint
from tests.generated import generate

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: these tests need one GPU"
)
NEW_TOKENS, REQUESTS, DRAFTS = 48, 6, 4


class Oracle:
    """The text without drafts, with a mistake every seventh token."""

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self.texts = texts

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        found = []
        for request, most in wanted:
            begun = request.num_outputs
            rest = self.texts[request.request_id][begun : begun + most]
            found.append([(t + ((begun + i) % 7 == 0)) % 500 for i, t in enumerate(rest)])
        return found


def texts(engine: EngineCore) -> dict[str, list[int]]:
    return generate(
        engine,
        (
            Submit(
                str(number),
                [10 + number + i % 90 for i in range(1 + 40 * number)],
                Sampling(NEW_TOKENS, ignore_eos=True, temperature=0.9 * (number % 2), seed=number),
            )
            for number in range(REQUESTS)
        ),
    )


def test_drafts_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    write_checkpoint(large)
    write_draft_checkpoint(large, small)
    replays: list[int] = []
    replay = DecodeGraphs.replay

    def counted(graphs: DecodeGraphs, inputs: Any, newest: Any) -> Any:
        replays.append(len(inputs.ids))
        return replay(graphs, inputs, newest)

    monkeypatch.setattr(DecodeGraphs, "replay", counted)
    found: list[dict[str, list[int]]] = []
    lookup = Speculative("ngram", DRAFTS, 4, 2)
    model = Speculative("draft_model", DRAFTS, model=str(small))
    for speculative in (None, lookup, model):
        config = WorkerConfig(
            str(large), "/tmp", "unused", "float32", "cuda", num_blocks=2048,
            max_num_seqs=REQUESTS, max_num_batched_tokens=256, speculative=speculative,
        )  # fmt: skip
        lifecycle = CoreLifecycle(config)
        engine = lifecycle.start()
        if engine.speculation is not None and speculative is lookup:
            engine.speculation.proposer = Oracle(found[0])
        replays.clear()
        steps = engine.counters.steps
        found.append(texts(engine))
        steps = engine.counters.steps - steps
        if engine.speculation is not None:
            counters = engine.speculation.counters
            assert 0 < counters.accepted_tokens < counters.draft_tokens
            assert steps < NEW_TOKENS
            assert max(replays) == REQUESTS * (1 + DRAFTS)
        lifecycle.shut_down()
        allocated, baseline = lifecycle.get_allocated_after_shutdown()
        assert allocated == baseline
    assert found[0] == found[1] == found[2]
