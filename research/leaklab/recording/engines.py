"""How the rig starts an engine: command, environment, and the configuration to record it with.

vLLM and SGLang are those of the conformance suite, with the probe and the injector on their path.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from leaklab.recording.run import Fault, Run
from plimsoll_api import supervisor_config
from plimsoll_api.engines import EngineType
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.names import TOKEN_FILE
from plimsoll_api.supervisor_config import (
    CONFIG_FILE,
    CONTAINER_ENV,
    PROBE_DIR_ENV,
    EngineEndpoint,
    ServiceRef,
    SupervisorConfig,
)
from plimsoll_cli.local.plan import LOOPBACK_ADDRESS, Command
from plimsoll_cli.local.runner import choose_free_ports
from plimsoll_probe.install import install as install_probe
from tests.conformance.peers import CHECKPOINT, Peer

MIB = 1 << 20
BUDGET = MemoryBudget(256 * MIB, 3600.0)
WARMUP_S = 60.0
FOLDER_ENV, WAITS_ENV = "PLIMSOLL_INJECTOR_DIR", "PLIMSOLL_INJECTOR_WAITS"
"""The same as in ``inside/plimsoll_injector.py``, which imports nothing of ours."""
HERE = Path(__file__).parent
MODULES = (
    "__init__.py", "mechanisms.py", "service_leaks.py", "engine_leaks.py", "runtime_leaks.py",
    "library_leaks.py", "bookkeeping_leaks.py", "bounded_growth.py", "bounded_caches.py",
    "ended_growth.py", "device_growth.py", "device_reserves.py",
)  # fmt: skip
"""Of the lab, those that the injector imports."""
ENTRY_POINTS = """\
[vllm.general_plugins]
plimsoll_injector = plimsoll_injector:load

[sglang.srt.plugins]
plimsoll_injector = plimsoll_injector:load
"""
METADATA = "Metadata-Version: 2.1\nName: plimsoll-injector\nVersion: 1\n"
OF_OURS = ("PATH", "HOME", "PYTHONPATH", "LANG", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Place:
    """Where one recording runs: its folder, the device (``cpu`` or ``cuda``), whether other engines
    use that too, and the folders of the probe, of models and of adapters."""

    folder: Path
    device: str
    shared: bool
    inside: Path
    models: Path


@dataclass(frozen=True)
class Launch:
    """An engine that can be started. ``ready`` is the path that answers once it serves."""

    command: Command
    url: str
    ready: str


def install(folder: Path) -> None:
    """Write what engines of others are to have on their path: the probe and the injector."""
    install_probe(folder)
    shutil.copyfile(HERE / "inside" / "plimsoll_injector.py", folder / "plimsoll_injector.py")
    (folder / "leaklab").mkdir(exist_ok=True)
    for name in MODULES:
        shutil.copyfile(HERE.parent / name, folder / "leaklab" / name)
    info = folder / "plimsoll_injector-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


def launch(run: Run, place: Place, peer: Peer | None) -> Launch:
    """Write the run's configuration, and return how its engine starts."""
    port, admin_port = choose_free_ports([None, None])
    url = f"http://{LOOPBACK_ADDRESS}:{port}"
    folder = place.folder
    (folder / "etc").mkdir(parents=True, exist_ok=True)
    (folder / "run").mkdir(exist_ok=True)
    if run.engine is EngineType.PLIMSOLL:
        endpoint = EngineEndpoint(run.engine, f"http://{LOOPBACK_ADDRESS}:{admin_port}", url)
        (folder / "run" / TOKEN_FILE).write_text("recording")
        command = _ours(run, place, port, admin_port)
    else:
        assert peer is not None, f"{run.name}: no peer of type {run.engine}"
        (folder / "probe").mkdir(exist_ok=True)
        endpoint = EngineEndpoint(run.engine, url, url, container=folder.name)
        command = _theirs(run, place, port, peer)
    memory = MemoryPolicy(BUDGET, BUDGET, shared_device=place.shared, warmup_s=WARMUP_S)
    config = SupervisorConfig(ServiceRef(name=run.name), endpoint, memory, sample_interval_s=1.0)
    (folder / "etc" / CONFIG_FILE).write_bytes(supervisor_config.encode_config(config))
    return Launch(command, url, "/ready" if run.engine is EngineType.PLIMSOLL else "/health")


def recorder(run: Run, place: Place, out: Path, seconds: float) -> Command:
    """``plimsoll record`` of the engine."""
    argv = (sys.executable, "-m", "plimsoll_cli.main", "record", str(out))
    more = (f"--run-dir={place.folder}", f"--duration={seconds:.0f}s")
    environment = dict(os.environ)
    if run.engine is not EngineType.PLIMSOLL:
        environment[PROBE_DIR_ENV] = str(place.folder / "probe")
    return Command("recorder", argv + more, environment, place.folder / "recorder.log")


def _ours(run: Run, place: Place, port: int, admin_port: int) -> Command:
    argv: tuple[str, ...] = (
        sys.executable, "-m", "plimsoll_engine", "serve",
        f"--model={place.models / run.model}", "--served-model-name=tiny",
        f"--host={LOOPBACK_ADDRESS}",
        f"--port={port}", f"--admin-port={admin_port}", f"--run-dir={place.folder / 'run'}",
        f"--device={place.device}", "--dtype=float32",
    )  # fmt: skip
    if not any(flag.startswith("--num-blocks") for flag in run.flags):
        # Unbounded, the first one would take the whole device.
        argv += ("--num-blocks=4096",)
    environment = {key: value for key, value in os.environ.items() if key in OF_OURS}
    if isinstance(run.cause, Fault):
        argv += ("--allow-inject",)
        environment["PLIMSOLL_INJECT"] = run.cause.text
    return Command("engine", argv + run.flags, environment, place.folder / "engine.log")


def _theirs(run: Run, place: Place, port: int, peer: Peer) -> Command:
    program = str(peer.home / peer.command[0])
    argv = (program, *peer.command[1:], f"--port={port}", *run.flags)
    if peer.type is EngineType.VLLM and "--enforce-eager" not in argv:
        # Without CUDA graphs it starts in half the time.
        argv += ("--enforce-eager",)
    environment: Mapping[str, str] = os.environ | peer.environment | {
        "PATH": f"{peer.home / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(place.inside),
        "VLLM_CACHE_ROOT": str(place.folder / "cache"),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        CONTAINER_ENV: place.folder.name,
        PROBE_DIR_ENV: str(place.folder / "probe"),
        FOLDER_ENV: str(place.folder),
    }  # fmt: skip
    if place.device == "cpu":
        environment = {**environment, WAITS_ENV: "1"}
    return Command("engine", argv, environment, place.folder / "engine.log")


def told(command: Command, place: Place) -> str:
    """The command line, without what is of one machine alone."""
    known = {
        str(place.folder): "FOLDER",
        str(place.models): "MODELS",
        str(CHECKPOINT): "CHECKPOINT",
    }
    words = [Path(command.argv[0]).name, *command.argv[1:]]
    line = " ".join(words)
    for path, name in known.items():
        line = line.replace(path, name)
    injected = command.env.get("PLIMSOLL_INJECT")
    return f"PLIMSOLL_INJECT={injected} {line}" if injected else line
