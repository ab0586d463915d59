"""The logits that an engine's tokens were chosen from, taken while it runs."""

from __future__ import annotations

from typing import Any

import torch

from plimsoll_engine.core.engine_core import EngineCore


def recorded(engine: EngineCore) -> dict[tuple[str, int], torch.Tensor]:
    """Fills as ``engine`` runs: by request and number of the token, [vocabulary] each."""
    model: Any = engine.runner.model
    seen: dict[tuple[str, int], torch.Tensor] = {}
    scores: list[torch.Tensor] = []
    logits, launch = model.compute_logits, engine.runner.launch

    def keeps(hidden: torch.Tensor) -> torch.Tensor:
        scores.append(logits(hidden))
        return scores[-1]

    def launches(chunks: Any) -> Any:
        flight = launch(chunks)
        for row, reference in enumerate(flight.requests):
            request = reference()
            assert request is not None
            seen[request.request_id, request.num_outputs + request.in_flight.tokens] = scores[-1][
                row
            ]
        return flight

    model.compute_logits, engine.runner.launch = keeps, launches  # type: ignore[method-assign]
    return seen
