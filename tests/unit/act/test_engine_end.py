"""A pod is out of service from before its engine ends until the kubelet has seen the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.act.engine_end import RETURN_S, unready
from plimsoll_sidecar.govern.command import Outcome, Result


@pytest.mark.parametrize("drained", [True, False])
@pytest.mark.parametrize(
    ("outcome", "ready"),
    [(Outcome.SUCCEEDED, False), (Outcome.REFUSED, True), (Outcome.FAILED, True)],
)
def test_the_pod_is_unready_where_the_engine_ended(
    tmp_path: Path, drained: bool, outcome: Outcome, ready: bool
) -> None:
    folder = str(tmp_path)
    if drained:
        readiness.write(folder, RETURN_S)

    def end() -> Result:
        assert not readiness.is_ready(folder), "before the engine ends"
        return Result(operation_id="1", outcome=outcome)

    assert unready(tmp_path, end).outcome is outcome
    assert readiness.is_ready(folder) is ready


def test_an_error_puts_the_pod_back_into_service(tmp_path: Path) -> None:
    def end() -> Result:
        raise OSError("no such process")

    with pytest.raises(OSError, match="no such process"):
        unready(tmp_path, end)
    assert readiness.is_ready(str(tmp_path))
