# /// script
# dependencies = ["rapidocr==3.10.0", "opencv-python-headless<6", "pillow"]
# ///
"""Turns lines that are upside down, and makes what the reader takes: all of one height and width."""

from typing import Annotated

import cv2
import numpy as np
from numpy.typing import NDArray
from rapidocr.ch_ppocr_rec.main import TextRecognizer
from rapidocr.utils.process_img import get_rotate_crop_image

Numbers = NDArray[np.float32]
HEIGHT, WIDTH_MIN, SURE = 48, 320, 0.9
_reader = TextRecognizer.__new__(TextRecognizer)  # its model is another step
_reader.rec_image_shape = [3, HEIGHT, WIDTH_MIN]


def upright(
    page: Annotated[NDArray[np.uint8], ("pages", None, None, 3)],
    corners: Annotated[Numbers, ("lines", 4, 2)],
    angles: Annotated[Numbers, ("lines", 2)],  # probabilities of 0 and of 180 degrees
) -> Annotated[Numbers, ("lines", 3, HEIGHT, None)]:
    lines = [get_rotate_crop_image(page[0], one) for one in corners]
    turned = [
        cv2.rotate(one, cv2.ROTATE_180) if down > SURE else one for one, (_, down) in zip(lines, angles, strict=True)
    ]
    widest = max(WIDTH_MIN / HEIGHT, *(one.shape[1] / one.shape[0] for one in turned))
    return np.stack([_reader.resize_norm_img(one, widest) for one in turned])
