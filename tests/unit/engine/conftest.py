"""What all tests of the engine's parts share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """A second thread of models this small mostly waits, and burns its core while it does. Other
    tests use that core."""
    torch.set_num_threads(1)
