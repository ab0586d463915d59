"""Which priority a request may have."""

from __future__ import annotations

import pytest

from plimsoll_engine.api import priority
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.settings import Settings

WORKER = WorkerConfig(model="m", run_dir="r", socket="s")


def settings(lowest: int, highest: int, keys: list[int] | None = None) -> Settings:
    return Settings(
        worker=WORKER, served_model_name="m",
        priority_range=(lowest, highest), priority_keys=keys,
    )  # fmt: skip


def test_by_default_a_request_may_step_back_and_not_ahead() -> None:
    by_default = Settings(worker=WORKER, served_model_name="m")
    assert priority.check_priority(by_default, 7, "") == 7
    with pytest.raises(ApiError, match="--priority-range") as refused:
        priority.check_priority(by_default, -1, "")
    assert (refused.value.status, refused.value.param) == (400, "priority")


def test_the_range_and_the_keys_are_configuration() -> None:
    asked = settings(-3, 3, [2])
    assert priority.check_priority(asked, -3, "key 2") == -3
    assert priority.check_priority(asked, 0, "key 1") == 0
    for value, tenant, status in ((-4, "key 2", 400), (1, "key 1", 403), (1, "", 403)):
        with pytest.raises(ApiError) as refused:
            priority.check_priority(asked, value, tenant)
        assert refused.value.status == status
