# /// script
# dependencies = ["rapidocr==3.10.0", "opencv-python-headless<6", "pillow"]
# ///
"""Finds lines of text in what the detector answers, and cuts them out: any number of them, also none."""

from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rapidocr.ch_ppocr_cls.main import TextClassifier
from rapidocr.ch_ppocr_det.main import TextDetector
from rapidocr.ch_ppocr_det.utils import DBPostProcess
from rapidocr.utils.process_img import get_rotate_crop_image

Numbers = NDArray[np.float32]
_find = DBPostProcess(thresh=0.3, box_thresh=0.5, unclip_ratio=1.6, use_dilation=True)
_line = TextClassifier.__new__(TextClassifier)  # its models are other steps
_line.cls_image_shape = [3, 48, 192]


class Cropped(NamedTuple):
    lines: Annotated[Numbers, ("lines", 3, 48, 192)]  # as the model of angles takes them
    corners: Annotated[Numbers, ("lines", 4, 2)]  # in the page
    boxes: Annotated[Numbers, ("lines", 4, 2)]  # in the picture
    no_text: list[str]
    no_score: list[float]


def crop(
    found: Annotated[Numbers, ("pages", 1, None, None)],
    page: Annotated[NDArray[np.uint8], ("pages", None, None, 3)],
    scale: Annotated[Numbers, ("pages", 5)],
) -> Cropped:
    corners, _ = _find(found, page.shape[1:3])
    corners = TextDetector.sorted_boxes(np.asarray(corners, np.float32).reshape(-1, 4, 2))
    lines = [_line.resize_norm_img(get_rotate_crop_image(page[0], one)) for one in corners]
    of_width, of_height, margin, width, height = scale[0]
    boxes = (corners - [0, margin]) * [of_width, of_height]
    return Cropped(
        np.array(lines, np.float32).reshape(-1, 3, 48, 192), corners, np.clip(boxes, 0, [width, height]), [], []
    )
