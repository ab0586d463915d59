"""Tiny multimodal checkpoints: LLaVA (CLIP, projector, Llama) and Whisper, created in a second.

``python -m plimsoll_faults.models.tiny_media llava|whisper|all OUT`` writes one or all. The weights
are random, the bytes the same on every run, and the text depends on every pixel or sample.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers  # its parts load when they are used
from tokenizers import AddedToken

from plimsoll_faults.models import tiny_text

SEED = 21
HIDDEN_SIZE = 64
IMAGE_TOKEN = "<image>"
IMAGE_SIZE, PATCH_SIZE = 56, 14
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
SAMPLE_RATE_HZ = 16_000
NUM_MEL_BINS = 40
HOP_SAMPLES = 160
# Length of an audio window. Whisper's own is 30 s.
WINDOW_S = 1
WHISPER_TOKENS = (
    "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
    "<|notimestamps|>",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_llava(folder: Path) -> None:
    """Write a chat model that represents images of any size as 16 tokens each."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_text.train_tokenizer()
    tokenizer.add_special_tokens([AddedToken(IMAGE_TOKEN, special=True)])
    image_token = tokenizer.token_to_id(IMAGE_TOKEN)
    text = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.token_to_id(tiny_text.BOS),
        eos_token_id=tokenizer.token_to_id(tiny_text.EOS),
        pad_token_id=tokenizer.token_to_id(tiny_text.BOS),
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=HIDDEN_SIZE // 2,
        intermediate_size=HIDDEN_SIZE,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image_token,
        image_seq_length=NUM_IMAGE_TOKENS,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = transformers.LlavaForConditionalGeneration(config)
    _set_weights(model)
    with torch.no_grad():
        model.lm_head.weight[image_token] = 0.0  # it is never said
    _save_model(model, folder)
    tiny_text.write_tokenizer(tokenizer, folder)
    _update_json(folder / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    image_processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": IMAGE_SIZE},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": size,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE_TOKEN,
        "patch_size": PATCH_SIZE,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    _write_json(folder / "preprocessor_config.json", image_processor)
    _write_json(folder / "processor_config.json", processor)


def write_whisper(folder: Path) -> None:
    """Write a transcription model with audio windows of one second."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_text.train_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in WHISPER_TOKENS])
    token = {text: tokenizer.token_to_id(text) for text in WHISPER_TOKENS}
    eos = tokenizer.token_to_id(tiny_text.EOS)
    config = transformers.WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(),
        num_mel_bins=NUM_MEL_BINS,
        d_model=HIDDEN_SIZE,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=2 * HIDDEN_SIZE,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=2 * HIDDEN_SIZE,
        max_source_positions=WINDOW_S * SAMPLE_RATE_HZ // HOP_SAMPLES // 2,
        max_target_positions=448,
        pad_token_id=eos,
        bos_token_id=eos,
        eos_token_id=eos,
        decoder_start_token_id=token["<|startoftranscript|>"],
        dtype="float32",
    )
    model = transformers.WhisperForConditionalGeneration(config)
    _set_weights(model)
    with torch.no_grad():
        # Input and output embeddings are one matrix in Whisper: without louder layers and positions
        # every token would answer itself, whatever it hears.
        model.model.decoder.embed_positions.weight.mul_(4.0)
        for layer in model.model.decoder.layers:
            layer.self_attn.out_proj.weight.mul_(3.0)
            layer.encoder_attn.q_proj.weight.mul_(3.0)
            layer.encoder_attn.out_proj.weight.mul_(4.0)
            layer.fc2.weight.mul_(8.0)
    _save_model(model, folder)
    tiny_text.write_tokenizer(tokenizer, folder)
    generation = {
        "bos_token_id": eos,
        "eos_token_id": eos,
        "pad_token_id": eos,
        "decoder_start_token_id": token["<|startoftranscript|>"],
        "is_multilingual": True,
        "lang_to_id": {text: token[text] for text in ("<|en|>", "<|de|>")},
        "task_to_id": {task: token[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "no_timestamps_token_id": token["<|notimestamps|>"],
        "suppress_tokens": [token[text] for text in WHISPER_TOKENS],
        "begin_suppress_tokens": [eos],
        "max_length": 448,
    }
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": NUM_MEL_BINS,
        "sampling_rate": SAMPLE_RATE_HZ,
        "hop_length": HOP_SAMPLES,
        "chunk_length": WINDOW_S,
        "n_fft": 400,
        "padding_value": 0.0,
    }
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "preprocessor_config.json", extractor)


def _set_weights(model: transformers.PreTrainedModel) -> None:
    # The variance of activations stays near 1. Weights of norms are near 1, and biases near 0.
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                embedding = "embed" in name
                fan_in = 1 if embedding else math.prod(weight.shape[1:])
                weight.copy_(noise * (0.7 if embedding else 1.2) / math.sqrt(fan_in))
            else:
                weight.copy_(noise * 0.1 + ("norm" in name and "weight" in name))


def _save_model(model: transformers.PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # the engine may run as another user


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _update_json(path: Path, **fields: Any) -> None:
    _write_json(path, json.loads(path.read_text()) | fields)


WRITERS = {"llava": write_llava, "whisper": write_whisper}


def main() -> None:
    """Write tiny LLaVA or Whisper checkpoints into a folder."""
    parser = argparse.ArgumentParser(description="Write the tiny checkpoint of a multimodal model.")
    parser.add_argument("kind", choices=[*sorted(WRITERS), "all"])
    parser.add_argument("out", type=Path, help="folder in which to write the checkpoint")
    arguments = parser.parse_args()
    if arguments.kind != "all":
        WRITERS[arguments.kind](arguments.out)
        return
    for kind, write in WRITERS.items():
        write(arguments.out / kind)


if __name__ == "__main__":
    main()
