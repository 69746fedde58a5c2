"""Turns images into the pixels that an input takes: those of Pillow, files, and bytes of files. Reads files.

Pillow is imported only to decode a file. What a version does not say is not guessed: an image of another size, and
values that were scaled in training, are refused with what to send.
"""

from __future__ import annotations

import io
import sys
from os import PathLike, fspath
from typing import Any

import numpy as np

from millstream.client.documents import Tensor
from millstream.client.tensors import Array
from millstream.services.errors import invalid

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
#: modes of Pillow with 8 bits for each value: others would be cut off at 255
_MODES_OF_BYTES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"})


def is_image(value: Any) -> bool:
    """Whether a value is an image of Pillow, or the bytes or the path of a file that may be one."""
    module = sys.modules.get("PIL.Image")  # whoever has such an image has imported it
    return isinstance(value, bytes | bytearray | PathLike) or (module is not None and isinstance(value, module.Image))


def pixels(spec: Tensor, image: dict[str, Any], values: list[Any]) -> Array:
    """Return images as an input takes them: (images, channels, height, width), or the channels last.

    Args:
        spec: of the input.
        image: how the input holds an image, as the version's metadata says.
        values: images of Pillow, paths, or the bytes of files.

    Raises:
        Failure: INVALID: one is no image or of another size, or nothing says how pixels become values.
    """
    shape = f"{spec['datatype']} {spec['shape']}"
    first = image["layout"] == "channels_first"
    if spec["datatype"] != "UINT8":
        raise invalid(
            f"input '{spec['name']}' takes {shape}, and the model does not say how pixels become its values (mean, "
            f"deviation): send np.asarray(image){'.transpose(2, 0, 1)' if first else ''}, scaled as in its training"
        )
    arrays = [_pixels(_opened(value), image, shape) for value in values]
    if any(array.shape != arrays[0].shape for array in arrays):
        raise invalid("the images have different sizes: resize them to one, or send them one by one")
    return np.stack(arrays)


def _pixels(picture: Any, image: dict[str, Any], shape: str) -> Array:
    width, height = picture.size
    if image["height"] not in {-1, height} or image["width"] not in {-1, width}:
        raise invalid(
            f"the image has {width} x {height} pixels, and the model takes {shape}: crop or resize it as in its "
            f"training, such as image.resize(({max(image['width'], 1)}, {max(image['height'], 1)}))"
        )
    if picture.mode not in _MODES_OF_BYTES:
        raise invalid(f"the image has values of mode {picture.mode}, not of 8 bits: send an array as in its training")
    mode = _MODES[image["channels"]]
    if mode != "RGBA" and picture.has_transparency_data and picture.convert("RGBA").getextrema()[3][0] < 255:
        raise invalid(f"the image is transparent in places, and the model takes {shape}: put it on a background")
    array: Array = np.asarray(picture.convert(mode), np.uint8).reshape(height, width, image["channels"])
    return array.transpose(2, 0, 1) if image["layout"] == "channels_first" else array


def _opened(value: Any) -> Any:
    """Return the decoded image of Pillow."""
    if isinstance(value, bytes | bytearray):
        what, file = "the bytes", io.BytesIO(value)
    elif isinstance(value, str | PathLike):
        what = f"the file {str(fspath(value))[:200]}"
        try:
            with open(value, "rb") as opened:
                file = io.BytesIO(opened.read())
        except (OSError, ValueError) as error:
            raise invalid(f"{what} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    else:
        return value
    try:
        from PIL import Image
    except ImportError as error:
        raise invalid("an image is decoded by Pillow, which is missing here: pip install pillow") from error
    try:
        picture = Image.open(file)
        picture.load()
    except Exception as error:  # of its decoders, which raise many kinds
        kind = type(error).__name__
        why = "its format is unknown" if kind == "UnidentifiedImageError" else str(error) or kind
        raise invalid(f"{what} cannot be decoded as an image: {why}") from error
    return picture
