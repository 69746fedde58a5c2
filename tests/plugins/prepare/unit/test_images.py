"""Tensors of images equal what Pillow and numpy make, and images that would be seen otherwise are refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from millstream.plugins.prepare.image import PIXELS_MAX, image_tensor, is_image
from millstream.services.errors import Failure
from millstream.services.model.preparation import ImagePlan, ImageSteps, image_plan
from millstream.services.model.signature import TensorSpec

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def plan(datatype: str = "FP32", shape: tuple[int, ...] = (-1, 3, 24, 24), **steps: Any) -> ImagePlan:
    return image_plan(ImageSteps(**steps), TensorSpec(name="x", datatype=datatype, shape=shape))


def picture(mode: str = "RGB", size: tuple[int, int] = (60, 40)) -> Image.Image:
    random = np.random.default_rng(3)
    channels = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4, "LA": 2}[mode]
    noise = random.integers(0, 256, (size[1] // 4, size[0] // 4, channels), np.uint8)
    return Image.fromarray(noise.squeeze(), mode=None if mode != "CMYK" else mode).resize(size)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def expected(image: Image.Image, resize: tuple[int, int], crop: int | None = None) -> np.ndarray[Any, Any]:
    """Return what a notebook does: Pillow, then numpy."""
    made = image.convert("RGB").resize(resize, Image.Resampling.BILINEAR)
    if crop is not None:
        left, top = (made.width - crop) // 2, (made.height - crop) // 2
        made = made.crop((left, top, left + crop, top + crop))
    array = (np.asarray(made, np.float32) / 255 - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return array.transpose(2, 0, 1)[None]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("JPEG", {"quality": 90}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {})],
)
def test_a_photo_as_a_notebook_prepares_it(kind: str, options: dict[str, Any]) -> None:
    content = saved(picture(), kind, **options)
    made = image_tensor(plan(resize=32, crop=24, mean=MEAN, std=STD), content)
    with Image.open(io.BytesIO(content)) as decoded:
        np.testing.assert_allclose(made, expected(decoded, (48, 32), 24), rtol=0, atol=1e-6)
    assert made.dtype == np.float32
    assert is_image(content)


def test_layouts_datatypes_and_colours() -> None:
    content = saved(picture())
    pixels = np.asarray(picture().resize((24, 24), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(image_tensor(plan("UINT8", (-1, 24, 24, 3)), content)[0], pixels)
    np.testing.assert_array_equal(image_tensor(plan("UINT8"), content)[0], pixels.transpose(2, 0, 1))
    half = image_tensor(plan("FP16"), content)
    assert half.dtype == np.float16
    grey = image_tensor(plan("UINT8", (-1, 1, 24, 24)), content)
    assert grey.shape == (1, 1, 24, 24)
    np.testing.assert_array_equal(
        grey[0, 0], np.asarray(picture().convert("L").resize((24, 24), Image.Resampling.BILINEAR))
    )
    four = image_tensor(plan("UINT8", (-1, 24, 24, 4)), saved(picture("RGBA")))
    assert four.shape == (1, 24, 24, 4)


def test_a_part_larger_than_the_image_is_padded_with_zeros() -> None:
    made = image_tensor(plan("UINT8", (-1, 3, 50, 30), crop={"height": 50, "width": 30}), saved(picture(size=(40, 21))))
    inner = np.asarray(picture(size=(40, 21)))[:, 5:35].transpose(2, 0, 1)
    assert not made[0, :, :14].any()
    np.testing.assert_array_equal(made[0, :, 15:36], inner)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_exif(orientation: int) -> None:
    upright = picture(size=(32, 24))
    turned = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }.get(orientation)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = upright if turned is None else upright.transpose(turned)
    made = image_tensor(plan("UINT8", (-1, 24, 32, 3)), saved(stored, exif=exif.tobytes()))
    np.testing.assert_array_equal(made[0], np.asarray(upright))


def test_colours_of_other_modes_are_those_that_are_seen() -> None:
    palette = picture().quantize(16)
    want = np.asarray(palette.convert("RGB").resize((24, 24), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(image_tensor(plan("UINT8", (-1, 24, 24, 3)), saved(palette))[0], want)
    printed = saved(picture("CMYK"), "JPEG")
    with Image.open(io.BytesIO(printed)) as decoded:
        want = np.asarray(decoded.convert("RGB").resize((24, 24), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(image_tensor(plan("UINT8", (-1, 24, 24, 3)), printed)[0], want)
    opaque = picture().convert("RGBA")
    want = np.asarray(picture().resize((24, 24), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(image_tensor(plan("UINT8", (-1, 24, 24, 3)), saved(opaque))[0], want)


def test_a_background_behind_transparent_pixels() -> None:
    clear = Image.new("RGBA", (24, 24), (255, 0, 0, 0))
    with pytest.raises(Failure, match="transparent in places"):
        image_tensor(plan("UINT8", (-1, 24, 24, 3)), saved(clear))
    made = image_tensor(plan("UINT8", (-1, 24, 24, 3), background=(1, 2, 3)), saved(clear))
    assert set(map(tuple, made.reshape(-1, 3).tolist())) == {(1, 2, 3)}


def _frames(kind: str) -> bytes:
    first, second = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    return saved(first, kind, save_all=True, append_images=[second])


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"no image", "no image of a known format"),
        (saved(picture(), "JPEG")[:400], "cannot be decoded"),
        (saved(picture())[:-40], "cannot be decoded"),
        (saved(Image.fromarray(np.zeros((8, 8), np.uint16))), "not of 8 bits"),
        (saved(Image.fromarray(np.zeros((8, 8), np.float32)), "TIFF"), "not of 8 bits"),
        (_frames("GIF"), "has 2 frames"),
        (_frames("PNG"), "has 2 frames"),
        (_frames("WEBP"), "has 2 frames"),
        (_frames("TIFF"), "has 2 frames"),
        (saved(picture(), "PPM"), "no image of a known format"),
    ],
)
def test_images_that_are_refused(content: bytes, error: str) -> None:
    with pytest.raises(Failure, match=error):
        image_tensor(plan(), content)


def test_pixels_are_counted_before_they_are_decoded() -> None:
    bomb = saved(Image.new("1", (30_000, PIXELS_MAX // 30_000 + 1)))
    assert len(bomb) < 1 << 20
    with pytest.raises(Failure, match="30000 x 2237 pixels: at most 67108864"):
        image_tensor(plan(), bomb)


def test_a_thin_image_is_not_resized_to_a_giant() -> None:
    with pytest.raises(Failure, match="would be resized to 16384000 x 2048 pixels"):
        image_tensor(plan(shape=(-1, 3, -1, -1), resize=2048), saved(Image.new("1", (8000, 1))))
