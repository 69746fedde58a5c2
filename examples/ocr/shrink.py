# /// script
# dependencies = ["rapidocr==3.10.0", "opencv-python-headless<6", "pillow"]
# ///
"""Makes what the detector takes of a picture, and the page from which lines are cut."""

from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from rapidocr.ch_ppocr_det.utils import DetPreProcess
from rapidocr.utils.process_img import apply_vertical_padding, resize_image_within_bounds

SIDES = 30, 2000  # pixels: the least and the largest side of a page


class Shrunk(NamedTuple):
    pixels: Annotated[NDArray[np.float32], (3, None, None)]
    page: Annotated[NDArray[np.uint8], (None, None, 3)]
    scale: Annotated[
        NDArray[np.float32], (5,)
    ]  # of the page's width and height, its margin, the picture's width and height


def shrink(image: Image.Image) -> Shrunk:
    picture = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))[:, :, ::-1]
    page, of_height, of_width = resize_image_within_bounds(picture, *SIDES)
    page, done = apply_vertical_padding(page, {}, 8, SIDES[0])
    height, width = picture.shape[:2]
    scale = np.array([of_width, of_height, done["padding_1"]["top"], width, height], np.float32)
    return Shrunk(DetPreProcess()(page)[0], page, scale)
