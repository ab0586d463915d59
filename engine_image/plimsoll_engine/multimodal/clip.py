"""Image processor for CLIP and SigLIP encoders: resize, centre crop, rescale, normalise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from plimsoll_engine.multimodal import images
from plimsoll_engine.multimodal.json_file import JsonFile, hash_content, hash_settings
from plimsoll_engine.multimodal.processor import MediaKind, ProcessedMedia


class ClipProcessor:
    """Image processor of LLaVA checkpoints."""

    kind: MediaKind = "image"

    def __init__(self, folder: Path) -> None:
        config = JsonFile(folder / "config.json")
        settings = JsonFile(folder / "preprocessor_config.json")
        for field in ("do_resize", "do_rescale", "do_normalize"):
            if settings.get(field, True) is not True:
                raise settings.make_error(field, "must be true")
        if settings.get("do_pad", False):
            raise settings.make_error("do_pad", "must be false")
        self._shortest, self._exact = _read_sizes(settings)
        self._crop = _read_crop_size(settings) if settings.get("do_center_crop", True) else None
        self._resample = Image.Resampling(settings.get("resample", Image.Resampling.BICUBIC))
        self._factor = float(settings.get("rescale_factor", 1 / 255))
        self._mean = np.array(settings.get("image_mean"), np.float32)
        self._std = np.array(settings.get("image_std"), np.float32)
        if self._mean.shape != (3,) or self._std.shape != (3,):
            raise settings.make_error("image_mean, image_std", "must be lists of three numbers")
        side = config.get_positive_int("vision_config.image_size")
        height, width = self._crop or self._exact or (0, 0)
        if (height, width) != (side, side):
            raise settings.make_error(
                "size, crop_size",
                f"must be {side} x {side}, which is vision_config.image_size in config.json",
            )
        if self._shortest is not None and self._shortest < side:
            raise settings.make_error(
                "size.shortest_edge",
                f"must be at least {side}, the size of the crop, got {self._shortest}",
            )
        self.shape = [3, side, side]
        self.placeholder: int | None = config.get_positive_int(
            "image_token_id" if config.get("image_token_id") else "image_token_index"
        )
        self.placeholders = (side // config.get_positive_int("vision_config.patch_size")) ** 2
        if config.get("vision_feature_select_strategy", "default") == "full":
            self.placeholders += 1  # CLIP's class token is kept
        self.tokens = self.placeholders
        self._settings = hash_settings(
            "clip", sorted(settings.content.items(), key=lambda kv: kv[0])
        )

    def hash_file(self, data: bytes) -> bytes:
        """Return the cache key of an image file with these settings."""
        return hash_content(self._settings, data)

    def process(self, data: bytes) -> ProcessedMedia:
        """Decode an image file and return its normalised pixels. Raises MediaError."""
        pixels = self.compute_pixels(images.decode(data))
        return ProcessedMedia("image", self.hash_file(data), self.shape, pixels.tobytes())

    def compute_pixels(
        self, image: Image.Image
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """Return normalised float32 pixels [3, side, side]."""
        width, height = image.size
        if self._shortest is None:
            assert self._exact is not None
            target_height, target_width = self._exact
        else:
            short, long = sorted((width, height))
            longest = int(self._shortest * long / short)
            target_width, target_height = (
                (self._shortest, longest) if width <= height else (longest, self._shortest)
            )
        image = image.resize((target_width, target_height), resample=self._resample)
        if self._crop is not None:
            top, left = (target_height - self._crop[0]) // 2, (target_width - self._crop[1]) // 2
            image = image.crop((left, top, left + self._crop[1], top + self._crop[0]))
        scaled = np.asarray(image, np.float32) * np.float32(self._factor)
        normal = (scaled - self._mean) / self._std
        return np.ascontiguousarray(normal.transpose(2, 0, 1), dtype="<f4")


def _read_sizes(settings: JsonFile) -> tuple[int | None, tuple[int, int] | None]:
    # (shortest edge, None) or (None, (height, width)), in pixels.
    size = settings.get("size")
    if isinstance(size, int):
        return settings.get_positive_int("size"), None
    if settings.get("size.shortest_edge") and not settings.get("size.longest_edge"):
        return settings.get_positive_int("size.shortest_edge"), None
    return None, (settings.get_positive_int("size.height"), settings.get_positive_int("size.width"))


def _read_crop_size(settings: JsonFile) -> tuple[int, int]:
    if isinstance(settings.get("crop_size"), int):
        return settings.get_positive_int("crop_size"), settings.get_positive_int("crop_size")
    return settings.get_positive_int("crop_size.height"), settings.get_positive_int(
        "crop_size.width"
    )
