"""Free host memory by the control group's files and the machine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll_engine.process.headroom import measure_host_headroom

GIB = 1 << 30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(str(content))


def machine(tmp_path: Path, membership: str) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, meminfo=f"MemTotal: 9999999 kB\nMemAvailable: {(8 * GIB) >> 10} kB\n")
    write(proc / "self", cgroup=membership)
    groups.mkdir(exist_ok=True)
    return proc, groups


@pytest.mark.parametrize("folder", ["", "kubepods/pod1"], ids=["in a container", "outside"])
def test_version_2_counts_the_page_cache_as_free(tmp_path: Path, folder: str) -> None:
    proc, groups = machine(tmp_path, "0::/kubepods/pod1\n")
    write(groups / folder, memory__max=4 * GIB, memory__current=3 * GIB,
          memory__stat=f"anon 5\nactive_file {GIB >> 1}\ninactive_file {GIB >> 2}\n")  # fmt: skip
    assert measure_host_headroom(proc, groups) == GIB + (GIB >> 1) + (GIB >> 2)
    write(groups / folder, memory__current=5 * GIB)
    assert measure_host_headroom(proc, groups) == 0
    write(groups / folder, memory__max="max\n")
    assert measure_host_headroom(proc, groups) == 8 * GIB, "no limit: the machine's"


def test_version_1(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "9:name=systemd:/\n4:memory,cpu:/docker/x\n0::/\n")
    write(groups / "memory/docker/x", memory__limit_in_bytes=4 * GIB,
          memory__usage_in_bytes=3 * GIB, memory__stat="total_active_file 7")  # fmt: skip
    assert measure_host_headroom(proc, groups) == GIB, "a cache that is not told counts as used"


def test_what_nobody_says_is_unknown(tmp_path: Path) -> None:
    assert measure_host_headroom(tmp_path / "proc", tmp_path / "cgroup") is None
    proc, groups = machine(tmp_path, "nonsense\n:\n")
    assert measure_host_headroom(proc, groups) == 8 * GIB
