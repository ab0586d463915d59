"""What doctor makes of a supervisor's answer: unknown is neither well nor ill.

Tests ``cluster/doctor.py``.
"""

from __future__ import annotations

from plimsoll_api.action_answer import ActionAnswer
from plimsoll_cli.cluster.doctor import Check, shared_memory


def test_unreadable_shared_memory_is_unknown_with_its_reason() -> None:
    reason = "/dev/shm holds more than 4096 files"
    for stood in (None, 4096):
        seen = ActionAnswer(shared_orphan=stood, shared_memory_error=reason)
        assert list(shared_memory("qwen-0", seen)) == [
            Check("qwen-0 /dev/shm", None, f"unknown: {reason}")
        ]


def test_shared_memory_that_is_known_or_not_watched() -> None:
    seen = ActionAnswer(shared_orphan=2 << 20)
    assert list(shared_memory("qwen-0", seen)) == [
        Check("qwen-0 /dev/shm", True, "2.0 MiB that no process holds")
    ]
    assert list(shared_memory("qwen-0", ActionAnswer())) == [], "the pod has no volume there"
