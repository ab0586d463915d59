"""Images for CLIP and SigLIP towers: resize, crop the centre, scale, normalise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from plimsoll_engine.multimodal import images
from plimsoll_engine.multimodal.json_file import JsonFile, content_key, settings_key
from plimsoll_engine.multimodal.processor import Kind, Processed


class ClipProcessor:
    """The processor of LLaVA's images.

    See :class:`plimsoll_engine.multimodal.processor.Processor`; UnsupportedError names a field.
    """

    kind: Kind = "image"

    def __init__(self, folder: Path) -> None:
        config = JsonFile(folder / "config.json")
        own = JsonFile(folder / "preprocessor_config.json")
        for field in ("do_resize", "do_rescale", "do_normalize"):
            if own.get(field, True) is not True:
                raise own.wrong(field, "only true is supported")
        if own.get("do_pad", False):
            raise own.wrong("do_pad", "only false is supported")
        self._shortest, self._exact = _size(own)
        self._crop = _crop(own) if own.get("do_center_crop", True) else None
        self._resample = Image.Resampling(own.get("resample", Image.Resampling.BICUBIC))
        self._factor = float(own.get("rescale_factor", 1 / 255))
        self._mean = np.array(own.get("image_mean"), np.float32)
        self._std = np.array(own.get("image_std"), np.float32)
        if self._mean.shape != (3,) or self._std.shape != (3,):
            raise own.wrong("image_mean, image_std", "expected three numbers each")
        side = config.integer("vision_config.image_size")
        height, width = self._crop or self._exact or (0, 0)
        if (height, width) != (side, side):
            raise own.wrong(
                "size, crop_size", f"make no {side} x {side} (vision_config.image_size)"
            )
        if self._shortest is not None and self._shortest < side:
            raise own.wrong("size.shortest_edge", f"{self._shortest} is less than the crop")
        self.shape = [3, side, side]
        self.placeholder: int | None = config.integer(
            "image_token_id" if config.get("image_token_id") else "image_token_index"
        )
        self.placeholders = (side // config.integer("vision_config.patch_size")) ** 2
        if config.get("vision_feature_select_strategy", "default") == "full":
            self.placeholders += 1  # CLIP's class token stays
        self.tokens = self.placeholders
        self._settings = settings_key("clip", sorted(own.content.items(), key=lambda kv: kv[0]))

    def key(self, data: bytes) -> bytes:
        """Return the content's key: it also depends on how an image is processed."""
        return content_key(self._settings, data)

    def process(self, data: bytes) -> Processed:
        """Pixels float32 [channels, height, width] of an encoded image. Raises MediaError."""
        pixels = self.pixels(images.decode(data))
        return Processed("image", self.key(data), self.shape, pixels.tobytes())

    def pixels(self, image: Image.Image) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """[3, side, side], normalised."""
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


def _size(own: JsonFile) -> tuple[int | None, tuple[int, int] | None]:
    """Return the shortest edge, or height and width."""
    size = own.get("size")
    if isinstance(size, int):
        return own.integer("size"), None
    if own.get("size.shortest_edge") and not own.get("size.longest_edge"):
        return own.integer("size.shortest_edge"), None
    return None, (own.integer("size.height"), own.integer("size.width"))


def _crop(own: JsonFile) -> tuple[int, int]:
    if isinstance(own.get("crop_size"), int):
        return own.integer("crop_size"), own.integer("crop_size")
    return own.integer("crop_size.height"), own.integer("crop_size.width")
