"""A process near its limit of open files: no suspicion by itself, and evidence of every other.

Tests ``detect/detector.py``.
"""

from __future__ import annotations

from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import Host, OpenFiles, Sample, SampleLoad
from plimsoll_sidecar.detect.detector import Detector

POLICY = MemoryPolicy(host=MemoryBudget(1 << 30, 3600.0), warmup_s=5.0)
SENTENCE = "APIServer has 1,000 files open, and its limit is 1,024"


def test_a_stall_says_that_the_files_are_used_up() -> None:
    detector = Detector(POLICY, 5.0, 1.0)
    for second in range(400):
        stalled = second >= 300
        steps = min(second, 300)
        open_ = 1000 if second >= 100 else 40
        host = Host(rss_anon=1 << 30, processes=1, open_files=OpenFiles("APIServer", open_, 1024))
        load = SampleLoad(running=1, waiting=1, steps_total=steps, requests_total=steps)
        seen = detector.update(Sample(t=float(second), epoch=1, host=host, load=load, ready=True))
        if not stalled:
            assert seen.suspicions == [], "no memory grows: descriptors alone are no suspicion"
    (suspicion,) = seen.suspicions
    assert suspicion.kind is IncidentKind.STALL
    assert suspicion.evidence.count(SENTENCE) == 1, "once, however long it stands"
    host = Host(rss_anon=1 << 30, processes=1, open_files=OpenFiles("APIServer", 40, 1024))
    after = detector.update(Sample(t=400.0, epoch=1, host=host, load=load, ready=True))
    assert all(SENTENCE not in one.evidence for one in after.suspicions)
