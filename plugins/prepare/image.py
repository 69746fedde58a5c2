"""Decodes an image and makes a tensor of it, as the steps of a version say. Pure; it needs Pillow.

bytes ─> open: format, pixels ─> turn as EXIF says ─> colours ─> resize ─> crop ─> scale, mean, std ─> layout
An image whose pixels would not be what its author sees is refused: 16 bits, an animation, transparency.
Source: transformers, image_processing_backends (PilBackend) and image_transforms: center_crop pads with zeros,
the longer side is cut to whole pixels, numbers are FP32.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import numpy as np

from millstream.services.errors import Failure, invalid
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.preparation import PREPARED_PIXELS_MAX, ImagePlan

Array = np.ndarray[Any, Any]

#: pixels of a decoded image: an uncompressed one takes up to 4 bytes each, a few times over
PIXELS_MAX = 64 << 20
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
#: first bytes of each; of WEBP bytes 8 to 12, too
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\x00", b"MM\x00*")
IMAGES = frozenset({"image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp", "image/tiff"})
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
#: modes of Pillow with 8 bits, or one, for each value
_MODES_OF_BYTES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
_HEAD_BYTES = 16


def is_image(content: bytes | memoryview) -> bool:
    """Return whether bytes begin as an image does whose format is decoded here."""
    head = bytes(content[:_HEAD_BYTES])
    if head.startswith(_MAGIC):
        return True
    if head.startswith(b"BM"):  # two letters are few: the reserved bytes are zero, too
        return head[6:10] == b"\0\0\0\0"
    return head[:4] == b"RIFF" and head[8:12] == b"WEBP"


def image_tensor(plan: ImagePlan, content: bytes) -> Array:
    """Return (1, channels, height, width), or the channels last, of an encoded image. Raises Failure(INVALID)."""
    picture = _cropped(_resized(_coloured(_opened(content), plan), plan), plan)
    pixels = np.asarray(picture).reshape(picture.height, picture.width, plan.channels)
    table = _values(plan)
    if table is not None:
        made: Array = np.empty(pixels.shape, table.dtype)
        for channel in range(plan.channels):
            np.take(table[channel], pixels[:, :, channel], out=made[:, :, channel])
        pixels = made
    if plan.channels_first:
        pixels = pixels.transpose(2, 0, 1)
    return np.ascontiguousarray(pixels)[None]


def _opened(content: bytes) -> Any:
    """Return the image of Pillow, decoded and turned as its EXIF data says."""
    from PIL import Image, ImageOps

    Image.MAX_IMAGE_PIXELS = None  # it warns in places, and this limit is exact
    try:
        picture = Image.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:  # of its decoders, which raise many kinds
        raise _undecodable(error) from None
    width, height = picture.size
    if width * height > PIXELS_MAX:
        raise invalid(f"the image has {width} x {height} pixels: at most {PIXELS_MAX}")
    if getattr(picture, "is_animated", False) and picture.format != "MPO":  # a photo beside its preview is no film
        raise invalid(f"the image has {getattr(picture, 'n_frames', 2)} frames: send one of them")
    try:
        picture.load()
        turned = ImageOps.exif_transpose(picture)
    except Exception as error:
        raise _undecodable(error) from None
    return picture if turned is None else turned


def _undecodable(error: Exception) -> Failure:
    kind = type(error).__name__
    if kind == "UnidentifiedImageError":
        return invalid(f"the bytes are no image of a known format: {', '.join(FORMATS)}")
    return invalid(f"the image cannot be decoded: {' '.join(str(error).split())[:200] or kind}")


def _coloured(picture: Any, plan: ImagePlan) -> Any:
    """Return the image with the channels of the input. Raises Failure(INVALID) where that would change what is seen."""
    from PIL import Image

    if picture.mode not in _MODES_OF_BYTES:
        raise invalid(f"the image has values of mode {picture.mode}, not of 8 bits: convert it, or send a tensor")
    mode = _MODES[plan.channels]
    if mode != "RGBA" and picture.has_transparency_data:
        picture = picture.convert("RGBA")
        if picture.getextrema()[3][0] < 255:
            if plan.background is None:
                raise invalid("the image is transparent in places, and the model has no background for it: give it one")
            behind = Image.new("RGBA", picture.size, (*plan.background, 255))
            behind.alpha_composite(picture)
            picture = behind
    return picture if picture.mode == mode else picture.convert(mode)


def _resized(picture: Any, plan: ImagePlan) -> Any:
    from PIL import Image

    width, height = picture.size
    if plan.resize is None:
        size = (width, height)
    elif isinstance(plan.resize, int):
        # The longer side is rounded down, as transformers and torchvision do.
        short, long = min(width, height), max(width, height)
        longer = int(plan.resize * long / short)
        size = (plan.resize, longer) if width <= height else (longer, plan.resize)
    else:
        size = (plan.resize[1], plan.resize[0])
    if size[0] * size[1] > PREPARED_PIXELS_MAX:
        raise invalid(f"the image would be resized to {size[0]} x {size[1]} pixels: at most {PREPARED_PIXELS_MAX}")
    return picture if size == picture.size else picture.resize(size, Image.Resampling[plan.resample.upper()])


def _cropped(picture: Any, plan: ImagePlan) -> Any:
    """Return the part around the centre; what lies outside of the image is 0."""
    if plan.crop is None:
        return picture
    height, width = plan.crop
    top, left = (picture.height - height) // 2, (picture.width - width) // 2
    return picture.crop((left, top, left + width, top + height))


@lru_cache(maxsize=64)
def _values(plan: ImagePlan) -> Array | None:
    """Return the value of each of 256 levels for each channel, in the input's datatype; None: the levels themselves."""
    if plan.datatype == "UINT8":
        return None
    levels = (np.arange(256, dtype=np.float64) * plan.scale).astype(np.float32)
    table = np.tile(levels, (plan.channels, 1))
    if plan.mean is not None:
        table = table - np.array(plan.mean, np.float32)[:, None]
    if plan.std is not None:
        table = table / np.array(plan.std, np.float32)[:, None]
    return np.asarray(table, NUMPY[plan.datatype])
