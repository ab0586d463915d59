"""Device memory from the page of a DCGM exporter, over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from plimsoll_api.supervisor_config import DCGM_EXPORTER_PORT_ENV, NODE_IP_ENV
from plimsoll_sidecar.signals.device_memory import (
    NOT_CONFIGURED_MESSAGES,
    SCRAPE_PERIOD_S,
    AmdExporter,
    Dcgm,
    DeviceBytes,
    Nvml,
    PodContainer,
    explain_unused_sources,
    list_assigned_devices,
    make_node_url,
)
from plimsoll_sidecar.signals.device_sharing import SharingDetector
from tests.http_server import Handler, answering

MIB = 1 << 20


def line(name: str, uuid: str, value: str, more: str = "") -> str:
    labels = f'gpu="0",UUID="{uuid}",pci_bus_id="00000000:00:04.0",device="nvidia0"{more}'
    return f'DCGM_FI_DEV_FB_{name}{{{labels},modelName="NVIDIA H200",pod=""}} {value}\n'


PAGE = (
    "# HELP DCGM_FI_DEV_FB_USED Framebuffer memory used (in MiB).\n"
    "# TYPE DCGM_FI_DEV_FB_USED gauge\n"
    + line("USED", "GPU-a", "1000")
    + line("FREE", "GPU-a", "2000")
    + line("RESERVED", "GPU-a", "600")
    + line("USED", "GPU-b", "7")
    + line("FREE", "GPU-b", "3")
    + line("USED", "GPU-c", "7")
)


@contextmanager
def exporter(pages: list[tuple[int, str]]) -> Iterator[int]:
    """Answers with one page after another, the last one again and again."""

    class Exporter(Handler):
        def do_GET(self) -> None:
            status, page = pages.pop(0) if len(pages) > 1 else pages[0]
            self.answer(status if self.path == "/metrics" else 404, page.encode())

    with answering(Exporter) as port:
        yield port


def test_a_device_is_found_by_its_uuid() -> None:
    with exporter([(200, PAGE)]) as port:
        dcgm = Dcgm(f"http://127.0.0.1:{port}")
        assert dcgm.read_memory("GPU-a") == DeviceBytes(1000 * MIB, 3600 * MIB)
        assert dcgm.read_memory("GPU-b") == DeviceBytes(7 * MIB, 10 * MIB)
        assert dcgm.read_memory("GPU-c") is None, "without what is free its size is unknown"
        assert dcgm.read_memory("GPU-x") is None
        assert dcgm.read_memory("MIG-a") is None


def test_a_page_is_read_once_in_a_while_and_a_failed_one_is_unknown() -> None:
    times = iter(
        (0.0, SCRAPE_PERIOD_S / 2, SCRAPE_PERIOD_S, 2 * SCRAPE_PERIOD_S, 3 * SCRAPE_PERIOD_S)
    )
    later = PAGE.replace("1000", "1500")
    with exporter([(200, PAGE), (500, ""), (200, later)]) as port:
        dcgm = Dcgm(f"http://127.0.0.1:{port}", clock=lambda: next(times))
        found = [dcgm.read_memory("GPU-a") for _ in range(4)]
    assert [memory and memory.used // MIB for memory in found] == [1000, 1000, None, 1500]
    assert dcgm.read_memory("GPU-a") is None, "nobody listens any more"


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("10.0.0.7", "9400", "http://10.0.0.7:9400"),
        ("fd00::7", "9400", "http://[fd00::7]:9400"),
        ("10.0.0.7", "", None),
        ("", "9400", None),
    ],
)
def test_the_environment_names_the_nodes_exporter(
    monkeypatch: pytest.MonkeyPatch, host: str, port: str, url: str | None
) -> None:
    monkeypatch.setenv(NODE_IP_ENV, host)
    monkeypatch.setenv(DCGM_EXPORTER_PORT_ENV, port)
    assert make_node_url(os.environ[DCGM_EXPORTER_PORT_ENV]) == url
    assert (Dcgm.from_environment() is None) == (url is None)


MINE = PodContainer("models", "qwen-0", "engine")


def owned(pod: str, namespace: str = "models", container: str = "engine", more: str = "") -> str:
    return f'{more},container="{container}",namespace="{namespace}",pod="{pod}"'


def test_a_slice_is_found_by_its_gpu_instance() -> None:
    page = "".join(
        line(name, "GPU-a", value, f',GPU_I_PROFILE="1g.10gb",GPU_I_ID="{part}"')
        for part, used in (("7", "500"), ("9", "800"))
        for name, value in (("USED", used), ("FREE", "200"))
    )
    with exporter([(200, page)]) as port:
        dcgm = Dcgm(f"http://127.0.0.1:{port}")
        assert dcgm.read_memory("MIG-GPU-a/9/0") == DeviceBytes(800 * MIB, 1000 * MIB)
        assert dcgm.read_memory("GPU-a") is None, "the slices are not the whole"
        assert dcgm.read_memory("MIG-GPU-a/1/0") is None


def test_the_page_names_everyone_who_has_a_device() -> None:
    two = line("USED", "GPU-a", "1", owned("qwen-0")) + line("USED", "GPU-a", "1", owned("qwen-1"))
    with exporter([(200, two.replace(',pod=""', ""))]) as port:
        dcgm = Dcgm(f"http://127.0.0.1:{port}", pod=MINE)
        assert dcgm.find_owners("GPU-a") == {MINE, PodContainer("models", "qwen-1", "engine")}
        assert dcgm.find_owners("GPU-b") == set()
        assert (
            "dcgm reports that"
            in SharingDetector({"dcgm": dcgm}).find_reasons(["GPU-a"], list)["GPU-a"]
        )


def test_the_page_says_which_devices_are_the_pods() -> None:
    page = (
        line("USED", "GPU-a", "1", owned("qwen-0")).replace(',pod=""', "")
        + line("USED", "GPU-b", "1", owned("qwen-1")).replace(',pod=""', "")
        + line("USED", "GPU-c", "1", owned("qwen-0", "other")).replace(',pod=""', "")
        + line("USED", "GPU-d", "1", owned("qwen-0", container="proxy")).replace(',pod=""', "")
        + line("USED", "GPU-e", "1")
    )
    with exporter([(200, page)]) as port:
        dcgm = Dcgm(f"http://127.0.0.1:{port}", pod=MINE)
        assert dcgm.list_assigned_devices() == ["GPU-a"]
        assert [device.uuid for device in list_assigned_devices([Nvml(), dcgm])] == ["GPU-a"]
        assert Dcgm(f"http://127.0.0.1:{port}").list_assigned_devices() == []


def test_a_device_that_pods_share_is_counted_once() -> None:
    page = "".join(
        line(name, "GPU-a", value, owned(pod)).replace(',pod=""', "")
        for pod in ("qwen-0", "qwen-1")
        for name, value in (("USED", "600"), ("FREE", "400"))
    )
    with exporter([(200, page)]) as port:
        dcgm = Dcgm(f"http://127.0.0.1:{port}", pod=MINE)
        assert dcgm.read_memory("GPU-a") == DeviceBytes(600 * MIB, 1000 * MIB)


def amd(name: str, number: int, value: str, pod: str) -> str:
    return (
        f'{name}{{card_model="0x74a1",container="engine",gpu_id="{number}",gpu_partition_id="0",'
        f'hostname="node",namespace="models",pod="{pod}",serial_number="6923"}} {value}\n'
    )


@pytest.mark.parametrize("prefix", ["", "amd_"])
def test_amds_exporter_tells_used_and_total_of_the_pods_devices(prefix: str) -> None:
    page = (
        amd(prefix + "gpu_used_vram", 0, "283", "")
        + amd(prefix + "gpu_used_vram", 3, "4096", "qwen-0")
        + amd(prefix + "gpu_total_vram", 3, "196592", "qwen-0")
        + amd(prefix + "gpu_used_visible_vram", 3, "7", "qwen-0")
    )
    with exporter([(200, page)]) as port:
        source = AmdExporter(f"http://127.0.0.1:{port}", pod=MINE)
        (name,) = source.list_assigned_devices()
        assert source.read_memory(name) == DeviceBytes(4096 * MIB, 196592 * MIB)
        assert source.read_memory("AMD-0") is None, "its size is not on the page"
        assert source.read_memory("GPU-a") is None


def test_why_a_source_is_not_in_use_is_said() -> None:
    with exporter([(500, "")]) as port:
        dcgm = Dcgm(f"http://127.0.0.1:{port}", pod=MINE)
        told = explain_unused_sources({"dcgm": dcgm}, None, ["GPU-a"])
    assert told[0] == "nvml: the source was not tried"
    assert told[1] == "dcgm: GET /metrics returned HTTP 500"
    assert told[2] == f"amd: {NOT_CONFIGURED_MESSAGES['amd']}"
    assert "names a device of the engine" in explain_unused_sources({}, None, [])[0]
    with exporter([(200, PAGE)]) as port:
        dcgm = Dcgm(f"http://127.0.0.1:{port}", pod=MINE)
        assert "dcgm: the source does not report the memory of GPU-x" in explain_unused_sources(
            {"dcgm": dcgm}, "nvml", ["GPU-x"]
        )
        assert not any(
            one.startswith("dcgm")
            for one in explain_unused_sources({"dcgm": dcgm}, "dcgm", ["GPU-a"])
        )
