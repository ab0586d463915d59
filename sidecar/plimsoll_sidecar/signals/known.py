"""Which signals a sample has: what the supervisor does not see it cannot supervise."""

from __future__ import annotations

from plimsoll_sidecar.trace import Sample


def known(sample: Sample) -> dict[str, bool]:
    """``engine`` and ``host`` always; ``device`` where the sample has one at all."""
    host = sample.host
    found = {
        "engine": sample.scrape_ok,
        "host": any(size is not None for size in (host.cgroup_anon, host.rss_anon)),
    }
    if sample.device:
        found["device"] = any(device.used is not None for device in sample.device)
    return found
